"""What `parallelize` returns: the loss, the counts and the way back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.group import SequenceGroup
from ..layout.loss import count_items, sequence_loss


class Handle:
    """A parallelized model: its group, its loss, and `restore`.

    Attributes:
        model: the model that `parallelize` was given.
        group: this rank's SequenceGroup.
        data_rank, data_size: `rank` and `num_replicas` for a sampler, so that the ranks of a group
            read the same data and groups read different data.
        strategy: what travels between ranks.
        why: why it is that, of "auto".
        head_chunks: parts of the own heads that attend one after the other.
        split: which tokens of a sequence a rank holds.
        is_restored: whether `restore` was called.
        owes_loss: whether a sharded forward with gradients was not followed by a loss of the whole group yet;
            only with `by_batch`.
    """

    def __init__(
        self,
        model: nn.Module,
        group: SequenceGroup,
        data_rank: int,
        data_size: int,
        strategy: str,
        pause: Callable[[bool], bool],
        undo: Callable[[], None],
        *,
        why: str = "asked for",
        head_chunks: int = 1,
    ) -> None:
        self.model, self.group, self.strategy, self.why = model, group, strategy, why
        self.head_chunks = head_chunks
        self.data_rank, self.data_size = data_rank, data_size
        self._pause, self._undo = pause, undo
        self._engine: Any = None
        self.is_restored = False
        self.owes_loss = False

    @property
    def split(self) -> str:
        return self.group.split

    def attach_engine(self, engine: Any) -> None:
        """From here on, gradients of `loss` carry what this DeepSpeed engine divides by."""
        if self._engine is not None:
            raise RuntimeError("this handle already has an engine: parallelize the model anew for another one.")
        self._engine = engine

    def loss(self, logits: Tensor, shift_labels: Tensor, num_items: int | Tensor | None = None) -> Tensor:
        """Cross entropy of the group's whole sequences; the same value on each of its ranks.

        Args:
            logits: this rank's logits [B, T, vocabulary].
            shift_labels: [B, T] from `shard_batch`.
            num_items: from `num_items(shards)`: the losses of the micro-batches and of the data-parallel
                groups then sum to the one-process loss of the optimizer step. Without it, the mean over
                this batch of this group, which is refused where that mean is not the step's: with
                an engine that accumulates, or has more than one data-parallel group.

        Backward: the SUM over ranks of each parameter's gradient is the one-process gradient. With an
        engine from `initialize` the gradient is scaled by what DeepSpeed divides by, so that its update
        is the one-process update.
        """
        self.owes_loss = False
        if self._engine is None:
            return sequence_loss(logits, shift_labels, self.group, num_items)
        steps = self._engine.gradient_accumulation_steps()
        if num_items is None and torch.is_grad_enabled() and (steps > 1 or self.data_size > 1):
            raise ValueError(
                f"with gradient_accumulation_steps={steps} and {self.data_size} data-parallel groups a mean over one "
                "micro-batch is not a mean over the step's tokens: pass num_items=handle.num_items(shards) with all "
                "micro-batches of the step."
            )
        # DeepSpeed divides the loss by the accumulation steps and the summed gradients by the ranks.
        scale = steps * self.group.size * self.data_size
        return sequence_loss(logits, shift_labels, self.group, num_items, scale)

    def num_items(self, shards: Sequence[Mapping[str, Any]]) -> int:
        """Supervised tokens of an optimizer step, over its micro-batches and over all ranks.

        A collective of the whole world: every rank calls it, with its shards of all micro-batches.
        """
        everyone = SequenceGroup.of(dist.group.WORLD) if self.data_size > 1 else self.group
        return count_items([shard["shift_labels"] for shard in shards], everyone)

    def sum_gradients(self, model: nn.Module | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Replaces every gradient by its sum over the group's ranks; for loops without an engine.

        Gradients that some ranks do not have (an expert that got no token there) count as zero.

        Args:
            model: whose parameters; this handle's model by default.
            group: ranks to sum over; the sequence group by default. With data parallelism and `num_items`,
                `torch.distributed.group.WORLD` gives the gradient of the whole step.
        """
        if group is None and self.group.size == 1:
            return
        group = self.group.process_group if group is None else group
        parameters = [p for p in (model or self.model).parameters() if p.requires_grad]
        if not parameters:
            return
        present = torch.tensor([p.grad is not None for p in parameters], device=parameters[0].device).int()
        dist.all_reduce(present, dist.ReduceOp.MAX, group=group)
        works = []
        for parameter, anywhere in zip(parameters, present.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
        for work in works:
            work.wait()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The plain model, one process, inside the block: for generation and short evaluation.

        Gradient checkpointing of layers may recompute after the block has ended. A checkpoint that you put
        around the whole model would recompute with all ranks: do not use one inside the block.
        """
        before = self._pause(True)
        try:
            yield
        finally:
            self._pause(before)

    def restore(self) -> None:
        """Makes the model exactly what it was. A second call does nothing."""
        self._undo()
        self.is_restored = True
