"""Which rank owns which heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPartition:
    """Consecutive heads per rank, as even as possible: the first `query_heads % size` ranks have one more.

    Key/value heads follow the query heads they serve: a rank owns those that its own query heads read.
    Neighbouring ranks can then own the same one: it is sent to each of them, and what they send back of
    it is summed. 6 query heads over 3 key/value heads on 2 ranks are 0 1 2 over 0 1, and 3 4 5 over 1 2.

    Args:
        heads: heads of the tensor that is shared, query or key/value heads.
        size: number of ranks.
        query_heads: the query heads that they serve, a multiple of `heads`; by default the heads themselves.

    Raises:
        ValueError: fewer query heads than ranks, or query heads that are no multiple of `heads`.
    """

    heads: int
    size: int
    query_heads: int | None = None

    def __post_init__(self) -> None:
        if self._queries < self.size:
            raise ValueError(
                f"{self._queries} attention heads are too few for {self.size} ranks, each of which needs one: choose "
                f"sp_size <= {self._queries}."
            )
        if self._queries % self.heads:
            raise ValueError(
                f"{self._queries} query heads must be a multiple of the key/value heads, got {self.heads}: repeat the "
                "key/value heads before the call."
            )

    @property
    def _queries(self) -> int:
        return self.heads if self.query_heads is None else self.query_heads

    def _first_query(self, rank: int) -> int:
        return rank * (self._queries // self.size) + min(rank, self._queries % self.size)

    def start(self, rank: int) -> int:
        """The first head that `rank` owns."""
        return self._first_query(rank) * self.heads // self._queries

    def stop(self, rank: int) -> int:
        """One past the last head that `rank` owns."""
        return (self._first_query(rank + 1) - 1) * self.heads // self._queries + 1

    def count(self, rank: int) -> int:
        """Heads that `rank` owns."""
        return self.stop(rank) - self.start(rank)

    def shared(self, rank: int) -> int:
        """How many of its first heads `rank` owns together with ranks before it."""
        return max(0, self.stop(rank - 1) - self.start(rank)) if rank else 0

    @property
    def overlaps(self) -> bool:
        """Whether any head has several owners."""
        return any(self.shared(rank) for rank in range(self.size))

    def repeats(self, rank: int) -> list[int] | None:
        """How many of its query heads read each head that `rank` owns; None where all are read by equally many.

        An ordinary grouped kernel takes the heads as they are only if it is None.
        """
        first, stop, group = self._first_query(rank), self._first_query(rank + 1), self._queries // self.heads
        found = [
            min(stop, (head + 1) * group) - max(first, head * group)
            for head in range(self.start(rank), self.stop(rank))
        ]
        return None if len(set(found)) == 1 else found
