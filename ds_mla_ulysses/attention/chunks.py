"""Head chunks: attention with the local heads in chunks, so that the tensors of all of them never exist at once.

Each chunk is recomputed in backward. What chunks read in common is computed or exchanged once, and its gradients are summed
over the chunks.

Shape letters:
    B batch                             J KV heads of this rank
    S tokens of the whole sequence      D width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..comm.collectives import accumulation_dtype
from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from ..layout.chunked_exchange import ChunkedExchange
from ..layout.heads import chunks_of_rank, heads_read_by


def check_count(head_chunks: int) -> None:
    """Raises ValueError unless head_chunks is an int >= 1."""
    if type(head_chunks) is not int or head_chunks < 1:
        raise UlyssesValueError(f"head_chunks must be an int >= 1, got {head_chunks!r}.")


class LocalChunks:
    """Head chunks of tensors whose heads are all on this rank. It has the methods of `ChunkedExchange`.

    Args:
        tensors: x_BTHD (or x_TBHD) each.
        heads: consecutive chunks; the first head of the tensors is heads[0].start.
    """

    def __init__(self, tensors: Sequence[Tensor], heads: Sequence[slice]) -> None:
        self.heads = heads
        # The tensors are split, not sliced: each slice's backward would write a gradient of all heads.
        sizes = [chunk.stop - chunk.start for chunk in heads]
        self._pieces = list(zip(*(x.split(sizes, 2) for x in tensors), strict=True))
        self._outs: list[Tensor] = []

    def take(self, chunk: int) -> Sequence[Tensor]:
        return self._pieces[chunk]

    def put(self, chunk: int, out: Tensor) -> None:
        self._outs.append(out)

    def output(self) -> Tensor:
        return torch.cat(self._outs, 2)


def chunks_of(
    tensors: Sequence[Tensor], group: SequenceGroup, count: int, batch_first: bool
) -> ChunkedExchange | LocalChunks:
    """Returns the head chunks of tensors that are exchanged by heads, and starts the first chunk's exchange."""
    if group.size > 1:
        return ChunkedExchange(tensors, group, count, batch_first)
    return LocalChunks(tensors, chunks_of_rank(tensors[0].shape[2], 1, count, 0))


def attend_in_chunks(
    chunks: ChunkedExchange | LocalChunks, shared: Iterable[Sequence[Tensor]], attend: Callable[..., Tensor]
) -> Tensor:
    """Attends with one head chunk after the other, and returns the output of all of them.

    Args:
        chunks: the tensors of each chunk.
        shared: for each chunk, the tensors that it reads and shares with other chunks, as from `for_chunks`.
        attend: `attend(heads, *tensors, *shared) -> out` of a chunk. It is called again in backward.
    """
    for c, (heads, of_chunk) in enumerate(zip(chunks.heads, shared, strict=True)):
        chunks.put(c, recomputed(partial(attend, heads), *chunks.take(c), *of_chunk))
    return chunks.output()


def attend_grouped_in_chunks(
    chunks: ChunkedExchange | LocalChunks, k: Tensor, v: Tensor, group: int, attend: Callable[..., Tensor]
) -> Tensor:
    """As `attend_in_chunks`, for query heads that share KV heads. Each chunk reads the KV heads of its query heads.

    Args:
        k, v: k_BSJD and v_BSJD (or S before B), the KV heads that the query heads of all chunks read.
        group: the number of query heads, out of all of them, that read one KV head.
        attend: `attend(heads, q, k, v) -> out` of a chunk. The number of its query heads is a multiple of the number of
            its KV heads.
    """
    first = chunks.heads[0].start // group
    read = [heads_read_by(heads, group)[0] for heads in chunks.heads]
    ends = sorted({end - first for heads in read for end in (heads.start, heads.stop)})
    sections = list(zip(ends, ends[1:], strict=False))
    readers = [[first + start in range(of.start, of.stop) for of in read] for start, _ in sections]
    sizes = [stop - start for start, stop in sections]
    split = [list(map(for_chunks, map(sum, readers), x.split(sizes, 2))) for x in (k, v)]

    def shared() -> Iterator[list[Tensor]]:
        for c in range(len(read)):
            yield [next(section) for of_x in split for section, by in zip(of_x, readers, strict=True) if by[c]]

    def attend_chunk(heads: slice, q: Tensor, *kv: Tensor) -> Tensor:
        n = len(kv) // 2
        k, v = (x[0] if n == 1 else torch.cat(x, 2) for x in (kv[:n], kv[n:]))
        repeats = heads_read_by(heads, group)[1]
        return attend(heads, q, *(x if repeats is None else repeated(x, repeats) for x in (k, v)))

    return attend_in_chunks(chunks, shared(), attend_chunk)


def repeated(x_BSJD: Tensor, repeats: list[int]) -> Tensor:
    """Repeats KV heads to one head per query head.

    Backward: one `sum` adds the gradients of each head, so that they are rounded once.
    """
    heads = x_BSJD.split(1, dim=2)
    return torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(heads, repeats, strict=True)], dim=2)


class _Sum:
    """The sum of the gradients of the chunks whose backward has run."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._is_given = False

    def add(self, grad: Tensor) -> None:
        if self._total is None:  # a single gradient is kept as it is
            self._total, self._is_given = grad, True
        elif self._is_given:
            self._total = self._total.to(accumulation_dtype(grad.dtype), copy=True).add_(grad)
            self._is_given = False
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
    if count == 1:
        yield x
        return
    total = _Sum()
    for chunk in range(count):
        of_chunk, x = _Fork.apply(x, total, chunk == 0)
        yield of_chunk


def recomputed(fn: Callable[..., Any], *tensors: Tensor) -> Any:
    """Calls fn and keeps nothing but its arguments; backward calls it again with the same random numbers."""
    return checkpoint(fn, *tensors, use_reentrant=False)
