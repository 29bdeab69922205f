"""Documents within flattened tokens: reads `cu_seqlens` and checks that they fit the tokens.

Block boundaries restart at every document. If `top_k` blocks cover a document, its attention is dense. In any other
document, each query attends to its current block and to the past blocks that the gate picks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UlyssesValueError


@dataclass(frozen=True)
class Document:
    """A document whose queries belong to its last keys.

    Attributes:
        q: index of its first query among all queries.
        k: index of its first key among all keys.
        queries: number of its queries.
        keys: number of its keys.
    """

    q: int
    k: int
    queries: int
    keys: int

    @property
    def offset(self) -> int:
        """The position of the first query within the document."""
        return self.keys - self.queries

    def is_dense(self, block_size: int, top_k: int) -> bool:
        """Returns whether `top_k` blocks cover the document, so that every query attends to all keys up to itself."""
        return top_k * block_size >= self.keys


def read_documents(
    cu_q: Tensor, cu_k: Tensor, queries: int, keys: int, max_seqlen: int | None = None
) -> list[Document]:
    """Returns the documents that have queries.

    Args:
        cu_q: int [documents + 1] on the CPU, the boundaries of the documents' queries.
        cu_k: int [documents + 1] on the CPU, the boundaries of the documents' keys.
        queries: the number of all queries.
        keys: the number of all keys.
        max_seqlen: the caller's upper bound of the documents' lengths, or None.

    Raises:
        ValueError: the boundaries do not cover the tokens in order, a document has more queries than keys, or a
            document is longer than `max_seqlen`.
    """
    bounds = []
    for name, cu, tokens in (("cu_seqlens", cu_k, keys), ("cu_seqlens_q", cu_q, queries)):
        values = cu.tolist()
        if not values or values[0] != 0 or values[-1] != tokens or values != sorted(values):
            raise UlyssesValueError(f"{name} must rise from 0 to the number of tokens, {tokens}, got {_short(values)}.")
        bounds.append(values)
    if len(bounds[0]) != len(bounds[1]):
        raise UlyssesValueError(
            f"cu_seqlens_q and cu_seqlens must divide the same documents, got {len(bounds[1]) - 1} and "
            f"{len(bounds[0]) - 1} of them."
        )
    documents = []
    for (k0, k1), (q0, q1) in zip(*(itertools.pairwise(b) for b in bounds), strict=True):
        if q1 - q0 > k1 - k0:
            raise UlyssesValueError(
                f"document {k0}..{k1} has {q1 - q0} queries but {k1 - k0} keys: pass all keys up to the last query."
            )
        if max_seqlen is not None and k1 - k0 > max_seqlen:
            raise UlyssesValueError(f"max_seqlen is {max_seqlen}, but a document of cu_seqlens has {k1 - k0} tokens.")
        if q1 > q0:
            documents.append(Document(q0, k0, q1 - q0, k1 - k0))
    return documents


def seen_by_queries(
    boundaries: Sequence[int], batch: int, queries: int, keys: int, first: int
) -> tuple[list[slice], Tensor, Tensor]:
    """Finds the keys that some queries of each row attend to: queries [first, first + queries) of `keys` tokens.

    Args:
        boundaries: the document boundaries among all batch * keys tokens, one row after the other.
        batch: the number of rows.
        queries: the number of queries in each row.
        keys: the number of tokens in each row.
        first: the position of the first query in its row.

    Returns:
        A tuple of three: for each row the slice of keys from the first document with a query up to the last query;
        int64 boundaries of the queries; int64 boundaries of those keys. Both boundaries go over one row after the
        other.

    Raises:
        ValueError: the boundaries do not cover the rows in order, or no document begins at the beginning of a row.
    """
    cu = torch.tensor(boundaries)
    read_documents(cu, cu, batch * keys, batch * keys)
    rows, cu_q, cu_k = [], [0], [0]
    for row in range(batch):
        start, last = row * keys, first + queries
        inside = [b - start for b in boundaries if start <= b <= start + keys]
        if not inside or (inside[0], inside[-1]) != (0, keys):
            raise UlyssesValueError(
                f"cu_seqlens must begin a document at each row of {keys} tokens, got {_short(boundaries)}."
            )
        documents = [(a, b) for a, b in itertools.pairwise(inside) if a < last and b > first and a < b]
        rows.append(slice(documents[0][0] if documents else last, last))
        for a, b in documents:
            cu_q.append(cu_q[-1] + min(b, last) - max(a, first))
            cu_k.append(cu_k[-1] + min(b, last) - a)
    return rows, torch.tensor(cu_q), torch.tensor(cu_k)


def sparse_documents(documents: Sequence[Document], block_size: int, top_k: int) -> list[Document]:
    """Returns the documents whose queries pick past blocks."""
    return [doc for doc in documents if top_k > 1 and not doc.is_dense(block_size, top_k)]


def _short(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
