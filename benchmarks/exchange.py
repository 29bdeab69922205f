"""Time and bytes of one attention layer's exchange: three all-to-alls of materialised K against the packed one.

    python benchmarks/exchange.py --ranks 2 --preset deepseek-v2-lite --tokens 4096 --dtype bf16

Forward and backward of both sides run in one process group, in turns; values are medians over the pairs. The core between
the exchanges is a stand-in that reads q, k and v as they arrive and writes fresh gradients, so the sides differ only in
what they send and copy. The benchmark starts its own ranks (gloo, one thread each).

Letters: H heads · N key width without position · R RoPE key width · V value width · T local tokens.
"""

from __future__ import annotations

import argparse
from typing import Any

import pairs
import torch
import torch.distributed as dist
from torch import Tensor

#: H, N, R and V of the models.
PRESETS = {
    "deepseek-v2-lite": (16, 128, 64, 128),
    "deepseek-v3": (128, 128, 64, 128),
    "kimi-k2": (64, 128, 64, 128),
    "glm-4.7-flash": (20, 192, 64, 256),
}


class Core(pairs.Core):
    """Reads q, k, v through their strides, as an attention kernel does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        rows = q.flatten(2).sum(-1) + k.flatten(2).sum(-1)  # views: the heads of a token are adjacent on both sides
        return (v.flatten(2) + rows.unsqueeze(-1)).view(v.shape)


def compare(args: argparse.Namespace) -> pairs.Comparison:
    from deepspeed.sequence.layer import DistributedAttention

    import ds_mla_ulysses as dmu

    H, N, R, V = PRESETS[args.preset]
    T, dtype = args.tokens // args.ranks, pairs.DTYPES[args.dtype]
    q, kv, shared = (torch.randn(1, T, *tail).to(dtype).requires_grad_() for tail in ((H, N + R), (H, N + V), (R,)))
    grad = torch.randn(1, T, H, V).to(dtype)
    stock = DistributedAttention(Core.apply, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    packed = dmu.UlyssesMLAAttention(Core.apply, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)

    def three_all_to_alls() -> Tensor:
        k = torch.cat([kv[..., :N], shared.unsqueeze(2).expand(-1, -1, H, -1)], dim=-1)
        return stock(q, k, kv[..., N:].contiguous(), 0)

    sides = {"three all-to-alls": three_all_to_alls, "packed": lambda: packed(q, kv, shared)}

    def sent(name: str) -> int:
        if name == "packed":
            return pairs.traffic_of(lambda: sides[name]().backward(grad))
        return 2 * T * H * (2 * (N + R) + 2 * V) * (args.ranks - 1) // args.ranks * dtype.itemsize

    return pairs.Comparison(sides, [q, kv, shared], grad, sent)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v2-lite")
    pairs.start(compare, parser.parse_args())
