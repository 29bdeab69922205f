"""Time and bytes of one MLA layer between its latents and its output: every strategy against stock DeepSpeed.

    python benchmarks/attention_layer.py --ranks 2 --preset deepseek-v2-lite --tokens 4096 --dtype bf16 [--json]

Forward and backward of all sides run in one process group, alternating: kv_b_proj, layout and exchange. Stock is
`DistributedAttention`, three all-to-alls of materialised Q, K and V and one of the output; all_local has no exchange and
is the bound. The core between the exchanges is a stand-in that reads q, k and v as they come and writes fresh gradients
(--core sdpa: a real one). Starts its own ranks (gloo, one thread each).

raw_ratio is stock's time by a side's; ratio is the same with the time that the products of kv_b_proj take alone, measured
in the same run, taken off both. Medians of the pairs; min_ms is the shortest.
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

#: Of every preset.
LATENT_WIDTH = 512


class Alone(torch.autograd.Function):
    """Ends the projection's side: neither its output nor its gradient is touched."""

    @staticmethod
    def forward(ctx, kv: Tensor, out: Tensor, grad_kv: Tensor) -> Tensor:
        ctx.grad_kv = grad_kv
        return out.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.grad_kv, None, None


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    width = q.shape[-1]  # of unequal widths it would make all scores at once
    padded = F.pad(v, (0, width - v.shape[-1]))
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, padded)), is_causal=True)
    return out.transpose(1, 2)[..., : v.shape[-1]]


def compare(args: argparse.Namespace) -> pairs.Comparison:
    from deepspeed.sequence.layer import DistributedAttention

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.rows import with_heads

    (H, N, R, V), L = PRESETS[args.preset], LATENT_WIDTH
    T, dtype = args.tokens // args.ranks, pairs.DTYPES[args.dtype]
    core = Core.apply if args.core == "stand-in" else sdpa
    q, latent, shared = (torch.randn(1, T, *tail).to(dtype).requires_grad_() for tail in ((H, N + R), (L,), (R,)))
    grad = torch.randn(1, T, H, V).to(dtype)
    projection = torch.nn.Linear(L, H * (N + V), bias=False, dtype=dtype)
    projection.forward = with_heads(projection, H)
    stock = DistributedAttention(core, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    ours = dmu.UlyssesMLAAttention(core, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)

    def materialised() -> tuple[Tensor, Tensor, Tensor]:
        kv = projection(latent).unflatten(-1, (H, -1))
        return q, torch.cat([kv[..., :N], shared.unsqueeze(2).expand(-1, -1, H, -1)], -1), kv[..., N:].contiguous()

    def packed() -> Tensor:
        pending = ours.gather_shared_key(shared)
        return ours(q, projection(latent).unflatten(-1, (H, -1)), pending)

    def expand(latent_BSL: Tensor, heads: slice) -> Tensor:
        return projection(latent_BSL, heads).unflatten(-1, (heads.stop - heads.start, -1))

    out, grad_kv = torch.zeros_like(grad), torch.randn(1, T, H * (N + V)).to(dtype)
    sides = {
        "stock": lambda: stock(*materialised(), 0),
        "packed": packed,
        "latent_kv": lambda: ours(q, latent, shared, expand=expand),
        "all_local": lambda: core(*materialised()),
        "projection": lambda: Alone.apply(projection(latent), out, grad_kv),
    }
    if args.core == "sdpa":
        del sides["all_local"]  # its sequences would be shorter

    def traffic(name: str) -> tuple[int, int]:
        """Calls and bytes of a forward and backward."""
        if name == "stock":
            return 8, 2 * T * H * (2 * (N + R) + 2 * V) * (args.ranks - 1) // args.ranks * dtype.itemsize
        with dmu.TrafficMeter() as meter:
            sides[name]().backward(grad)
        return sum(meter.calls.values()), meter.total_bytes

    def rows(times: dict[str, list[float]]) -> list[dict[str, Any]]:
        alone = times.pop("projection")
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

    return pairs.Comparison(sides, [q, latent, shared, projection.weight], grad, rows=rows)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v2-lite")
    parser.add_argument("--core", choices=("stand-in", "sdpa"), default="stand-in")
    pairs.start(compare, parser.parse_args())
