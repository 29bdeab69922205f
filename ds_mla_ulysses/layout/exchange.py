"""The exchange between local tokens of all heads and local heads of all tokens: one all-to-all for several tensors.

Before the exchange a rank holds blocks x_TBHD (its tokens, all heads), after it x_SBMD (all tokens, its heads). One
all-to-all carries all blocks. Every block is copied once, straight into the wire buffer, and the receive buffer is read
in place: ranks and tokens are adjacent in it, so [P, T, B, W] is [S, B, W].

| function        | takes            | sends to rank p                  | returns                   |
|-----------------|------------------|----------------------------------|---------------------------|
| tokens_to_heads | blocks x_TBHD    | local tokens, p's heads          | one buffer x_SBW          |
| heads_to_tokens | pieces x_SBMD    | p's tokens, local heads          | blocks x_TBHD             |

The two are each other's adjoint. A head that several ranks have is sent to each of them, and on the way back their
tensors are summed in fp32 (or wider) and rounded once. The data that stays on a rank does not go through the wire buffer
but straight to its destination, wherever the buffers allow it.

`HeadPartition(H, P, query_heads)` assigns the heads of every block, so the number of heads can differ between ranks.

Every function can also exchange one chunk of each rank's heads (`HeadChunks`): then M counts the heads of the chunk.
`chunked_exchange` has the differentiable exchange in chunks.

Shape letters:
    P ranks                             H all heads of a block
    T tokens of this rank               M heads of this rank
    S = P*T, tokens of the sequence     D width of a head
    B batch                             W = sum of M*D over the blocks, one token on the wire
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import all_to_all, start_all_to_all, wait
from ..comm.group import SequenceGroup
from ..comm.kept import ARRIVING, RETURNED, kept
from .wire import (
    WirePlan,
    empty_blocks,
    plan_of,
    read_heads,
    shards_of_others,
    wire_plan,
    write_heads,
    write_pieces,
)


def tokens_to_heads(
    blocks_TBHD: Sequence[Tensor],
    query_heads: int,
    group: SequenceGroup,
    direction: str,
    chunk: int = 0,
    chunks: int = 1,
) -> Tensor:
    """Exchanges all blocks in one all-to-all. Not differentiable.

    Args:
        blocks_TBHD: tensors of one dtype with the same T and B, any strides.
        query_heads: the number of query heads that the heads of all blocks follow.
        direction: "forward" or "backward", for the traffic count.
        chunk, chunks: the number of the head chunk, and how many there are.

    Returns:
        x_SBW, from which `local_heads` takes the blocks.
    """
    plain = query_heads, group.size, group.rank, group.name, direction, chunk, chunks
    return kept(lambda: _tokens_to_heads(list(blocks_TBHD), *plain), ARRIVING)


def start_tokens_to_heads(
    blocks_TBHD: Sequence[Tensor], query_heads: int, group: SequenceGroup, chunk: int = 0, chunks: int = 1
) -> Tensor:
    """Starts the exchange of `tokens_to_heads`, in which the data that stays on the rank takes part too.

    Returns:
        *pending* [S, B, W], for `TokensToHeads`.
    """
    blocks = [x.detach() for x in blocks_TBHD]
    plain = query_heads, group.size, group.rank, group.name, chunk, chunks
    return kept(lambda: _start_tokens_to_heads(blocks, *plain), ARRIVING)


def local_heads(
    x_SBW: Tensor, heads: Sequence[int], widths: Sequence[int], query_heads: int, group: SequenceGroup
) -> list[Tensor]:
    """Returns the blocks x_SBMD in the result of `tokens_to_heads`, as views."""
    slots = wire_plan(heads, widths, query_heads, group.size).slots[group.rank]
    return [x_SBW[..., slot.offset : slot.end].unflatten(-1, (slot.heads, slot.width)) for slot in slots]


def heads_to_tokens(
    pieces_SBMD: Sequence[Tensor],
    heads: Sequence[int],
    query_heads: int,
    group: SequenceGroup,
    direction: str,
    batch_first: bool,
    pieces_per_block: Sequence[int] | None = None,
) -> list[Tensor]:
    """Returns all heads to the ranks of their tokens in one all-to-all. Not differentiable.

    Args:
        pieces_SBMD: tensors of one dtype, any strides. Several pieces can form a block along D.
        heads: H of each block.
        query_heads: the number of query heads that the heads of all blocks follow.
        batch_first: whether results are contiguous as [B, T, H, D] or as [T, B, H, D]. With the caller's layout, no
            further copy is needed.
        pieces_per_block: the number of consecutive pieces that form each block; one by default.

    Returns:
        blocks x_TBHD; with batch_first, views of contiguous [B, T, H, D].
    """
    counts = [1] * len(pieces_SBMD) if pieces_per_block is None else list(pieces_per_block)
    plain = list(heads), query_heads, group.size, group.rank, group.name, direction, batch_first
    out = kept(lambda: _heads_to_tokens(list(pieces_SBMD), counts, *plain), RETURNED)
    return [x.transpose(0, 1) for x in out] if batch_first else out


def write_chunk(
    blocks_SBMD: Sequence[Tensor],
    to_TBHD: Sequence[Tensor],
    group: SequenceGroup,
    direction: str,
    chunk: int,
    chunks: int,
) -> None:
    """Returns one head chunk of every rank to the ranks of its tokens in one all-to-all. Not differentiable.

    Args:
        blocks_SBMD: this rank's heads of the chunk; tensors of one dtype, any strides.
        to_TBHD: the tensors with all heads into which those of the chunk are written.
        direction, chunk, chunks: as in `tokens_to_heads`.
    """
    _write_chunk(list(blocks_SBMD), list(to_TBHD), group.size, group.rank, group.name, direction, chunk, chunks)


class TokensToHeads(torch.autograd.Function):
    """Blocks x_TBHD -> x_SBMD by one all-to-all. Backward: `heads_to_tokens` of all gradients, one all-to-all.

    `pending` is the result of `start_tokens_to_heads` for the same blocks, or None to make the exchange here.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_heads: int,
        group: SequenceGroup,
        batch_first: bool,
        pending: Tensor | None,
        *blocks_TBHD: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.query_heads, ctx.group, ctx.batch_first = query_heads, group, batch_first
        ctx.heads = [x.shape[2] for x in blocks_TBHD]
        x_SBW = tokens_to_heads(blocks_TBHD, query_heads, group, "forward") if pending is None else wait(pending)
        return tuple(local_heads(x_SBW, ctx.heads, [x.shape[3] for x in blocks_TBHD], query_heads, group))

    @staticmethod
    def backward(ctx: Any, *grads_SBMD: Tensor) -> tuple[Any, ...]:
        grads = heads_to_tokens(grads_SBMD, ctx.heads, ctx.query_heads, ctx.group, "backward", ctx.batch_first)
        return None, None, None, None, *grads


