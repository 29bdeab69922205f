"""Head chunks: attention with the local heads in chunks, so that the tensors of all of them never exist at once.

Each chunk is recomputed in backward. Tensors that chunks share are exchanged once, and their gradients are summed over the
chunks.

Shape letters:
    B batch                             J KV heads of this rank
    S tokens of the whole sequence      D width of a head
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..comm.collectives import accumulation_dtype
from ..comm.group import SequenceGroup
from ..comm.kept import is_keeping
from ..errors import UlyssesRuntimeError, UlyssesValueError
from ..layout.chunked_exchange import ChunkedExchange
from ..layout.heads import chunks_of_rank, readers_of_heads


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
        return torch.cat(self._outs, 2).contiguous()


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

    Keys and values are split into sections of heads, at the heads where a chunk begins or ends, or where the number of its
    query heads that read a KV head changes. No chunk needs a copy of keys and values then.

    Args:
        k, v: k_BSJD and v_BSJD (or S before B), the KV heads that the query heads of all chunks read.
        group: the number of query heads, out of all of them, that read one KV head.
        attend: `attend(heads, q, k, v) -> out` of the query heads of a chunk that read one section. The number of query
            heads is a multiple of the number of KV heads.
    """
    readers = [readers_of_heads(heads, group) for heads in chunks.heads]
    ends = sorted({end for of_chunk in readers for end in _ends_of_even_groups(of_chunk)})
    sections = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
    sizes = [of.stop - of.start for of in sections]
    read = [[of.start in of_chunk for of in sections] for of_chunk in readers]  # for each chunk and section
    keys, values = (list(map(for_chunks, map(sum, zip(*read, strict=True)), x.split(sizes, 2))) for x in (k, v))

    def shared() -> Iterator[list[Tensor]]:
        for of_chunk in read:
            yield [next(x) for kv in (keys, values) for x, is_read in zip(kv, of_chunk, strict=True) if is_read]

    def attend_sections(heads: slice, q: Tensor, *kv: Tensor) -> Tensor:
        found = [slice(max(heads.start, of.start * group), min(heads.stop, of.stop * group)) for of in sections]
        found = [of for of in found if of.start < of.stop]
        n = len(found)
        queries = q.split([of.stop - of.start for of in found], 2)
        outs = [attend(*given) for given in zip(found, queries, kv[:n], kv[n:], strict=True)]
        return outs[0] if n == 1 else torch.cat(outs, 2)

    return attend_in_chunks(chunks, shared(), attend_sections)


def _ends_of_even_groups(readers: dict[int, int]) -> list[int]:
    """Returns the first KV head, each one that has another number of readers than the one before, and one past the last."""
    heads = list(readers)
    return [heads[0], *(b for a, b in itertools.pairwise(heads) if readers[a] != readers[b]), heads[-1] + 1]


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
    if is_keeping():
        raise UlyssesRuntimeError(
            "a checkpoint that keeps attention does not go with head_chunks > 1, which frees and recomputes attention chunk by "
            "chunk: leave one of them out."
        )
    return checkpoint(fn, *tensors, use_reentrant=False)
