"""Memory and time of one MLA layer whose heads are expanded and attend in parts: head_chunks.

    python benchmarks/head_chunks.py --preset deepseek-v3 --tokens 1024 [--json]

peak_MB is what forward and backward of one layer hold at most beside inputs, weights and their gradients, counted from the
tensors' sizes without computing anything, on --memory-ranks ranks and --memory-tokens tokens: by torch's MemTracker over
fake tensors. ms is measured, on --ranks ranks that are started here (gloo, one thread each) and --tokens tokens, as in
attention_layer.py, with a real attention (scaled_dot_product_attention) in between: of DeepSeek-V3's 128 heads some
minutes; --preset deepseek-v2-lite takes less. In a few tokens what is held is not keys and values, and parts hold more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import pairs
import torch
import torch.distributed as dist
from attention_layer import LATENT_WIDTH, sdpa
from exchange import PRESETS
from torch import Tensor

STRATEGIES = ("packed", "latent_kv", "gather_kv")


def cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Strategies with the numbers of parts that a rank has heads for; all are compared with the first number."""
    heads = PRESETS[args.preset][0]
    own = {strategy: heads if strategy == "gather_kv" else heads // args.memory_ranks for strategy in STRATEGIES}
    return [(strategy, chunks) for strategy in STRATEGIES for chunks in args.chunks if chunks <= own[strategy]]


def layer(
    args: argparse.Namespace, strategy: str, chunks: int, tokens: int, group: Any
) -> tuple[Callable, list[Tensor]]:
    """A forward from latents to the output, and its leaves: query, latent, shared key and kv_b_proj's weight."""
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.rows import WithHeads

    (H, N, R, V), T, dtype = PRESETS[args.preset], tokens // group.size, pairs.DTYPES[args.dtype]
    q, latent, shared = (
        torch.randn(1, T, *tail, dtype=dtype, requires_grad=True) for tail in ((H, N + R), (LATENT_WIDTH,), (R,))
    )
    kv_b_proj = torch.nn.Linear(LATENT_WIDTH, H * (N + V), bias=False, dtype=dtype)
    kv_b_proj.forward = WithHeads(kv_b_proj, H)
    settings = {"nope_dim": N, "rope_dim": R, "value_dim": V, "head_chunks": chunks}

    def expand(latent_BSL: Tensor, heads: slice) -> Tensor:
        return kv_b_proj(latent_BSL, heads=heads).unflatten(-1, (-1, N + V))

    def of_run(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
        # The fake tensors' sdpa wants as many queries as keys for causality; what is held is the same.
        return torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, torch.nn.functional.pad(v, (0, R))))
        ).transpose(1, 2)[..., :V]

    kinds = {
        "packed": dmu.UlyssesMLAAttention,
        "latent_kv": dmu.LatentKVMLAAttention,
        "gather_kv": dmu.GatherKVMLAAttention,
    }
    attention = kinds[strategy](of_run if strategy == "gather_kv" else sdpa, group, **settings)
    if strategy == "packed":
        return lambda: attention(q, kv_b_proj(latent).unflatten(-1, (H, -1)), shared), [
            q,
            latent,
            shared,
            kv_b_proj.weight,
        ]
    return lambda: attention(q, latent, shared, expand=expand), [q, latent, shared, kv_b_proj.weight]


def peaks(args: argparse.Namespace) -> dict[str, float]:
    """MB of each strategy and number of parts, by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_mla_ulysses.comm.group import SequenceGroup

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.memory_ranks)
    group, found = SequenceGroup.of(dist.group.WORLD), {}
    for strategy, chunks in cases(args):
        print(f"counting what {strategy} holds in {chunks} parts", file=sys.stderr)
        with FakeTensorMode():
            step, leaves = layer(args, strategy, chunks, args.memory_tokens, group)
            tracker = MemTracker()
            tracker.track_external(*leaves)
            with tracker:
                out = step()
                out.backward(torch.ones_like(out))
            peak = sum(x["Total"] for x in tracker.get_tracker_snapshot("peak").values())
        own = sum(2 * x.nbytes for x in leaves)
        found[f"{strategy} {chunks}"] = round((peak - own) / 1e6, 1)
    dist.destroy_process_group()
    return found


def compare(args: argparse.Namespace) -> pairs.Comparison:
    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD)
    made = {f"{s} {chunks}": layer(args, s, chunks, args.tokens, group) for s, chunks in cases(args)}
    H, _, _, V = PRESETS[args.preset]
    grad = torch.randn(1, args.tokens // args.ranks, H, V).to(pairs.DTYPES[args.dtype])

    def rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
        found = []
        for name, ms in times.items():
            strategy, chunks = name.split()
            whole = f"{strategy} {args.chunks[0]}"
            found.append(
                {"strategy": strategy, "chunks": int(chunks), "peak_MB": args.peaks[name]}
                | {"of_one": round(args.peaks[name] / args.peaks[whole], 3), "ms": round(statistics.median(ms), 1)}
                | {"times_as_long": round(1 / pairs.ratio(ms, times[whole]), 2)}
            )
        return found

    leaves = [x for _, found in made.values() for x in found]
    return pairs.Comparison({name: step for name, (step, _) in made.items()}, leaves, grad, rows=rows)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.set_defaults(tokens=1024, pairs=3)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v3")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--memory-ranks", type=int, default=8, help="for which memory is counted (default 8)")
    parser.add_argument("--memory-tokens", type=int, default=131072, help="the same (default 131072)")
    arguments = parser.parse_args()
    arguments.peaks = peaks(arguments)
    pairs.start(compare, arguments)
