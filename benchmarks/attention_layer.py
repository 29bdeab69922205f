"""Time and bytes of one MLA layer between its latents and its output: every strategy against stock DeepSpeed.

    python benchmarks/attention_layer.py --ranks 2 --preset deepseek-v2-lite --tokens 4096 --dtype bf16 [--json]

Forward and backward of all sides run in one process group, in turns: kv_b_proj (and q_b_proj if the preset has a query
latent), layout and exchange. Stock is `DistributedAttention`: three all-to-alls of materialised Q, K and V, and one of the
output. all_local has no exchange and is the bound. The core between the exchanges is a stand-in that reads q, k and v as
they arrive and writes fresh gradients; --core sdpa takes a real one. The benchmark starts its own ranks (gloo, one thread
each).

raw_ratio is stock's time divided by a side's. ratio is the same after subtracting from both the time that the projections'
products of T tokens take alone, measured in the same run; the expansion that gather_kv does beyond them counts. Values are
medians over the pairs; min_ms is the shortest. auto is the strategy that "auto" would choose here, from the link and the
rate of products that it measures. --profile prints instead where each side spends its time, by torch's profiler. --plot
FILE.png draws the bytes that each strategy sends.

Letters: B batch · T local tokens · S tokens of the whole sequence · H heads · M local heads · N key width without position ·
R RoPE key width · V value width · L KV latent width · Q query latent width · D = L + R.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import pairs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange import PRESETS, Core
from torch import Tensor

#: The width of the KV latent in every preset.
LATENT_WIDTH = 512
QUERY_LATENT_WIDTHS = {"deepseek-v3": 1536, "kimi-k2": 1536, "glm-4.7-flash": 768}


class Alone(torch.autograd.Function):
    """The end of the side that only projects: it reads neither outputs nor gradients."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, grads: list[Tensor], *projected: Tensor) -> Tensor:
        ctx.grads = grads
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.grads


def sdpa(q: Tensor, k: Tensor, v: Tensor, first_query: int = 0) -> Tensor:
    if first_query or q.shape[1] < k.shape[1]:
        from ds_mla_ulysses.moba import moba_attention

        return moba_attention(q, k, v, k.shape[1], 1, first_query=first_query)  # as a model's local attention does
    width = q.shape[-1]  # with unequal widths it would compute all scores at once
    padded = F.pad(v, (0, width - v.shape[-1]))
    grouped = q.shape[2] > k.shape[2]
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, padded)), is_causal=True, enable_gqa=grouped
    )
    return out.transpose(1, 2)[..., : v.shape[-1]]