class HeadsToTokens(torch.autograd.Function):
    """Query heads x_SBMD -> x_TBHD by one all-to-all. Backward: `tokens_to_heads` of the gradient, one all-to-all."""

    @staticmethod
    def forward(ctx: Any, x_SBMD: Tensor, heads: int, group: SequenceGroup, batch_first: bool) -> Tensor:
        ctx.group, ctx.heads, ctx.width = group, heads, x_SBMD.shape[-1]
        return heads_to_tokens([x_SBMD], [heads], heads, group, "forward", batch_first)[0]

    @staticmethod
    def backward(ctx: Any, grad_TBHD: Tensor) -> tuple[Tensor, None, None, None]:
        x_SBW = tokens_to_heads([grad_TBHD], ctx.heads, ctx.group, "backward")
        return local_heads(x_SBW, [ctx.heads], [ctx.width], ctx.heads, ctx.group)[0], None, None, None


# The operators take plain values, so that a compiled graph can hold them, and wait inside.


@torch.library.custom_op("ds_mla_ulysses::tokens_to_heads", mutates_args=())
def _tokens_to_heads(
    blocks: Sequence[Tensor],
    query_heads: int,
    size: int,
    rank: int,
    group: str,
    direction: str,
    chunk: int,
    chunks: int,
) -> Tensor:
    T, B = blocks[0].shape[:2]
    plan = plan_of(blocks, query_heads, size, chunk, chunks)
    width = plan.widths[rank]
    out = blocks[0].new_empty(size, T, B, width)
    from_others = shards_of_others(out, rank)
    sent, received = [T * B * w for w in plan.widths], [T * B * width] * size
    if from_others is not None:
        sent[rank] = received[rank] = 0
    wire = blocks[0].new_empty(sum(sent))
    shards = list(wire.split(sent))
    if from_others is not None:
        shards[rank] = out[rank]
    write_heads(blocks, plan, shards)
    if size > 1:
        arriving = out if from_others is None else from_others
        all_to_all(arriving.view(-1), wire, received, sent, rank, group, direction)
    return out.view(T * size, B, width)


