"""Head chunks: attention with the local heads in chunks, so that keys and values of all of them never exist at once.

The keys and values of each chunk are computed from compact ones, used and freed, and recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesValueError
from ..layout.heads import HeadPartition, computed_once


def check_count(head_chunks: int) -> None:
    """Raises ValueError unless head_chunks is an int >= 1."""
    if type(head_chunks) is not int or head_chunks < 1:
        raise UlyssesValueError(f"head_chunks must be an int >= 1, got {head_chunks!r}.")


@dataclass(frozen=True)
class HeadChunks:
    """The local heads of every rank in `count` consecutive chunks, as even as possible; the first have one more head.

    If all heads in order are split into `sizes`, chunk c of rank p is number p * count + c. The ranks exchange their c-th
    chunks together, in which `HeadPartition` gives each rank the heads of its own chunk.

    Raises:
        ValueError: a rank has fewer heads than chunks.
    """

    heads: int
    ranks: int
    count: int

    def __post_init__(self) -> None:
        least = HeadPartition(self.heads, self.ranks).count(self.ranks - 1)
        if not 1 <= self.count <= least:
            raise UlyssesValueError(
                f"head_chunks={self.count} must be from 1 to {least}, the fewest heads that a rank attends with."
            )

    def of_rank(self, rank: int) -> list[slice]:
        """Returns the chunks of a rank's heads."""
        all_heads = HeadPartition(self.heads, self.ranks)
        first, local = all_heads.start(rank), HeadPartition(all_heads.count(rank), self.count)
        return [slice(first + local.start(c), first + local.stop(c)) for c in range(self.count)]

    @property
    def sizes(self) -> list[int]:
        """The number of heads of each chunk of each rank, rank after rank."""
        return [chunk.stop - chunk.start for rank in range(self.ranks) for chunk in self.of_rank(rank)]


@computed_once
def chunks_of_rank(heads: int, ranks: int, count: int, rank: int) -> list[slice]:
    """Returns `HeadChunks(heads, ranks, count).of_rank(rank)`. The caller must not change the list."""
    return HeadChunks(heads, ranks, count).of_rank(rank)


@computed_once
def chunk_sizes(heads: int, ranks: int, count: int) -> list[int]:
    """Returns `HeadChunks(heads, ranks, count).sizes`. The caller must not change the list."""
    return HeadChunks(heads, ranks, count).sizes


class _Sum:
    """The sum of the gradients of the chunks whose backward has run."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, grad: Tensor) -> None:
        if self._total is None:
            self._total = grad.to(accumulation_dtype(grad.dtype), copy=True)
        else:
            self._total.add_(grad)

    def take(self) -> Tensor | None:
        """Returns the sum and begins the next one, for a backward that runs again."""
        total, self._total = self._total, None
        return total


class _Fork(torch.autograd.Function):
    """Returns the same tensor twice: for a chunk, and for the fork of the next chunk.

    Backward: adds the gradient of the chunk to the sum. The fork of the first chunk, whose backward is the last, returns
    the sum. The gradients do not travel along the chain, where autograd would round them to the tensor's dtype.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: _Sum, is_first: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.total, ctx.is_first, ctx.dtype = total, is_first, x.dtype
        return x.view_as(x), x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is not None:
            ctx.total.add(grad)
        total = ctx.total.take() if ctx.is_first else None
        return None if total is None else total.to(ctx.dtype), None, None


def for_chunks(count: int, x: Tensor) -> Iterator[Tensor]:
    """Yields the same tensor once for each chunk. Ask for it right before the chunk is computed.

    Backward runs through the chunks in the opposite order. The gradient of each is added to one sum in fp32 (or wider) and
    freed before the next chunk's backward begins, so the memory does not grow with the number of chunks. The sum is rounded
    once.
    """
    total = _Sum()
    for chunk in range(count):
        of_chunk, x = _Fork.apply(x, total, chunk == 0)
        yield of_chunk


def recomputed(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    """Calls fn and keeps nothing but its arguments; backward calls it again with the same random numbers."""
    return checkpoint(fn, *tensors, use_reentrant=False)
