"""The layout of wire buffers, and the copies into and out of them.

On the wire, the data of one token is `[block 0: M*D0 | block 1: M*D1 | ...]`.

Shape letters:
    P ranks                             H all heads of a block
    T tokens of this rank               M heads of one rank
    B batch                             D width of a head
                                        W = sum of M*D over the blocks, one token on the wire
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .heads import HeadPartition, chunks_of_rank, computed_once


class HeadSlot(NamedTuple):
    """One rank's heads of one block, and their place on the wire.

    Attributes:
        start, stop: the heads, out of all heads of the block.
        shared: the number of these heads, the first ones, that a rank before has too.
        heads, width: M and D.
        offset, end: the elements of a token on the wire.
    """

    start: int
    stop: int
    shared: int
    heads: int
    width: int
    offset: int
    end: int


@dataclass(frozen=True)
class WirePlan:
    """Where the heads of all blocks lie on the wire. Build it with `wire_plan`.

    Attributes:
        slots: slots[rank][block].
        widths: W of each rank.
        overlaps: for each block, whether several ranks have the same head.
    """

    slots: tuple[tuple[HeadSlot, ...], ...]
    widths: tuple[int, ...]
    overlaps: tuple[bool, ...]


def wire_plan(
    heads: Sequence[int], head_widths: Sequence[int], query_heads: int, size: int, chunk: int = 0, chunks: int = 1
) -> WirePlan:
    """Returns the plan of an exchange, which is computed once for the same numbers.

    Args:
        heads, head_widths: H and D of each block.
        query_heads: the number of query heads that the heads of all blocks follow.
        size: the number of ranks.
        chunk, chunks: the number of the head chunk that is exchanged, and how many there are. With several chunks, the
            heads of all blocks must be query heads.
    """
    # Heads and widths are constants of a compiled graph: `int` turns symbolic ones into numbers.
    return _wire_plan(tuple(map(int, heads)), tuple(map(int, head_widths)), int(query_heads), size, chunk, chunks)


@computed_once
def _wire_plan(
    heads: tuple[int, ...], head_widths: tuple[int, ...], query_heads: int, size: int, chunk: int, chunks: int
) -> WirePlan:
    assert chunks == 1 or set(heads) == {query_heads}
    partitions = [HeadPartition(h, size, query_heads) for h in heads]
    slots, widths = [], []
    for rank in range(size):
        of_chunk = None if chunks == 1 else chunks_of_rank(query_heads, size, chunks, rank)[chunk]
        offset, of_rank = 0, []
        for partition, width in zip(partitions, head_widths, strict=True):
            if of_chunk is None:
                start, stop, shared = partition.start(rank), partition.stop(rank), partition.shared(rank)
            else:
                start, stop, shared = of_chunk.start, of_chunk.stop, 0
            end = offset + (stop - start) * width
            of_rank.append(HeadSlot(start, stop, shared, stop - start, width, offset, end))
            offset = end
        slots.append(tuple(of_rank))
        widths.append(offset)
    overlaps = tuple([chunks == 1 and partition.overlaps for partition in partitions])
    return WirePlan(tuple(slots), tuple(widths), overlaps)


def plan_of(blocks_TBHD: Sequence[Tensor], query_heads: int, size: int, chunk: int = 0, chunks: int = 1) -> WirePlan:
    """Returns the wire plan of blocks with all their heads."""
    heads, widths = [x.shape[2] for x in blocks_TBHD], [x.shape[3] for x in blocks_TBHD]
    return wire_plan(heads, widths, query_heads, size, chunk, chunks)


def write_heads(blocks_TBHD: Sequence[Tensor], plan: WirePlan, shards: Sequence[Tensor]) -> None:
    """Writes each rank's heads of all blocks into its flat shard of the wire."""
    T, B = blocks_TBHD[0].shape[:2]
    for shard, slots in zip(shards, plan.slots, strict=True):
        to_TBW = shard.view(T, B, -1)
        for x, slot in zip(blocks_TBHD, slots, strict=True):
            to = to_TBW[..., slot.offset : slot.end].unflatten(-1, (slot.heads, slot.width))
            to.copy_(x[:, :, slot.start : slot.stop])


def read_heads(
    shards: Sequence[Tensor],
    plan: WirePlan,
    blocks_TBHD: Sequence[Tensor],
    rank: int,
    local: Sequence[Sequence[Tensor]] | None,
) -> None:
    """Writes the heads that arrived from each rank into the blocks.

    Heads that several ranks have are summed in rank order, in fp32 (or wider), and rounded once.

    Args:
        shards: the flat shard of the wire from each rank.
        rank: this rank.
        local: this rank's heads of each block, in pieces along D, if they did not cross the wire.
    """
    T, B = blocks_TBHD[0].shape[:2]
    wide = accumulation_dtype(blocks_TBHD[0].dtype)
    totals = [
        torch.empty_like(x, dtype=wide) if overlaps and x.dtype != wide else x
        for x, overlaps in zip(blocks_TBHD, plan.overlaps, strict=True)
    ]
    for p, (shard, slots) in enumerate(zip(shards, plan.slots, strict=True)):
        for i, slot in enumerate(slots):
            to = totals[i][:, :, slot.start : slot.stop]
            if p == rank and local is not None:
                pieces = local[i]
            else:
                arrived_TBW = shard.view(T, B, plan.widths[p])[..., slot.offset : slot.end]
                pieces = [arrived_TBW.unflatten(-1, (slot.heads, slot.width))]
            if len(pieces) == 1 and not slot.shared:
                to.copy_(pieces[0])
            else:
                write_pieces(pieces, to, slot.shared)
    for x, total in zip(blocks_TBHD, totals, strict=True):
        if total is not x:
            x.copy_(total)


def write_pieces(pieces: Sequence[Tensor], to: Tensor, shared: int = 0) -> None:
    """Writes pieces [..., M, D] side by side along D; adds to the first `shared` heads, which are written already."""
    start = 0
    for piece in pieces:
        stop = start + piece.shape[-1]
        part = to[..., start:stop]
        if shared:
            part[..., :shared, :].add_(piece[..., :shared, :])
        if shared < part.shape[-2]:
            part[..., shared:, :].copy_(piece[..., shared:, :])
        start = stop


def write_side_by_side(blocks: Sequence[Tensor], wire: Tensor) -> None:
    """Writes blocks [..., G, D] into [..., sum of G*D]."""
    start = 0
    for x in blocks:
        stop = start + x.shape[-2] * x.shape[-1]
        wire[..., start:stop].unflatten(-1, x.shape[-2:]).copy_(x)
        start = stop


def shards_of_others(x_PTBW: Tensor, rank: int) -> Tensor | None:
    """Returns the shards of all other ranks as one contiguous view, which only the first and the last rank have."""
    return x_PTBW[1:] if rank == 0 else x_PTBW[:-1] if rank == len(x_PTBW) - 1 else None


def empty_blocks(
    like: Tensor, T: int, B: int, heads: Sequence[int], widths: Sequence[int], batch_first: bool
) -> list[Tensor]:
    """Returns new blocks [B, T, H, D] if batch_first, else [T, B, H, D]."""
    rows = (B, T) if batch_first else (T, B)
    return [like.new_empty(*rows, h, d) for h, d in zip(heads, widths, strict=True)]
