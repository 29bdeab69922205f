"""A data loader that yields this rank's shards of the batches that the ranks of its group read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..comm.agreement import gather_objects
from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from ..layout.batch import exchange_batches


class ShardedDataLoader:
    """Yields shards of the group's batches. It replaces DeepSpeed's `UlyssesSPDataLoaderAdapter`.

    Each rank reads different batches, as in data parallelism. In each round, the ranks of a group exchange the batches
    that they have read, and work together on one after the other, beginning with that of rank 0. A round of `size` ranks
    is `size` micro-batches, so this loader is `size` times as long as the wrapped one.

    Lengths, batch sizes and keys may differ between ranks and rounds. Any length is padded to a multiple of the number of
    ranks. All other attributes (`dataset`, `batch_sampler`, `set_epoch`) are those of the wrapped loader.

    Args:
        dataloader: yields batches of whole sequences, as `shard_batch` takes them.
        group: the sequence-parallel group.
        device: the device of the shards.
        skip: the number of micro-batches to leave out at the beginning of each iteration, less than the number of ranks.

    Raises:
        ValueError: in an iteration, on all ranks of the group: a rank read a bad batch, reading failed on a rank, or the
            ranks have different numbers of batches. If reading failed, the message has the type of the exception, and on
            the rank where it failed the exception is the cause.
    """

    # `dataloader` is any iterable; what else it has depends on its class.
    def __init__(self, dataloader: Any, group: SequenceGroup, device: torch.device | str, *, skip: int = 0) -> None:
        self.dataloader, self.group, self.device = dataloader, group, torch.device(device)
        self._skip = skip

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # it is not set yet while the loader is unpickled
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return len(self.dataloader) * self.group.size - self._skip

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._check_lengths()
        batches, skip, is_first = iter(self.dataloader), self._skip, True
        while True:
            shards = self._next_round(batches)
            if not shards:
                return
            if is_first:
                self._warn_of_equal_batches(shards)
            is_first = False
            # Accelerate counts the last round as one batch, but gradients are due at the last of its shards only.
            is_last = getattr(self.dataloader, "end_of_dataloader", None)
            for i, shard in enumerate(shards):
                if is_last:
                    self.dataloader.end_of_dataloader = i == len(shards) - 1
                if i >= skip:
                    yield shard
            skip = 0

    def _next_round(self, batches: Iterator[Any]) -> list[dict[str, Any]]:
        """Reads one batch on each rank and returns the local shards of all of them, none if no rank has a batch left."""
        from accelerate.data_loader import DataLoaderDispatcher

        batch = problem = cause = None
        try:
            batch = next(batches, None)
        except Exception as error:
            # A dispatcher's ranks wait for each other inside `next`, so they cannot be told in an exchange of ours.
            if isinstance(self.dataloader, DataLoaderDispatcher):
                raise
            problem, cause = f"cannot read its batch: {type(error).__name__}: {error}", error
        try:
            shards = exchange_batches(batch, self.group, self.device, problem)
        except ValueError as error:
            if cause is None:
                raise
            raise error from cause
        return [shard for shard in shards if shard is not None]

    def _check_lengths(self) -> None:
        """Raises ValueError on all ranks if they would make different numbers of steps and wait at the end of the epoch."""
        length: int | None
        try:
            length = len(self.dataloader)
        except TypeError:
            length = None
        lengths = gather_objects(self.group, length)
        if len(set(lengths)) > 1:
            raise UlyssesValueError(
                f"the ranks of a sequence-parallel group have different numbers of batches, {lengths}: leave Accelerate's "
                "even_batches on, or drop the last batches (dataloader_drop_last=True)."
            )

    def _warn_of_equal_batches(self, shards: Sequence[dict[str, Any]]) -> None:
        tokens = [shard.get("input_ids") for shard in shards]
        if self.group.rank == 0 and len(tokens) > 1 and all(_are_equal(x, tokens[0]) for x in tokens):
            warnings.warn(
                f"all {len(tokens)} ranks of the sequence-parallel group read the same batch, which is therefore trained on "
                f"{len(tokens)} times: let each rank read different batches, as accelerator.prepare(dataloader) does.",
                stacklevel=3,
            )

    def skip_first(self, count: int) -> ShardedDataLoader:
        """Returns a loader that begins after the first `count` micro-batches."""
        from accelerate import skip_first_batches

        rounds, rest = divmod(self._skip + count, self.group.size)
        return ShardedDataLoader(skip_first_batches(self.dataloader, rounds), self.group, self.device, skip=rest)


def _are_equal(x: Any, y: Any) -> bool:
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and torch.equal(x, y)
