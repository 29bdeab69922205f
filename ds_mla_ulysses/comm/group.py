"""The group of ranks that share each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

#: How ranks divide a sequence; `layout.split` says which tokens those are.
SPLITS = ("contiguous", "head_tail")


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold parts of the same sequences; built once and passed on.

    Attributes:
        process_group: the torch process group, or None for a group of one, which communicates nothing.
        rank: this process's place in the group.
        size: number of ranks.
        split: "contiguous": this rank holds tokens [rank*T, (rank+1)*T). "head_tail": of 2*size equal chunks of the
            sequence it holds two, `rank` from the front and `rank` from the back, so that causal attention of its
            queries is as much work as any other rank's.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    split: str = "contiguous"

    def with_split(self, split: str) -> SequenceGroup:
        """The same ranks, dividing sequences otherwise.

        Raises:
            ValueError: an unknown split.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}.")
        return replace(self, split=split)

    @classmethod
    def of(cls, group: SequenceGroup | dist.ProcessGroup | None) -> SequenceGroup:
        """Wraps a torch process group; a SequenceGroup is returned as it is, None is a group of one."""
        if isinstance(group, SequenceGroup):
            return group
        if group is None:
            return cls(None, 0, 1)
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"group must be a torch.distributed ProcessGroup of which this rank is a member, got {group!r}. "
                "dist.new_group returns a placeholder on ranks outside the group: pass each rank its own group."
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def name(self) -> str:
        """What functional collectives call the group; empty for a group of one."""
        return "" if self.process_group is None else self.process_group.group_name


def split_world(sp_size: int) -> SequenceGroup:
    """Splits the world into groups of `sp_size` consecutive ranks and returns this rank's own.

    Every rank of the world has to call it, since each group is created by all of them.

    Raises:
        ValueError: sp_size does not divide the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if not 1 <= sp_size <= world or world % sp_size:
        raise ValueError(
            f"sp_size={sp_size} does not divide the {world} processes of this job: start a multiple of {sp_size} "
            f"processes, or choose one of {[n for n in range(1, world + 1) if world % n == 0]}."
        )
    if sp_size == 1:
        return SequenceGroup.of(None)
    if sp_size == world:
        return SequenceGroup.of(dist.group.WORLD)
    own = None
    for first in range(0, world, sp_size):
        ranks = list(range(first, first + sp_size))
        created = dist.new_group(ranks)
        own = created if rank in ranks else own
    return SequenceGroup.of(own)


def gather_objects(group: SequenceGroup, value: Any) -> list[Any]:
    """What each rank of the group says, in rank order. Small picklable values only."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def raise_first(problems: Sequence[str | None]) -> None:
    """Raises ValueError with the problem of the first rank that has one."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ValueError(problem if len(problems) == 1 else f"rank {rank} of the group: {problem}")
