"""The sequence-parallel group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist

from ..errors import UlyssesValueError

#: How ranks divide a sequence; `layout.split` says which tokens those are.
SPLITS = ("contiguous", "head_tail")


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that hold shards of the same sequences. Built once and passed on.

    Attributes:
        process_group: the torch process group, or None for a group of one, which does not communicate.
        rank: the rank of this process in the group.
        size: the number of ranks.
        split: "contiguous": the rank holds the tokens [rank*T, (rank+1)*T). "head_tail": the sequence is divided into
            2*size equal pieces, of which the rank holds two: number `rank` from the front and number `rank` from the
            back. Causal attention of its queries is then the same work on every rank.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    split: str = "contiguous"

    def with_split(self, split: str) -> SequenceGroup:
        """The same ranks with another split.

        Raises:
            ValueError: the split is unknown.
        """
        if split not in SPLITS:
            raise UlyssesValueError(f"split must be one of {list(SPLITS)}, got {split!r}.")
        return replace(self, split=split)

    @classmethod
    def of(cls, group: SequenceGroup | dist.ProcessGroup | None) -> SequenceGroup:
        """Wraps a torch process group; a SequenceGroup is returned as it is, None is a group of one."""
        if isinstance(group, SequenceGroup):
            return group
        if group is None:
            return cls(None, 0, 1)
        if not isinstance(group, dist.ProcessGroup):
            raise UlyssesValueError(
                f"group must be a torch.distributed ProcessGroup of which this rank is a member, got {group!r}. "
                "dist.new_group returns a placeholder on ranks outside the group: pass each rank its own group."
            )
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group, in its order; empty if there is no process group."""
        return () if self.process_group is None else tuple(dist.get_process_group_ranks(self.process_group))

    @property
    def name(self) -> str:
        """The name by which functional collectives find the group; empty for a group of one."""
        return "" if self.process_group is None else self.process_group.group_name


def split_world(sp_size: int) -> SequenceGroup:
    """Splits the world into groups of `sp_size` consecutive ranks and returns the local one.

    Every rank of the world has to call it, since all ranks take part in creating each group.

    Raises:
        ValueError: sp_size does not divide the world.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if not 1 <= sp_size <= world or world % sp_size:
        raise UlyssesValueError(
            f"sp_size={sp_size} does not divide the {world} processes of this job: start a multiple of {sp_size} "
            f"processes, or choose one of {[n for n in range(1, world + 1) if world % n == 0]}."
        )
    if sp_size == 1:
        return SequenceGroup.of(None)
    if sp_size == world:
        return SequenceGroup.of(dist.group.WORLD)
    local = None
    for first in range(0, world, sp_size):
        ranks = list(range(first, first + sp_size))
        created = dist.new_group(ranks)
        local = created if rank in ranks else local
    return SequenceGroup.of(local)
