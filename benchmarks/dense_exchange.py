"""Time and bytes of one layer's exchange with grouped heads: stock UlyssesSPAttentionHF against UlyssesAttention.

    python benchmarks/dense_exchange.py --ranks 2 --preset llama-3-8b --tokens 4096 --dtype bf16

Forward and backward of both sides run in one process group, in turns; values are medians over the pairs. The core between
the exchanges returns q and writes fresh gradients, so the sides differ only in what they send and copy: stock gives the
core copies [B, heads, S, D], UlyssesAttention gives it views of the receive buffer. Both start from projections
[B, T, heads, D]. Stock also gathers position_ids in every layer, which counts in its time but not in its bytes.

Letters: B batch · T local tokens · S tokens of the whole sequence · H query heads · G KV heads · D head width.
"""

from __future__ import annotations

import argparse
from typing import Any

import pairs
import torch
import torch.distributed as dist
from torch import Tensor

#: H, G and D of the models.
PRESETS = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (64, 8, 128),
    "gemma-2b": (8, 1, 256),
}


class Core(pairs.Core):
    """Returns q as a new contiguous tensor [B, S, heads, D], as a kernel writes its output."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads_first: bool) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return (q.transpose(1, 2) if heads_first else q).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *pairs.Core.backward(ctx, grad), None


def compare(args: argparse.Namespace) -> pairs.Comparison:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from ds_mla_ulysses.attention.ulysses import UlyssesAttention

    H, G, D = PRESETS[args.preset]
    T, dtype = args.tokens // args.ranks, pairs.DTYPES[args.dtype]
    q, k, v = (torch.randn(1, T, heads, D).to(dtype).requires_grad_() for heads in (H, G, G))
    grad = torch.randn(1, T, H, D).to(dtype)
    positions = dist.get_rank() * T + torch.arange(T).unsqueeze(0)
    module = torch.nn.Module()
    stock = UlyssesSPAttentionHF(
        lambda module, q, k, v, mask, **kwargs: (Core.apply(q, k, v, True), None),
        batch_size=1,
        attn_head_count=H,
        attn_head_size=D,
        kv_head_count=G,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        seq_length_is_variable=True,
    )
    ours = UlyssesAttention(lambda q, k, v: Core.apply(q, k, v, False), dist.group.WORLD)

    def four_all_to_alls() -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return stock(module, *heads_first, None, position_ids=positions)[0].view(grad.shape)

    sides = {"four all-to-alls": four_all_to_alls, "packed": lambda: ours(q, k, v)}

    def sent(name: str) -> int:
        found: list[int] = []
        original = deepspeed.comm.all_to_all_single

        def counted(output: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append(x.nbytes - x.nbytes // dist.get_world_size())
            return original(output, x, *args, **kwargs)

        deepspeed.comm.all_to_all_single = counted
        try:
            ours = pairs.traffic_of(lambda: sides[name]().backward(grad))
        finally:
            deepspeed.comm.all_to_all_single = original
        return ours + sum(found)

    return pairs.Comparison(sides, [q, k, v], grad, sent)


if __name__ == "__main__":
    parser = pairs.parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="llama-3-8b")
    pairs.start(compare, parser.parse_args())