class GatheringCore(pairs.Core):
    """The stand-in for more keys than queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        keys, rows = k.flatten(2).sum(-1), q.flatten(2).sum(-1)
        of_values = (v.flatten(2) + keys.unsqueeze(-1)).unflatten(1, (-1, q.shape[1])).sum(1)
        return (of_values + rows.unsqueeze(-1)).view(*q.shape[:3], v.shape[-1])


def compare(args: argparse.Namespace) -> pairs.Comparison:
    from deepspeed.sequence.layer import DistributedAttention

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.hf.head_projections import WithHeads
    from ds_mla_ulysses.layout.exchange import HeadsToTokens
    from ds_mla_ulysses.layout.gather import gather_rows
    from ds_mla_ulysses.layout.widths import MLAWidths
    from ds_mla_ulysses.planner.auto import Auto, decide
    from ds_mla_ulysses.planner.work import Work

    (H, N, R, V), L, Q = PRESETS[args.preset], LATENT_WIDTH, QUERY_LATENT_WIDTHS.get(args.preset)
    T, dtype, group = args.tokens // args.ranks, pairs.DTYPES[args.dtype], SequenceGroup.of(dist.group.WORLD)
    stand_in = args.core == "stand-in"
    core = Core.apply if stand_in else sdpa
    query, latent, shared = (
        torch.randn(1, T, *tail).to(dtype).requires_grad_() for tail in ((Q,) if Q else (H, N + R), (L,), (R,))
    )
    grad = torch.randn(1, T, H, V).to(dtype)

    def projection(width: int, heads_width: int) -> torch.nn.Linear:
        made = torch.nn.Linear(width, H * heads_width, bias=False, dtype=dtype)
        made.forward = WithHeads(made, H)
        return made

    kv_b_proj, q_b_proj = projection(L, N + V), projection(Q, N + R) if Q else None
    widths = {"nope_dim": N, "rope_dim": R, "value_dim": V}
    stock = DistributedAttention(core, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    ours, latent_kv = dmu.UlyssesMLAAttention(core, group, **widths), dmu.LatentKVMLAAttention(core, group, **widths)

    def gathering(split: str) -> dmu.GatherKVMLAAttention:
        def attend(q: Tensor, k: Tensor, v: Tensor, first_query: int) -> Tensor:
            if stand_in:
                return GatheringCore.apply(q, k, v)
            last = first_query + q.shape[1]
            return sdpa(q, k[:, :last], v[:, :last], first_query)

        return dmu.GatherKVMLAAttention(attend, group.with_split(split), **widths)

    def q_of(x: Tensor, heads: slice | None = None) -> Tensor:
        return x if q_b_proj is None else q_b_proj(x, heads=heads).unflatten(-1, (-1, N + R))

    def expand(latent_BSL: Tensor, heads: slice) -> Tensor:
        return kv_b_proj(latent_BSL, heads=heads).unflatten(-1, (-1, N + V))

    def expand_all(latent_BSL: Tensor, heads: slice) -> Tensor:
        return kv_b_proj(latent_BSL).unflatten(-1, (-1, N + V))

    def materialised() -> tuple[Tensor, Tensor, Tensor]:
        kv, k_shared = expand_all(latent, slice(0, H)), shared.unsqueeze(2).expand(-1, -1, H, -1)
        return q_of(query), torch.cat([kv[..., :N], k_shared], -1), kv[..., N:].contiguous()

    def packed() -> Tensor:
        pending = ours.gather_shared_key(shared)
        return ours(q_of(query), expand_all(latent, slice(0, H)), pending)

    own = ours.query_heads(H)

    def latent_qkv() -> Tensor:
        q_BSQ, kv_BSD = gather_rows([query, torch.cat([latent, shared], -1)], group, True)
        k, v = ours.latents.expand(*kv_BSD.split([L, R], -1), True, own, expand)
        out_SBMV = core(q_of(q_BSQ, own), k, v).transpose(0, 1)
        return HeadsToTokens.apply(out_SBMV, H, group, True).transpose(0, 1)

    def projected() -> list[Tensor]:
        return [kv_b_proj(latent)] + ([q_b_proj(query)] if Q else [])

    alone, grads = torch.zeros_like(grad), [torch.randn_like(x) for x in projected()]
    sides = {
        "stock": lambda: stock(*materialised(), 0),
        "packed": packed,
        "latent_kv": lambda: latent_kv(q_of(query), latent, shared, expand=expand),
        "latent_qkv": latent_qkv,
        "gather_kv": lambda: gathering("contiguous")(q_of(query), latent, shared, expand=expand_all),
        "head_tail": lambda: gathering("head_tail")(q_of(query), latent, shared, expand=expand_all),
        "all_local": lambda: core(*materialised()),
        "projections": lambda: Alone.apply(alone, grads, *projected()),
    }
    # Left out: latent_qkv if the preset has no query latent; all_local with a real core, because its sequences would be
    # shorter; head_tail with the stand-in, for which the two splits are the same.
    for name in (["latent_qkv"] if not Q else []) + (["head_tail"] if stand_in else ["all_local"]):
        del sides[name]

    def traffic(name: str) -> tuple[int, int]:
        """Collective calls and sent bytes of a forward and backward."""
        if name == "stock":
            return 8, 2 * T * H * (2 * (N + R) + 2 * V) * (args.ranks - 1) // args.ranks * dtype.itemsize
        with dmu.TrafficMeter() as meter:
            sides[name]().backward(grad)
        return sum(meter.calls.values()), meter.total_bytes

    def rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
        alone = times.pop("projections")
        without = {name: [a - b for a, b in zip(ms, alone, strict=True)] for name, ms in times.items()}
        found = []
        for name, ms in times.items():
            calls, sent = traffic(name)
            ratios = pairs.ratio(without[name], without["stock"]), pairs.ratio(ms, times["stock"])
            found.append(
                {"strategy": name, "calls": calls, "bytes": sent, "ms": round(statistics.median(ms), 2)}
                | {"min_ms": round(min(ms), 2), "ratio": ratios[0], "raw_ratio": ratios[1]}
            )
        return found

    inputs = [query, latent, shared, kv_b_proj.weight] + ([q_b_proj.weight] if Q else [])
    work = Work(MLAWidths(H, N, R, V, L, Q), args.ranks, args.tokens, element_bytes=dtype.itemsize)
    auto = Auto(tokens=args.tokens, sequence=None if args.core == "sdpa" else 1)  # the stand-in does not attend
    _, why = decide(auto, work, {}, group, dtype, torch.device("cpu"))
    return pairs.Comparison(sides, inputs, grad, rows=rows, auto=why)


def plot(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """The bytes that a rank sends per token of its shard, by strategy."""
    local = args.tokens // args.ranks
    bars = {row["strategy"]: {"": row["bytes"] / local / 1024} for row in rows if row["bytes"]}
    title = f"{args.preset}: one layer on {args.ranks} ranks, {args.dtype}"
    pairs.save_bars(args.plot, title, "KiB sent per local token, forward and backward", bars)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v2-lite")
    parser.add_argument("--core", choices=("stand-in", "sdpa"), default="stand-in")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the bytes that each strategy sends (needs matplotlib)")
    pairs.start(compare, parser.parse_args(), plot)
