"""Which tokens of a sequence each rank holds, and what ranks sent, put back into the sequence's order.

| split      | equal chunks of the sequence | rank r holds                          |
|------------|------------------------------|---------------------------------------|
| contiguous | ranks                        | chunk r                               |
| head_tail  | 2 * ranks                    | chunk r, behind it chunk 2*ranks-1-r  |

Letters: T this rank's tokens · S all tokens (T * ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.group import SequenceGroup


def chunks_of(group: SequenceGroup, rank: int | None = None) -> list[int]:
    """The chunks that a rank holds, in its order; of all ranks, one after the other, if none is named."""
    if rank is None:
        return [chunk for r in range(group.size) for chunk in chunks_of(group, r)]
    if group.split == "contiguous" or group.size == 1:
        return [rank]
    return [rank, 2 * group.size - 1 - rank]


def own_runs(group: SequenceGroup, tokens: int) -> list[slice]:
    """Where this rank's T tokens lie in the sequence: runs without gaps, in order.

    Raises:
        ValueError: tokens that the split does not divide.
    """
    problem = uneven(group, tokens)
    if problem is not None:
        raise ValueError(problem)
    chunks = chunks_of(group, group.rank)
    width = tokens // len(chunks)
    runs = [slice(chunks[0] * width, (chunks[0] + 1) * width)]
    for chunk in chunks[1:]:
        first = chunk * width
        if first == runs[-1].stop:
            runs[-1] = slice(runs[-1].start, first + width)
        else:
            runs.append(slice(first, first + width))
    return runs


def uneven(group: SequenceGroup, tokens: int) -> str | None:
    """What is wrong with T tokens a rank, if the split does not divide them."""
    chunks = len(chunks_of(group, group.rank))
    if tokens % chunks == 0:
        return None
    return (
        f"a rank has {tokens} tokens, which split={group.split!r} does not divide into {chunks}: pad the sequence to a "
        f"multiple of {chunks * group.size}, as shard_batch does."
    )


def in_order(x: Tensor, group: SequenceGroup, dim: int = 0) -> Tensor:
    """What the ranks hold, one after the other along dim, in the order of the sequence; x itself if it is that."""
    held = chunks_of(group)
    if held == sorted(held):
        return x
    parts = x.chunk(len(held), dim)
    return torch.cat([parts[held.index(chunk)] for chunk in range(len(held))], dim)


def by_rank(x: Tensor, group: SequenceGroup, dim: int = 0) -> Tensor:
    """The inverse of `in_order`."""
    held = chunks_of(group)
    if held == sorted(held):
        return x
    parts = x.chunk(len(held), dim)
    return torch.cat([parts[chunk] for chunk in held], dim)
