"""Documents, their blocks, and the calls of a dense kernel that cover all but the routed blocks.

The block grid restarts at every document. A document that `topk` blocks cover is attended to whole; the
queries of any other attend to their own block, and to the past blocks that the gate picks for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

#: A kernel computes causal attention whole up to about this many keys, so own blocks are cut in half down to
#: it: two causal halves, and the second half's look at the first. Longer blocks waste little.
_CUT, _LONGEST_CUT = 256, 1024


@dataclass(frozen=True)
class Document:
    """Queries [q, q + queries) of all queries are the last of the keys [k, k + keys) of all keys."""

    q: int
    k: int
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """Position of the first query in the document."""
        return self.keys - self.queries

    def is_dense(self, block: int, topk: int) -> bool:
        """Whether every query attends to all keys up to itself."""
        return topk * block >= self.keys


def read_documents(
    cu_q: Tensor, cu_k: Tensor, queries: int, keys: int, max_seqlen: int | None = None
) -> list[Document]:
    """The documents that have queries.

    Args:
        cu_q: int [documents + 1] on the CPU, boundaries of the documents' queries.
        cu_k: the same of their keys.
        queries: all queries.
        keys: all keys.
        max_seqlen: what the caller says of the longest document.

    Raises:
        ValueError: boundaries that do not cover the tokens in order, or a document with more queries than keys.
    """
    bounds = []
    for name, cu, tokens in (("cu_seqlens", cu_k, keys), ("cu_seqlens_q", cu_q, queries)):
        values = cu.tolist()
        if not values or values[0] != 0 or values[-1] != tokens or values != sorted(values):
            raise ValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, got {_short(values)}.")
        bounds.append(values)
    if len(bounds[0]) != len(bounds[1]):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens must divide the same documents, got {len(bounds[1]) - 1} and "
            f"{len(bounds[0]) - 1} of them."
        )
    documents = []
    for (k0, k1), (q0, q1) in zip(*(itertools.pairwise(b) for b in bounds), strict=True):
        if q1 - q0 > k1 - k0:
            raise ValueError(f"document {k0}..{k1} has {q1 - q0} queries but {k1 - k0} keys: give all keys so far.")
        if max_seqlen is not None and k1 - k0 > max_seqlen:
            raise ValueError(f"max_seqlen is {max_seqlen}, but a document of cu_seqlens has {k1 - k0} tokens.")
        if q1 > q0:
            documents.append(Document(q0, k0, q1 - q0, k1 - k0))
    return documents


def seen_by_queries(
    boundaries: Sequence[int], batch: int, queries: int, keys: int, first: int
) -> tuple[list[slice], Tensor, Tensor]:
    """What the queries [first, first + queries) of each row of `keys` tokens see.

    Returns:
        the part of each row, from the first document that has a query up to the last query; int64 boundaries of
        those queries, and of those parts, one row after the other.

    Raises:
        ValueError: boundaries that do not cover the rows in order, or leave out the beginning of a row.
    """
    read_documents(*2 * [torch.tensor(boundaries)], *2 * [batch * keys])
    rows, cu_q, cu_k = [], [0], [0]
    for row in range(batch):
        start, last = row * keys, first + queries
        inside = [b - start for b in boundaries if start <= b <= start + keys]
        if not inside or (inside[0], inside[-1]) != (0, keys):
            raise ValueError(
                f"cu_seqlens must begin a document at each row of {keys} tokens, got {_short(boundaries)}."
            )
        documents = [(a, b) for a, b in itertools.pairwise(inside) if a < last and b > first and a < b]
        rows.append(slice(documents[0][0] if documents else last, last))
        for a, b in documents:
            cu_q.append(cu_q[-1] + min(b, last) - max(a, first))
            cu_k.append(cu_k[-1] + min(b, last) - a)
    return rows, torch.tensor(cu_q), torch.tensor(cu_k)


def sparse_documents(documents: Sequence[Document], block: int, topk: int) -> list[Document]:
    """Those whose queries pick past blocks."""
    return [doc for doc in documents if topk > 1 and not doc.is_dense(block, topk)]


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"


@dataclass(frozen=True)
class Piece:
    """`count` equal attentions in one call: the i-th of queries from q + i * q_step on, keys from k + i * k_step on."""

    q: int
    k: int
    queries: int
    keys: int
    count: int = 1
    q_step: int = 0
    k_step: int = 0

    def rows(self, x_THD: Tensor) -> Tensor:
        """[count, queries, ...], a view of all queries' x."""
        return _windows(x_THD, self.q, self.q_step, self.count, self.queries)

    def columns(self, x_SGD: Tensor) -> Tensor:
        """[count, keys, ...], a view of all keys' x."""
        return _windows(x_SGD, self.k, self.k_step, self.count, self.keys)

    def is_all(self, queries: int, keys: int) -> bool:
        """Whether the piece is all queries and all keys in order, each once."""
        return (
            (self.q, self.k) == (0, 0)
            and (self.count * self.queries, self.count * self.keys) == (queries, keys)
            and (self.count == 1 or (self.q_step, self.k_step) == (self.queries, self.keys))
        )


