"""The gather of local tokens into the whole sequence, all heads: one all-gather for several tensors.

| function     | takes                          | sends to rank p           | returns             |
|--------------|--------------------------------|---------------------------|---------------------|
| GatherTokens | blocks x_TBGD                  | local tokens, all heads   | blocks x_SBGD       |
| gather_rows  | tensors without heads, x_BTW   | local tokens              | x_BSW               |

The backward of both is one all-to-all with the bytes of a reduce-scatter: each rank receives the other ranks' gradients
of its tokens, sums them in fp32 (or wider) and rounds once. A rank's gradient of its own tokens does not cross the wire.

Shape letters:
    P ranks                             G all heads of a block
    T tokens of this rank               D width of a head
    S = P*T, tokens of the sequence     W one token on the wire, the sum of G*D over the blocks
    B batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype, all_to_all, start_all_gather, wait
from ..comm.group import SequenceGroup
from ..comm.kept import ARRIVING, kept
from .split import by_rank, in_order
from .wire import empty_blocks, write_side_by_side


class GatherTokens(torch.autograd.Function):
    """Blocks x_TBGD -> x_SBGD, all heads of all tokens in the order of the sequence, by one all-gather.

    Backward: one all-to-all, then a sum over the ranks in fp32 (or wider) that is rounded once.

    `pending` is the result of `start_gather_tokens` for the same blocks, or None to start the gather here.
    """

    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, batch_first: bool, pending: Tensor | None, *blocks_TBGD: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.batch_first = group, batch_first
        x_SBW = wait(start_gather_tokens(blocks_TBGD, group) if pending is None else pending)
        x_SBW = in_order(x_SBW, group)
        shapes = [x.shape[2:] for x in blocks_TBGD]
        parts = x_SBW.split([shape.numel() for shape in shapes], dim=-1)
        return tuple([x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads_SBGD: Tensor) -> tuple[Any, ...]:
        group = ctx.group
        grads = [by_rank(x, group) for x in grads_SBGD]
        out = _return_tokens(grads, group.size, group.rank, group.name, ctx.batch_first)
        return None, None, None, *([x.transpose(0, 1) for x in out] if ctx.batch_first else out)


def start_gather_tokens(blocks_TBGD: Sequence[Tensor], group: SequenceGroup) -> Tensor:
    """Starts gathering blocks of one dtype side by side.

    Returns:
        *pending* [S, B, W], for `GatherTokens`.
    """
    blocks = [x.detach() for x in blocks_TBGD]
    return kept(lambda: _start_gather_tokens(blocks, group.size, group.name), ARRIVING)


def start_gather_rows(rows: Sequence[Tensor], group: SequenceGroup, batch_first: bool) -> Tensor:
    """Starts gathering tensors without heads, [B, T, W] if batch_first, else [T, B, W].

    Returns:
        *pending* [S, B, sum of W], for `gather_rows`.
    """
    return start_gather_tokens(_as_blocks(rows, batch_first), group)


def gather_rows(
    rows: Sequence[Tensor], group: SequenceGroup, batch_first: bool, pending: Tensor | None = None
) -> list[Tensor]:
    """Gathers tensors without heads by one all-gather; the results have the layout of the arguments.

    Args:
        rows: x_BTW if batch_first, else x_TBW; of one dtype.
        pending: the result of `start_gather_rows` for the same tensors, or None to start the gather here.

    Backward: as in `GatherTokens`.
    """
    blocks_SB1W = GatherTokens.apply(group, batch_first, pending, *_as_blocks(rows, batch_first))
    return [x.squeeze(2).transpose(0, 1) if batch_first else x.squeeze(2) for x in blocks_SB1W]


def _as_blocks(rows: Sequence[Tensor], batch_first: bool) -> list[Tensor]:
    """Returns [T, B, 1, W] each."""
    return [(x.transpose(0, 1) if batch_first else x).unsqueeze(2) for x in rows]


# The operators take plain values, so that a compiled graph can hold them.


@torch.library.custom_op("ds_mla_ulysses::start_gather_tokens", mutates_args=())
def _start_gather_tokens(blocks: Sequence[Tensor], size: int, group: str) -> Tensor:
    T, B = blocks[0].shape[:2]
    wire_TBW = blocks[0].new_empty(T, B, sum(_token_widths(blocks)))
    write_side_by_side(blocks, wire_TBW)
    return start_all_gather(wire_TBW, size, group, "forward")


@_start_gather_tokens.register_fake
def _fake_start_gather_tokens(blocks: Sequence[Tensor], size: int, group: str) -> Tensor:
    T, B = blocks[0].shape[:2]
    return blocks[0].new_empty(T * size, B, sum(_token_widths(blocks)))


@torch.library.custom_op("ds_mla_ulysses::return_tokens", mutates_args=())
def _return_tokens(grads: Sequence[Tensor], size: int, rank: int, group: str, batch_first: bool) -> list[Tensor]:
    T, B = grads[0].shape[0] // size, grads[0].shape[1]
    grads_PTBGD, widths = [x.unflatten(0, (size, T)) for x in grads], _token_widths(grads)
    wire = grads[0].new_empty(size - 1, T, B, sum(widths))
    write_side_by_side([x[:rank] for x in grads_PTBGD], wire[:rank])
    write_side_by_side([x[rank + 1 :] for x in grads_PTBGD], wire[rank:])

    arrived, sent = torch.empty_like(wire), [T * B * sum(widths)] * size
    sent[rank] = 0
    all_to_all(arrived.view(-1), wire.view(-1), sent, sent, rank, group, "backward")

    out = _empty_tokens(grads, size, batch_first)
    for to, local, others in zip(out, grads_PTBGD, arrived.split(widths, dim=-1), strict=True):
        total = others.sum(0, dtype=accumulation_dtype(local.dtype)).unflatten(-1, local.shape[-2:]).add_(local[rank])
        (to.transpose(0, 1) if batch_first else to).copy_(total)
    return out


@_return_tokens.register_fake
def _fake_return_tokens(grads: Sequence[Tensor], size: int, rank: int, group: str, batch_first: bool) -> list[Tensor]:
    return _empty_tokens(grads, size, batch_first)


def _token_widths(blocks: Sequence[Tensor]) -> list[int]:
    """Returns G*D of each block."""
    return [x.shape[2] * x.shape[3] for x in blocks]


def _empty_tokens(grads: Sequence[Tensor], size: int, batch_first: bool) -> list[Tensor]:
    S, B = grads[0].shape[:2]
    return empty_blocks(grads[0], S // size, B, [x.shape[2] for x in grads], [x.shape[3] for x in grads], batch_first)