@_tokens_to_heads.register_fake
def _fake_tokens_to_heads(
    blocks: Sequence[Tensor],
    query_heads: int,
    size: int,
    rank: int,
    group: str,
    direction: str,
    chunk: int,
    chunks: int,
) -> Tensor:
    return _empty_heads(blocks, query_heads, size, rank, chunk, chunks)


@torch.library.custom_op("ds_mla_ulysses::start_tokens_to_heads", mutates_args=())
def _start_tokens_to_heads(
    blocks: Sequence[Tensor], query_heads: int, size: int, rank: int, group: str, chunk: int, chunks: int
) -> Tensor:
    T, B = blocks[0].shape[:2]
    plan = plan_of(blocks, query_heads, size, chunk, chunks)
    sent, received = [T * B * w for w in plan.widths], [T * B * plan.widths[rank]] * size
    wire = blocks[0].new_empty(sum(sent))
    write_heads(blocks, plan, wire.split(sent))
    pending = start_all_to_all(wire, received, sent, rank, group, "forward")
    return pending.view(T * size, B, plan.widths[rank])


@_start_tokens_to_heads.register_fake
def _fake_start_tokens_to_heads(
    blocks: Sequence[Tensor], query_heads: int, size: int, rank: int, group: str, chunk: int, chunks: int
) -> Tensor:
    return _empty_heads(blocks, query_heads, size, rank, chunk, chunks)


def _empty_heads(blocks: Sequence[Tensor], query_heads: int, size: int, rank: int, chunk: int, chunks: int) -> Tensor:
    T, B = blocks[0].shape[:2]
    return blocks[0].new_empty(T * size, B, plan_of(blocks, query_heads, size, chunk, chunks).widths[rank])


@torch.library.custom_op("ds_mla_ulysses::heads_to_tokens", mutates_args=())
def _heads_to_tokens(
    pieces: Sequence[Tensor],
    pieces_per_block: Sequence[int],
    heads: Sequence[int],
    query_heads: int,
    size: int,
    rank: int,
    group: str,
    direction: str,
    batch_first: bool,
) -> list[Tensor]:
    S, B = pieces[0].shape[:2]
    T = S // size
    blocks_PTBMD = _grouped([x.unflatten(0, (size, T)) for x in pieces], pieces_per_block)
    widths = _block_widths(blocks_PTBMD)
    out = empty_blocks(pieces[0], T, B, heads, widths, batch_first)
    out_TBHD = [x.transpose(0, 1) for x in out] if batch_first else out
    _return_heads(blocks_PTBMD, out_TBHD, wire_plan(heads, widths, query_heads, size), rank, group, direction)
    return out


