"""Attention of the own heads in parts, one after the other, so that keys and values of all of them never exist at once.

Each part makes its keys and values of compact ones, attends, and forgets them: backward makes them once more.

Letters: B batch · T this rank's tokens · S all tokens · H all heads · M own heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..comm.collectives import accumulation_dtype
from ..layout.heads import HeadPartition


def check_count(head_chunks: int) -> None:
    """Refuses what is no number of parts.

    Raises:
        ValueError: that.
    """
    if type(head_chunks) is not int or head_chunks < 1:
        raise ValueError(f"head_chunks must be a positive number of parts, got {head_chunks!r}.")


@dataclass(frozen=True)
class HeadChunks:
    """The own heads of every rank in `count` consecutive parts, as even as possible; the first have one head more.

    The c-th parts of all ranks are shared among them as `HeadPartition` shares so many heads. Of all heads in order, split
    into `sizes`, part c of rank p is the one with number p * count + c.

    Raises:
        ValueError: fewer own heads than parts.
    """

    heads: int
    ranks: int
    count: int

    def __post_init__(self) -> None:
        least = HeadPartition(self.heads, self.ranks).count(self.ranks - 1)
        if not 1 <= self.count <= least:
            raise ValueError(
                f"head_chunks={self.count} must be from 1 to {least}, the fewest heads that a rank attends with."
            )

    def of_rank(self, rank: int) -> list[slice]:
        """The parts of a rank's heads."""
        all_heads = HeadPartition(self.heads, self.ranks)
        first, own = all_heads.start(rank), HeadPartition(all_heads.count(rank), self.count)
        return [slice(first + own.start(c), first + own.stop(c)) for c in range(self.count)]

    @property
    def sizes(self) -> list[int]:
        """Heads of each part of each rank, rank after rank."""
        return [part.stop - part.start for rank in range(self.ranks) for part in self.of_rank(rank)]


class ForChunks(torch.autograd.Function):
    """The same tensor for each part. Backward: their gradients are summed in fp32 (or wider) and rounded once."""

    @staticmethod
    def forward(ctx, count: int, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        total = grads[0].to(accumulation_dtype(grads[0].dtype), copy=True)
        for grad in grads[1:]:
            total.add_(grad)
        return None, total.to(grads[0].dtype)


def recomputed(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    """fn of the tensors, of which nothing but they are kept; backward calls it once more, with the same random numbers."""
    return checkpoint(fn, *tensors, use_reentrant=False)
