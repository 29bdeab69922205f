"""One rank's shard of a batch, and the layout that says how the sequence was split.

The layout travels with the shard, as the last entry of `Shard.inputs`, through whatever moves batches (DeepSpeed's and
Accelerate's device placement, data loaders, pickling) into the model's forward, which is sequence-parallel if it gets one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.group import SequenceGroup
from ..errors import UlyssesTypeError, UlyssesValueError
from .split import pieces_of

#: The key of the layout, in `Shard.inputs` and in the batches of `ShardedDataLoader`.
LAYOUT = "ulysses_layout"
SHIFT_LABELS = "shift_labels"


class ShardLayout:
    """How a sequence was split, and which shard of it a rank holds. Immutable; compares by value.

    It has the methods by which training code moves the tensors of a batch (`to`, `cpu`, `cuda`, `pin_memory`, `clone`,
    `detach`, `contiguous`), and each of them returns the layout itself.

    Args:
        kind: "contiguous" or "head_tail", see `SequenceGroup`.
        ranks: the size of the sequence-parallel group.
        rank: the rank in the group that the shard belongs to.
        length: tokens of the whole sequence, with the padding that makes it divisible.
        tokens: tokens of the whole sequence without that padding; the same as length if it is not given.
        members: the global ranks of the group, in its order; empty if it is not known.
    """

    # Not a dataclass, whose fields torch.compile would guard on: that is one graph for each length.
    __slots__ = ("kind", "length", "members", "rank", "ranks", "tokens")

    kind: str
    ranks: int
    rank: int
    length: int
    tokens: int
    members: tuple[int, ...]

    def __init__(
        self, kind: str, ranks: int, rank: int, length: int, tokens: int | None = None, members: Sequence[int] = ()
    ) -> None:
        values = {"kind": kind, "ranks": ranks, "rank": rank, "length": length, "members": tuple(members)}
        for name, value in {**values, "tokens": length if tokens is None else tokens}.items():
            object.__setattr__(self, name, value)

    def _values(self) -> tuple[str, int, int, int, int, tuple[int, ...]]:
        return self.kind, self.ranks, self.rank, self.length, self.tokens, self.members

    @property
    def local_tokens(self) -> int:
        """How many tokens of the shard are not padding that sharding added. They are its first ones."""
        group = SequenceGroup(None, self.rank, self.ranks, self.kind)
        width = self.length // len(pieces_of(group))
        return sum(min(max(self.tokens - piece * width, 0), width) for piece in pieces_of(group, self.rank))

    def to(self, *_: Any, **__: Any) -> ShardLayout:
        """Returns the layout itself: it is on every device."""
        return self

    cpu = cuda = pin_memory = clone = detach = contiguous = to

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a ShardLayout cannot be changed: {name} was set.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a ShardLayout cannot be changed: {name} was deleted.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardLayout) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __reduce__(self) -> tuple[type[ShardLayout], tuple[Any, ...]]:
        return ShardLayout, self._values()

    def __copy__(self) -> ShardLayout:
        return self

    def __deepcopy__(self, memo: Any) -> ShardLayout:
        return self

    def __repr__(self) -> str:
        return (
            f"ShardLayout(kind={self.kind!r}, ranks={self.ranks}, rank={self.rank}, length={self.length}, "
            f"tokens={self.tokens}, members={self.members})"
        )


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's shard of a batch of whole sequences, as `Handle.shard` and `shard_batch` return it.

    Attributes:
        inputs: the arguments of the model: `input_ids` or `inputs_embeds` [B, T], `position_ids` [B, T], an `attention_mask`
            [B, T] if the batch has one, everything else that the batch has, and last the layout.
        shift_labels: int64 [B, T], the label that each token predicts, -100 to ignore; None if the batch has no labels.
        layout: how the sequence was split.
    """

    inputs: dict[str, Any]
    shift_labels: Tensor | None
    layout: ShardLayout

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Shard:
        """The shard with all its tensors on the device."""

        def moved(x: Any) -> Any:
            return x.to(device, non_blocking=non_blocking) if isinstance(x, Tensor) else x

        inputs = {name: moved(x) for name, x in self.inputs.items()}
        return Shard(inputs, moved(self.shift_labels), self.layout)

    def as_batch(self) -> dict[str, Any]:
        """One dict, as a data loader yields it: `inputs` with `shift_labels` beside them, the layout last."""
        batch = {name: x for name, x in self.inputs.items() if name != LAYOUT}
        if self.shift_labels is not None:
            batch[SHIFT_LABELS] = self.shift_labels
        return {**batch, LAYOUT: self.layout}


def labels_of(shard: Shard | Mapping[str, Any]) -> Tensor:
    """The shift_labels of a Shard, or of a batch that `ShardedDataLoader` yields.

    Raises:
        TypeError: it is neither.
        ValueError: it has no labels.
    """
    if isinstance(shard, Shard):
        labels = shard.shift_labels
    elif isinstance(shard, Mapping):
        labels = shard.get(SHIFT_LABELS)
    else:
        raise UlyssesTypeError(
            f"give the shard, as handle.shard(batch) returns it (or a batch of the Trainer's loader), not a "
            f"{type(shard).__name__}."
        )
    if labels is None:
        raise UlyssesValueError(
            "the shard has no labels: put labels into the batch before it is sharded, and give the shard itself, neither the "
            "whole batch nor shard.inputs."
        )
    return labels
