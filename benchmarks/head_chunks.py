"""Memory and time of one layer whose heads attend in chunks: head_chunks.

    python benchmarks/head_chunks.py --preset deepseek-v3 --tokens 1024 [--json] [--plot memory.png]

peak_MB is the most that forward and backward of one layer hold beside inputs, weights and their gradients, on --memory-ranks
ranks and --memory-tokens tokens. It is counted from the sizes of tensors without computing anything, by torch's MemTracker
over fake tensors. ms is measured on --ranks ranks that are started here (gloo, one thread each) and --tokens tokens, as in
attention_layer.py, with a real attention (scaled_dot_product_attention) in between. With DeepSeek-V3's 128 heads this takes
some minutes; --preset deepseek-v2-lite takes less. With few tokens, keys and values are not most of the memory, and chunks
hold more than they save. --plot FILE.png draws peak_MB.

With MLA, a chunk's keys and values are expanded from latents. A preset without latents, such as llama-3-8b, begins with
queries, keys and values.

Letters: T local tokens · H heads · G KV heads · N key width without position · R RoPE key width · V value width · S, L as in
attention_layer.py.
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
from dense_exchange import PRESETS as DENSE
from exchange import PRESETS as MLA
from torch import Tensor

PRESETS = MLA | DENSE


def strategies(preset: str) -> tuple[str, ...]:
    return ("packed", "latent_kv", "gather_kv") if preset in MLA else ("packed", "gather_kv")


def cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    """Each strategy with the numbers of chunks that a rank has heads for; all are compared with the first number."""
    heads = PRESETS[args.preset][0]
    ranks = {strategy: 1 if strategy == "gather_kv" else args.memory_ranks for strategy in strategies(args.preset)}
    return [(strategy, chunks) for strategy in ranks for chunks in args.chunks if chunks <= heads // ranks[strategy]]


def layer(
    args: argparse.Namespace, strategy: str, chunks: int, tokens: int, group: Any
) -> tuple[Callable, list[Tensor]]:
    """A forward to the output, and its leaves: query, latent, RoPE key and the weight of kv_b_proj; or query, key, value."""
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.head_projections import WithHeads

    if args.preset in DENSE:
        return dense_layer(args, strategy, chunks, tokens, group)
    (H, N, R, V), T, dtype = PRESETS[args.preset], tokens // group.size, pairs.DTYPES[args.dtype]
    q, latent, shared = (
        torch.randn(1, T, *tail, dtype=dtype, requires_grad=True) for tail in ((H, N + R), (LATENT_WIDTH,), (R,))
    )
    kv_b_proj = torch.nn.Linear(LATENT_WIDTH, H * (N + V), bias=False, dtype=dtype)
    kv_b_proj.forward = WithHeads(kv_b_proj, H)
    settings = {"nope_dim": N, "rope_dim": R, "value_dim": V, "head_chunks": chunks}

    def expand(latent_BSL: Tensor, heads: slice) -> Tensor:
        return kv_b_proj(latent_BSL, heads=heads).unflatten(-1, (-1, N + V))

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


def dense_layer(
    args: argparse.Namespace, strategy: str, chunks: int, tokens: int, group: Any
) -> tuple[Callable, list[Tensor]]:
    import ds_mla_ulysses as dmu

    (H, G, D), T, dtype = DENSE[args.preset], tokens // group.size, pairs.DTYPES[args.dtype]
    leaves = [torch.randn(1, T, heads, D, dtype=dtype, requires_grad=True) for heads in (H, G, G)]
    kind = dmu.UlyssesAttention if strategy == "packed" else dmu.GatherKVAttention
    attention = kind(sdpa if strategy == "packed" else of_run, group, head_chunks=chunks)
    return lambda: attention(*leaves), leaves


def of_run(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
    # With fake tensors, a causal sdpa needs as many queries as keys; without causality the memory is the same.
    padded = torch.nn.functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
    q, k, v_padded = (x.transpose(1, 2) for x in (q, k, padded))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v_padded, enable_gqa=q.shape[1] > k.shape[1])
    return out.transpose(1, 2)[..., : v.shape[-1]]


def peaks(args: argparse.Namespace) -> dict[str, float]:
    """MB of each strategy and number of chunks, by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ds_mla_ulysses.comm.group import SequenceGroup

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.memory_ranks)
    group, found = SequenceGroup.of(dist.group.WORLD), {}
    for strategy, chunks in cases(args):
        print(f"counting the memory of {strategy} in {chunks} chunks", file=sys.stderr)
        with FakeTensorMode():
            step, leaves = layer(args, strategy, chunks, args.memory_tokens, group)
            tracker = MemTracker()
            tracker.track_external(*leaves)
            with tracker:
                out = step()
                out.backward(torch.ones_like(out))
            peak = sum(x["Total"] for x in tracker.get_tracker_snapshot("peak").values())
        beside = sum(2 * x.nbytes for x in leaves)  # inputs, weights and their gradients
        found[f"{strategy} {chunks}"] = round((peak - beside) / 1e6, 1)
    dist.destroy_process_group()
    return found


def compare(args: argparse.Namespace) -> pairs.Comparison:
    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD)
    made = {f"{s} {chunks}": layer(args, s, chunks, args.tokens, group) for s, chunks in cases(args)}
    H, V = PRESETS[args.preset][0], PRESETS[args.preset][-1]
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


def plot(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The memory of each strategy, with a bar for each number of chunks."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        label = f"head_chunks={row['chunks']}"
        bars.setdefault(row["strategy"], {})[label] = row["peak_MB"] / 1e3
    title = f"{args.preset}: one layer, {args.memory_tokens} tokens on {args.memory_ranks} ranks, {args.dtype}"
    pairs.save_bars(args.plot, title, "GB at the peak, beside inputs, weights and their gradients", bars)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.set_defaults(tokens=1024, pairs=3)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v3")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--memory-ranks", type=int, default=8, help="ranks for which memory is counted (default 8)")
    parser.add_argument(
        "--memory-tokens", type=int, default=131072, help="tokens for which memory is counted (default 131072)"
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the memory (needs matplotlib)")
    arguments = parser.parse_args()
    arguments.peaks = peaks(arguments)
    pairs.start(compare, arguments, plot)
