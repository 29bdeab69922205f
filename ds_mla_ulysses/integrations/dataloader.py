"""A data loader whose every batch is this rank's part of a batch that its group shares."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..comm.agreement import gather_objects
from ..comm.group import SequenceGroup
from ..layout.batch import exchange_batches


class ShardedDataLoader:
    """Takes the place of DeepSpeed's `UlyssesSPDataLoaderAdapter`.

    Each rank reads batches of its own, as data parallelism hands them out. In each round the ranks of a
    group exchange them, and work together on one after the other: rank 0's first. A round of `size`
    ranks is `size` micro-batches, so the loader is `size` times as long as the one it wraps.

    Lengths, batch sizes and keys may differ between ranks and rounds; any length is padded to a multiple
    of the ranks. What else is asked of it (`dataset`, `batch_sampler`, `set_epoch`) is the wrapped one's.

    Args:
        dataloader: batches of whole sequences, as `shard_batch` takes them.
        group: the sequence group.
        device: where parts are put.
        skip: micro-batches that are left out at the beginning of each iteration, fewer than the ranks.

    Raises (in iteration): ValueError on all ranks of the group, if one reads a bad batch or cannot read, or if
    they have different numbers of batches.
    """

    def __init__(
        self, dataloader: Iterable[Any], group: SequenceGroup, device: torch.device | str, *, skip: int = 0
    ) -> None:
        self.dataloader, self.group, self.device = dataloader, group, torch.device(device)
        self._skip = skip

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __len__(self) -> int:
        return len(self.dataloader) * self.group.size - self._skip

    def __iter__(self) -> Iterator[dict[str, Any]]:
        from accelerate.data_loader import DataLoaderDispatcher

        self._check_lengths()
        # In its own collectives the others would not hear what stopped the one rank that reads.
        reads_alone = not isinstance(self.dataloader, DataLoaderDispatcher)
        batches, skip, is_first = iter(self.dataloader), self._skip, True
        while True:
            batch = problem = cause = None
            try:
                batch = next(batches, None)
            except Exception as error:
                if not reads_alone:
                    raise
                problem, cause = f"cannot read its batch: {type(error).__name__}: {error}", error
            try:
                parts = exchange_batches(batch, self.group, self.device, problem)
            except ValueError as error:
                raise error from cause
            parts = [part for part in parts if part is not None]
            if not parts:
                return
            if is_first:
                self._warn_of_equal_batches(parts)
            is_first = False
            # Accelerate takes the last round for one batch: gradients are due at the last of its parts only.
            is_last = getattr(self.dataloader, "end_of_dataloader", None)
            for i, part in enumerate(parts):
                if is_last:
                    self.dataloader.end_of_dataloader = i == len(parts) - 1
                if i >= skip:
                    yield part
            skip = 0

    def _check_lengths(self) -> None:
        """Ranks that count different numbers of steps would wait for each other at the end of the epoch."""
        try:
            length = len(self.dataloader)
        except TypeError:
            length = None
        lengths = gather_objects(self.group, length)
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks of a sequence group have different numbers of batches, {lengths}: leave Accelerate's "
                "even_batches on, or drop the last batches (dataloader_drop_last=True)."
            )

    def _warn_of_equal_batches(self, parts: list[dict[str, Any]]) -> None:
        tokens = [part.get("input_ids") for part in parts]
        if self.group.rank == 0 and len(tokens) > 1 and all(_are_equal(x, tokens[0]) for x in tokens):
            warnings.warn(
                f"all {len(tokens)} ranks of the sequence group read the same batch, which is therefore trained on "
                f"{len(tokens)} times: let each read its own, as accelerator.prepare(dataloader) does.",
                stacklevel=3,
            )

    def skip_first(self, count: int) -> ShardedDataLoader:
        """A loader that begins after the first `count` micro-batches."""
        from accelerate import skip_first_batches

        rounds, rest = divmod(self._skip + count, self.group.size)
        return ShardedDataLoader(skip_first_batches(self.dataloader, rounds), self.group, self.device, skip=rest)


def _are_equal(x: Any, y: Any) -> bool:
    return isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and torch.equal(x, y)