def _return_heads(
    blocks_PTBMD: Sequence[Sequence[Tensor]],
    out_TBHD: Sequence[Tensor],
    plan: WirePlan,
    rank: int,
    group: str,
    direction: str,
) -> None:
    """Exchanges the pieces of each block and writes the heads that arrive into `out_TBHD`."""
    (size, T, B), like = blocks_PTBMD[0][0].shape[:3], blocks_PTBMD[0][0]
    wire, local_travels = _pack_tokens(blocks_PTBMD, plan.widths[rank], rank)

    sent, received = [T * B * plan.widths[rank]] * size, [T * B * w for w in plan.widths]
    if not local_travels:
        sent[rank] = received[rank] = 0
    arrived = like.new_empty(sum(received))
    if size > 1:
        all_to_all(arrived, wire.view(-1), received, sent, rank, group, direction)
    local = None if local_travels else [[x[rank] for x in block] for block in blocks_PTBMD]
    read_heads(arrived.split(received), plan, out_TBHD, rank, local)


@_heads_to_tokens.register_fake
def _fake_heads_to_tokens(
    pieces: Sequence[Tensor],
    pieces_per_block: Sequence[int],
    heads: Sequence[int],
    query_heads: int,
    size: int,
    rank: int,
    group: str,
    direction: str,
    batch_first: bool,
) -> list[Tensor]:
    S, B = pieces[0].shape[:2]
    widths = _block_widths(_grouped(pieces, pieces_per_block))
    return empty_blocks(pieces[0], S // size, B, heads, widths, batch_first)


@torch.library.custom_op("ds_mla_ulysses::write_chunk", mutates_args=("out",))
def _write_chunk(
    blocks: Sequence[Tensor],
    out: Sequence[Tensor],
    size: int,
    rank: int,
    group: str,
    direction: str,
    chunk: int,
    chunks: int,
) -> None:
    blocks_PTBMD = [[x.unflatten(0, (size, -1))] for x in blocks]
    plan = plan_of(out, out[0].shape[2], size, chunk, chunks)
    _return_heads(blocks_PTBMD, out, plan, rank, group, direction)


@_write_chunk.register_fake
def _fake_write_chunk(
    blocks: Sequence[Tensor],
    out: Sequence[Tensor],
    size: int,
    rank: int,
    group: str,
    direction: str,
    chunk: int,
    chunks: int,
) -> None: ...


def _pack_tokens(blocks_PTBMD: Sequence[Sequence[Tensor]], width: int, rank: int) -> tuple[Tensor, bool]:
    """Writes the tokens of every other rank into a wire buffer.

    A single contiguous piece is sent from where it lies. Between the first and the last rank, this rank's tokens lie in
    the middle of it and then travel too.

    Args:
        blocks_PTBMD: the pieces of each block.
        width: W.

    Returns:
        The wire [P-1, T, B, W], and whether this rank's tokens travel; if so the wire is [P, T, B, W].
    """
    first = blocks_PTBMD[0][0]
    if len(blocks_PTBMD) == len(blocks_PTBMD[0]) == 1 and first.is_contiguous():
        whole_PTBW = first.flatten(3)
        others = shards_of_others(whole_PTBW, rank)
        return (whole_PTBW, True) if others is None else (others, False)
    size, T, B = first.shape[:3]
    wire = first.new_empty(size - 1, T, B, width)
    for on_wire, ranks in ((slice(rank), slice(rank)), (slice(rank, None), slice(rank + 1, None))):
        offset = 0
        for block in blocks_PTBMD:
            heads, width_of_head = block[0].shape[3], sum([x.shape[4] for x in block])
            end = offset + heads * width_of_head
            to = wire[on_wire, ..., offset:end].unflatten(-1, (heads, width_of_head))
            write_pieces([x[ranks] for x in block], to)
            offset = end
    return wire, False


def _grouped(pieces: Sequence[Tensor], pieces_per_block: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(pieces)
    return [[next(remaining) for _ in range(n)] for n in pieces_per_block]


def _block_widths(blocks: Sequence[Sequence[Tensor]]) -> list[int]:
    """Returns D of each block, the sum over its pieces."""
    return [sum([x.shape[-1] for x in block]) for block in blocks]
