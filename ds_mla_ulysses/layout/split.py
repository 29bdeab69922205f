"""The split of a sequence over ranks, and the way back to the order of the sequence.

A sequence is cut into equal pieces, of which each rank holds one or two.

| split      | pieces of the sequence | rank r holds                              |
|------------|------------------------|-------------------------------------------|
| contiguous | ranks                  | piece r                                   |
| head_tail  | 2 * ranks              | piece r, followed by piece 2*ranks-1-r    |

Shape letters:
    T tokens of this rank               S tokens of the whole sequence
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError


def pieces_of(group: SequenceGroup, rank: int | None = None) -> list[int]:
    """Returns the pieces that a rank holds, in its order; without a rank, those of all ranks, one after the other."""
    ranks = range(group.size) if rank is None else [rank]
    if group.split == "contiguous" or group.size == 1:
        return list(ranks)
    return [piece for r in ranks for piece in (r, 2 * group.size - 1 - r)]


def local_runs(group: SequenceGroup, tokens: int) -> list[slice]:
    """Returns the places of this rank's T tokens in the sequence, as runs of consecutive tokens, in order.

    Raises:
        ValueError: a number of tokens that the split does not divide.
    """
    problem = uneven(group, tokens)
    if problem is not None:
        raise UlyssesValueError(problem)
    pieces = pieces_of(group, group.rank)
    width = tokens // len(pieces)
    runs = [slice(pieces[0] * width, (pieces[0] + 1) * width)]
    for piece in pieces[1:]:
        first = piece * width
        if first == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, first + width)
        else:
            runs.append(slice(first, first + width))
    return runs


def uneven(group: SequenceGroup, tokens: int) -> str | None:
    """Returns the error message if the split does not divide T tokens of a rank, else None."""
    pieces = len(pieces_of(group, group.rank))
    if tokens % pieces == 0:
        return None
    return (
        f"a rank has {tokens} tokens, which split={group.split!r} does not divide into {pieces}: pad the sequence to a "
        f"multiple of {pieces * group.size}, as shard_batch does."
    )


def in_order(x: Tensor, group: SequenceGroup, dim: int = 0) -> Tensor:
    """Puts the tokens of all ranks, one rank after the other along dim, into the order of the sequence.

    Returns x itself if it has that order already.
    """
    held = pieces_of(group)
    if held == sorted(held):
        return x
    pieces = x.chunk(len(held), dim)
    return torch.cat([pieces[held.index(piece)] for piece in range(len(held))], dim)


def by_rank(x: Tensor, group: SequenceGroup, dim: int = 0) -> Tensor:
    """The inverse of `in_order`."""
    held = pieces_of(group)
    if held == sorted(held):
        return x
    pieces = x.chunk(len(held), dim)
    return torch.cat([pieces[piece] for piece in held], dim)
