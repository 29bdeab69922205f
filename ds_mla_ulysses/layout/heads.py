"""Which rank owns which heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadPartition:
    """Consecutive heads per rank, the same number on each.

    Everything else asks `count` and `start` and assumes nothing about them, so other partitions
    (uneven ones, KV heads that follow their query heads) change this class alone.

    Raises:
        ValueError: the ranks do not divide the heads.
    """

    heads: int
    size: int

    def __post_init__(self) -> None:
        if self.heads % self.size:
            usable = [n for n in range(2, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"{self.heads} attention heads cannot be shared evenly by {self.size} ranks: choose an sp_size "
                f"out of {usable}."
            )

    def count(self, rank: int) -> int:
        """Heads that `rank` owns."""
        return self.heads // self.size

    def start(self, rank: int) -> int:
        """The first head that `rank` owns."""
        return rank * (self.heads // self.size)
