"""Checks on one GPU in under five minutes: answers in bf16, the speed of copies, and MoBA against dense flash attention.

    python benchmarks/gpu_check.py --out benchmarks/results/gpu_check.json

| part       | comparison                                                                                    |
|------------|-----------------------------------------------------------------------------------------------|
| strategies | every strategy in bf16 over ranks that are threads of this process, with one process in fp64  |
| copies     | the time in which the exchange fills its wire buffer, with a plain copy of as many bytes      |
| moba       | every implementation with dense flash attention, forward and backward: time, memory, error    |

Ranks are threads, as in torch's tests of distributed code. Collectives are copies inside the process, so no number here
says anything about links. The script uses neither DeepSpeed's engine nor transformers. --device cpu runs the same code with
sizes that suit a CPU, which only tests the script. If an answer is wrong, the script says so and its exit status is 1.

Letters: T local tokens · S tokens of the whole sequence · H heads · M local heads · N key width without position · R RoPE key
width · V value width · L KV latent width · G KV heads · D head width · W width of a row on the wire.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

#: H, N, R, V and L of DeepSeek-V3, with fewer heads.
WIDTHS = (16, 128, 64, 128, 512)
RANKS = 4
#: An answer may be at most this many times as far from fp64 as one process in bf16.
BUDGET = 2.0


def causal(q: Tensor, k: Tensor, v: Tensor, first_query: int = 0) -> Tensor:
    """Causal attention [B, T, M, V] with a mask, in any dtype: simple, and slow."""
    T, S = q.shape[1], k.shape[1]
    allowed = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(first_query)
    scores = torch.einsum("bqhd,bshd->bhqs", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bhqs,bshv->bqhv", weights, v)


def one_process(q: Tensor, latent: Tensor, shared: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients with materialised K."""
    H, N = WIDTHS[:2]
    leaves = [x.detach().clone().requires_grad_() for x in (q, latent, shared, weight)]
    kv = F.linear(leaves[1], leaves[3]).unflatten(-1, (H, -1))
    k = torch.cat([kv[..., :N], leaves[2].unsqueeze(2).expand(-1, -1, H, -1)], -1)
    out = causal(leaves[0], k, kv[..., N:])
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def over_ranks(strategy: str, head_chunks: int, whole: list[Tensor]) -> list[Tensor]:
    """The same over ranks: output and gradients of all tokens; the gradient of the weight is summed over the ranks."""
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.hf.head_projections import LinearRows
    from ds_mla_ulysses.layout.split import local_runs

    (H, N, R, V, _), S = WIDTHS, whole[0].shape[1]
    weight, kept = whole[3], [torch.zeros_like(x) for x in (whole[4], *whole[:4])]
    lock = threading.Lock()

    def rank() -> None:
        split = "head_tail" if strategy == "head_tail" else "contiguous"
        group = SequenceGroup.of(torch.distributed.group.WORLD).with_split(split)
        runs = local_runs(group, S // group.size)

        def mine(x: Tensor) -> Tensor:
            return torch.cat([x[:, run] for run in runs], 1)

        leaves = [mine(x).requires_grad_() for x in whole[:3]]
        w = weight.detach().clone().requires_grad_()

        def expand(latent: Tensor, heads: slice) -> Tensor:
            rows = LinearRows.apply(latent, w, None, heads.start * (N + V), heads.stop * (N + V))
            return rows.unflatten(-1, (-1, N + V))

        kinds = {"packed": dmu.UlyssesMLAAttention, "latent_kv": dmu.LatentKVMLAAttention}
        kind = kinds.get(strategy, dmu.GatherKVMLAAttention)
        attention = kind(causal, group, nope_dim=N, rope_dim=R, value_dim=V, head_chunks=head_chunks)
        if strategy == "packed":
            out = attention(leaves[0], expand(leaves[1], slice(0, H)), leaves[2])
        else:
            out = attention(*leaves, expand=expand)
        out.backward(mine(whole[4]))
        with lock:
            for to, x in zip(kept, (out.detach(), *(x.grad for x in leaves)), strict=False):
                for run, part in zip(runs, x.split([r.stop - r.start for r in runs], 1), strict=True):
                    to[:, run] = part
            kept[4] += w.grad

    as_threads(rank)
    return kept


def as_threads(rank: Callable[[], None]) -> None:
    """Runs a function on ranks that are threads. If a thread raises an exception, it is raised here."""
    import torch.distributed as dist
    from torch._C import _distributed_c10d
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    store, raised = dist.HashStore(), []

    def worker(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=RANKS, store=store)
        try:
            # Each backward runs in the thread of its rank: the device's thread is shared, and would wait for itself.
            with torch.autograd.set_multithreading_enabled(False):
                rank()
        except BaseException as error:
            raised.append(error)
            ProcessLocalGroup.exception_handle(error)  # the others wait for this rank
        finally:
            dist.destroy_process_group()

    _distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=worker, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        _uninstall_threaded_pg()
        _distributed_c10d._set_thread_isolation_mode(False)
        ProcessLocalGroup.reset()
    if raised:
        raise raised[0]


def strategies(device: str, tokens: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    H, N, R, V, L = WIDTHS
    shapes = [(2, tokens, H, N + R), (2, tokens, L), (2, tokens, R), (H * (N + V), L), (2, tokens, H, V)]
    narrow = [torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in shapes]
    narrow[3] *= L**-0.5
    exact = one_process(*(x.double() for x in narrow))

    def errors(found: list[Tensor]) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]

    budget = errors(one_process(*narrow))
    rows = []
    for strategy, chunks in (("packed", 1), ("latent_kv", 1), ("gather_kv", 1), ("head_tail", 1), ("latent_kv", 2)):
        found = errors(over_ranks(strategy, chunks, narrow))
        worst = max(a / b for a, b in zip(found, budget, strict=True))
        rows.append(
            {"strategy": strategy, "head_chunks": chunks, "times_one_process_error": round(worst, 3)}
            | {"errors": [float(f"{x:.3g}") for x in found], "right": worst <= BUDGET}
        )
    return rows


def milliseconds(step: Callable[[], Any], device: str, repeats: int = 11) -> float:
    """The median time of a step, after two that do not count."""
    found = []
    for _ in range(repeats + 2):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        found.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(found[2:])


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def copies(device: str, tokens: int) -> list[dict[str, Any]]:
    """The wire buffers of both exchanges, filled by the functions of the exchange."""
    from ds_mla_ulysses.layout.wire import plan_of, write_heads, write_side_by_side

    H, N, R, V, L = WIDTHS
    q, kv = (torch.randn(tokens, 1, H, d, device=device).bfloat16() for d in (N + R, N + V))
    latent, shared = (torch.randn(tokens, 1, 1, d, device=device).bfloat16() for d in (L, R))
    rows = []
    for name, blocks in (("by heads", [q, kv]), ("gathered", [latent, shared])):
        elements = sum(x.numel() for x in blocks)
        wire, plain = (torch.empty(elements, dtype=torch.bfloat16, device=device) for _ in range(2))
        if name == "by heads":
            plan, shards = plan_of(blocks, H, RANKS), wire.chunk(RANKS)
            ours = milliseconds(partial(write_heads, blocks, plan, shards), device)
        else:
            rows_TBW = wire.view(tokens, 1, -1)
            ours = milliseconds(lambda blocks=blocks, to=rows_TBW: write_side_by_side(blocks, to), device)
        bound = milliseconds(lambda wire=wire, plain=plain: plain.copy_(wire), device)
        rows.append(
            {"wire": name, "MB": round(2e-6 * elements, 1), "ms": round(ours, 4), "plain_copy_ms": round(bound, 4)}
            | {"GB_per_s": round(4e-6 * elements / ours, 1), "of_plain_copy": round(bound / ours, 3)}
        )
    return rows


def moba(device: str, lengths: list[int], block: int, topk: int, deadline: float) -> list[dict[str, Any]]:
    """Dense attention and every implementation that the device has, until the time is up."""
    from ds_mla_ulysses.moba import moba_attention

    rows = []
    names = ("flash", "triton") if device != "cpu" else ("torch",)
    H, G, D = (32, 8, 128) if device != "cpu" else (2, 1, 64)
    for tokens in lengths:
        if time.perf_counter() > deadline:
            rows.append({"tokens": tokens, "left_out": "the time was up"})
            continue
        generator = torch.Generator().manual_seed(tokens)
        q, k, v, grad = (
            torch.randn(1, tokens, heads, D, generator=generator).to(device, torch.bfloat16) for heads in (H, G, G, H)
        )

        def step(name: str, q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = grad) -> list[Tensor]:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            if name == "dense":
                heads_first = (x.transpose(1, 2) for x in leaves)
                out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=H != G).transpose(1, 2)
            else:
                out = moba_attention(*leaves, block, topk, implementation=name)
            out.backward(grad)
            return [out.detach(), *(x.grad for x in leaves)]

        found: dict[str, Any] = {"tokens": tokens}
        reference = None
        for name in ("dense", *names):
            try:
                if device != "cpu":
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                result = step(name)
                ms = milliseconds(lambda name=name: step(name), device, 3 if tokens > 65536 else 5)
            except (RuntimeError, ValueError) as error:  # an implementation that fails must not hide the others
                found[name] = {"failed": str(error).splitlines()[0][:300]}
                continue
            found[name] = {"ms": round(ms, 2)}
            if device != "cpu":
                found[name]["peak_MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
            if name != "dense":
                found[name]["times_as_fast"] = round(found["dense"]["ms"] / ms, 2)
                if reference is None:
                    reference = name, result
                else:  # a gate may decide a near tie differently
                    pairs = zip(result, reference[1], strict=True)
                    worst = max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
                    found[name][f"distance_from_{reference[0]}"] = float(f"{worst:.3g}")
            del result
        rows.append(found)
    return rows


def versions() -> dict[str, str | None]:
    found = {}
    for package in ("torch", "triton", "deepspeed", "transformers"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="also write the result to this file")
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens for MoBA; default 8K to 256K")
    parser.add_argument("--seconds", type=float, default=240, help="start no further length of MoBA after this time")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check.py: there is no GPU here; --device cpu tests the script itself.")
    on_gpu, begin = args.device == "cuda", time.perf_counter()
    lengths = args.lengths or ([2**n for n in range(13, 19)] if on_gpu else [1024])
    block, topk = (512, 3) if not on_gpu else (4096, 12)
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(sys.stderr):  # output of libraries goes to stderr
        result = {
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "versions": versions(),
            "strategies": strategies(args.device, 1024 if on_gpu else 64),
            "copies": copies(args.device, 32768 if on_gpu else 1024),
            "moba": moba(args.device, lengths, min(block, min(lengths) // 4), topk, begin + args.seconds),
            "seconds": round(time.perf_counter() - begin, 1),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    wrong = [row["strategy"] for row in result["strategies"] if not row["right"]]
    if wrong:
        sys.exit(f"gpu_check.py: more than {BUDGET} times the error of one process: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
