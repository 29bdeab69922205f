"""The assignment of heads to ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TypeVar

import torch

from ..errors import UlyssesValueError

Result = TypeVar("Result")


@dataclass(frozen=True)
class HeadPartition:
    """Consecutive heads for each rank, as even as possible: the first `query_heads % size` ranks have one more.

    Each rank has the KV heads that its query heads read. Neighbouring ranks can therefore share a KV head: it is sent to
    each of them, and the gradients that they return are summed. For example, with 2 ranks, 6 query heads and 3 KV heads,
    rank 0 has query heads 0 1 2 and KV heads 0 1, rank 1 has query heads 3 4 5 and KV heads 1 2.

    Args:
        heads: the number of heads of the tensor, query or KV heads.
        size: the number of ranks.
        query_heads: the number of query heads that read them, a multiple of `heads`. By default the heads are query heads.

    Raises:
        ValueError: fewer query heads than ranks, or query heads that are not a multiple of `heads`.
    """

    heads: int
    size: int
    query_heads: int | None = None

    def __post_init__(self) -> None:
        if self._queries < self.size:
            raise UlyssesValueError(
                f"{self._queries} attention heads are too few for {self.size} ranks, each of which needs one: choose "
                f"sp_size <= {self._queries}."
            )
        if self._queries % self.heads:
            raise UlyssesValueError(
                f"{self._queries} query heads must be a multiple of the key/value heads, got {self.heads}: repeat the "
                "key/value heads before the call."
            )

    @property
    def _queries(self) -> int:
        return self.heads if self.query_heads is None else self.query_heads

    def _first_query(self, rank: int) -> int:
        return rank * (self._queries // self.size) + min(rank, self._queries % self.size)

    def start(self, rank: int) -> int:
        """The first head of `rank`."""
        return self._first_query(rank) * self.heads // self._queries

    def stop(self, rank: int) -> int:
        """One past the last head of `rank`."""
        return (self._first_query(rank + 1) - 1) * self.heads // self._queries + 1

    def count(self, rank: int) -> int:
        """The number of heads of `rank`."""
        return self.stop(rank) - self.start(rank)

    def shared(self, rank: int) -> int:
        """The number of heads of `rank` that a rank before it has too. They are its first ones."""
        return max(0, self.stop(rank - 1) - self.start(rank)) if rank else 0

    @property
    def overlaps(self) -> bool:
        """Whether several ranks have the same head."""
        return any(self.shared(rank) for rank in range(self.size))

    def repeats(self, rank: int) -> list[int] | None:
        """The number of local query heads that read each head of `rank`; None if it is the same for all of them.

        Only if it is None can an ordinary grouped kernel take the heads as they are.
        """
        queries = slice(self._first_query(rank), self._first_query(rank + 1))
        found = list(readers_of_heads(queries, self._queries // self.heads).values())
        return None if len(set(found)) == 1 else found


def readers_of_heads(queries: slice, group: int) -> dict[int, int]:
    """Returns how many of some consecutive query heads read each KV head, for the KV heads that they read.

    Args:
        queries: the query heads.
        group: the number of query heads, out of all of them, that read one KV head.
    """
    first, stop = queries.start, queries.stop
    heads = range(first // group, (stop - 1) // group + 1)
    return {head: min(stop, (head + 1) * group) - max(first, head * group) for head in heads}


@dataclass(frozen=True)
class HeadChunks:
    """The local query heads of every rank in `count` consecutive chunks, as even as possible; the first have one more.

    The ranks exchange their chunks of the same number together.

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
        """Returns the chunks of a rank's heads, as slices of all heads."""
        all_heads = HeadPartition(self.heads, self.ranks)
        first, local = all_heads.start(rank), HeadPartition(all_heads.count(rank), self.count)
        return [slice(first + local.start(c), first + local.stop(c)) for c in range(self.count)]


def computed_once(function: Callable[..., Result]) -> Callable[..., Result]:
    """Caches a pure function of hashable positional arguments.

    A compiler traces the function itself instead, because torch.compile warns about functions with a cache.
    """
    cached = lru_cache(maxsize=1024)(function)

    @wraps(function)
    def call(*args: int | tuple[int, ...]) -> Result:
        return function(*args) if torch.compiler.is_compiling() else cached(*args)

    return call


@computed_once
def local_query_heads(query_heads: int, size: int, rank: int) -> slice:
    """Returns the query heads of a rank. Raises ValueError if there are fewer heads than ranks."""
    partition = HeadPartition(query_heads, size)
    return slice(partition.start(rank), partition.stop(rank))


@computed_once
def local_repeats(kv_heads: int, size: int, query_heads: int, rank: int) -> list[int] | None:
    """Returns `HeadPartition(kv_heads, size, query_heads).repeats(rank)`. The caller must not change the list."""
    return HeadPartition(kv_heads, size, query_heads).repeats(rank)


@computed_once
def chunks_of_rank(heads: int, ranks: int, count: int, rank: int) -> list[slice]:
    """Returns `HeadChunks(heads, ranks, count).of_rank(rank)`. The caller must not change the list."""
    return HeadChunks(heads, ranks, count).of_rank(rank)