def _windows(x: Tensor, start: int, step: int, count: int, size: int) -> Tensor:
    row = x.stride(0)
    return x.as_strided(
        (count, size, *x.shape[1:]), (step * row, row, *x.stride()[1:]), x.storage_offset() + start * row
    )


@dataclass
class Pieces:
    """What every query attends to whatever the gate says.

    Attributes:
        causal: cover every query once; as many keys as queries.
        past: without a mask; more keys for some of those queries.
    """

    causal: list[Piece] = field(default_factory=list)
    past: list[Piece] = field(default_factory=list)

    def add_causal(self, q: int, k: int, length: int) -> None:
        _append(self.causal, Piece(q, k, length, length))

    def add_past(self, q: int, k: int, queries: int, keys: int) -> None:
        if queries and keys:
            _append(self.past, Piece(q, k, queries, keys))

    def add_own(self, q: int, k: int, length: int) -> None:
        if not _CUT < length <= _LONGEST_CUT:
            return self.add_causal(q, k, length)
        half = length // 2
        self.add_own(q, k, half)
        self.add_own(q + half, k + half, length - half)
        self.add_past(q + half, k, length - half, half)


def _append(pieces: list[Piece], new: Piece) -> None:
    """Adds to the last piece of its size, if it continues its steps."""
    for i in reversed(range(len(pieces))):
        last = pieces[i]
        if (last.queries, last.keys) == (new.queries, new.keys):
            steps = new.q - last.q, new.k - last.k
            if last.count > 1:
                fits = steps == (last.count * last.q_step, last.count * last.k_step)
                steps = last.q_step, last.k_step
            else:
                fits = steps[0] >= new.queries and steps[1] >= new.keys  # what is written must not overlap
            if fits:
                pieces[i] = replace(last, count=last.count + 1, q_step=steps[0], k_step=steps[1])
                return
            break
    pieces.append(new)


def plan(documents: Sequence[Document], block: int, topk: int) -> Pieces:
    """The pieces of all documents, in an order that depends on nothing but the arguments."""
    pieces = Pieces()
    for doc in documents:
        q, k, end = doc.q, doc.k + doc.offset, doc.k + doc.keys
        if doc.is_dense(block, topk):
            pieces.add_causal(q, k, doc.queries)
            pieces.add_past(q, doc.k, doc.queries, doc.offset)
            continue
        inside = doc.offset % block
        if inside:  # queries begin inside a block
            length = min(block - inside, doc.queries)
            pieces.add_own(q, k, length)
            pieces.add_past(q, k - inside, length, inside)
            q, k = q + length, k + length
        while k < end:
            length = min(block, end - k)
            pieces.add_own(q, k, length)
            q, k = q + length, k + length
    return pieces
