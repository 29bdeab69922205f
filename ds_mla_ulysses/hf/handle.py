"""The Handle that `parallelize` returns. It makes shards, computes the loss, counts tokens and restores the model.

Letters: B batch · T local tokens · S tokens of the whole sequence · V vocabulary.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.agreement import all_reduce, gather_numbers, raise_everywhere, sum_gradients
from ..comm.group import SequenceGroup
from ..errors import UlyssesRuntimeError, UlyssesValueError
from ..layout.batch import shard_batch
from ..layout.loss import count_items, misfit, sequence_loss
from ..layout.shard import LAYOUT, Shard, ShardLayout, labels_of
from .checks import Checks
from .inputs import problem_of_group
from .probe import returns_loss_function

if TYPE_CHECKING:
    from .patch import ModelPatch

#: Where the text model keeps the handle.
HANDLE = "_ulysses_handle"
#: By how much the loss may differ between ranks, relatively: the rounding of fp32 sums in another order.
_LOSS_TOLERANCE = 1e-6
_LOSS_OF_A_RANK = (
    "the loss is not that of the sequence-parallel group: it is {}. In a loop, use handle.loss(logits, shard); in a "
    "Trainer's compute_loss, return the loss of super().compute_loss. If each rank trains on whole sequences, call "
    "engine.backward inside `with handle.plain():`, like the forward."
)
#: How many values of each parameter are compared between ranks.
_SAMPLES = 16
#: What ranks may be about to do when they agree before the head is gathered.
_ABOUT_TO = {"loss": "compute the loss", "logits": "make the logits whole", "backward": "run backward"}


class Handle:
    """A parallelized model: its group, its shards, its loss, and `restore`.

    Attributes:
        model: the model that `parallelize` was given.
        group: this rank's SequenceGroup.
        data_rank, data_size: `rank` and `num_replicas` for a sampler, so that the ranks of a group read the same data
            and different groups read different data.
        strategy: the name of the strategy by which attention exchanges data.
        why: the reason for the choice, if "auto" made it.
        head_chunks: the number of chunks in which the local heads attend one after the other.
        loss_tile: how `loss` makes logits, see `parallelize`; None also if the model's head is not known to be linear.
        checks: which checks run, see `hf/checks.py`.
        is_restored: whether `restore` was called.
    """

    def __init__(
        self,
        patch: ModelPatch,
        *,
        data_rank: int = 0,
        data_size: int = 1,
        why: str = "asked for",
        checks: Checks | None = None,
    ) -> None:
        self._patch = patch
        self.model, self.group = patch.model, patch.group
        self.strategy, self.why, self.head_chunks = patch.strategy, why, patch.head_chunks
        self.data_rank, self.data_size = data_rank, data_size
        self.checks = checks or Checks()
        self.is_restored = False
        self._engine: Any = None
        self._compared_weights = False
        patch.aux_loss.gradient_scale = lambda: self.gradient_scale
        self.loss_tile = None if patch.head is None else patch.head.loss_tile
        if patch.head is not None:
            patch.head.agree = self._agree

    @property
    def split(self) -> str:
        """Which tokens of a sequence a rank holds, "contiguous" or "head_tail"."""
        return self.group.split

    @functools.cached_property
    def returns_loss_function(self) -> bool | None:
        """Whether the loss that the model returns is the result of its `loss_function`; None if that cannot be observed.

        Observed once, in a forward without weights.
        """
        wrapper: Any = self.model
        return returns_loss_function(wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else wrapper)

    @property
    def gradient_scale(self) -> float:
        """By what gradients of `loss` and of `aux_loss` are multiplied: what DeepSpeed divides by, 1 without an engine.

        DeepSpeed divides the loss by the accumulation steps, and the summed gradients by the ranks.
        """
        if self._engine is None:
            return 1.0
        return float(self._engine.gradient_accumulation_steps() * self.group.size * self.data_size)

    @property
    def aux_loss_coefficient(self) -> float:
        """By what the model multiplies its auxiliary loss (`router_aux_loss_coef`).

        Raises:
            ValueError: the model does not say.
        """
        return self._patch.aux_loss.coefficient()

    def attach_engine(self, engine: Any) -> None:
        """From here on, gradients of `loss` are multiplied by what this DeepSpeed engine divides them by."""
        if self._engine is not None:
            raise UlyssesRuntimeError(
                "this handle already has an engine: call restore() and parallelize the model again for another one."
            )
        self._engine = engine

    def shard(self, batch: Mapping[str, Any]) -> Shard:
        """Returns this rank's shard of a batch that every rank of the group holds whole; see `shard_batch`.

        Args:
            batch: `input_ids` (or `inputs_embeds`) [B, S], and any of `labels` or `shift_labels`, `position_ids`,
                `attention_mask` (two-dimensional), and further tensors.

        Returns:
            the Shard: `model(**shard.inputs)`, `handle.loss(logits, shard)`.

        Raises:
            ValueError: on all ranks, if they hold different batches or one of them holds a bad one (if the
                check of the batch runs; otherwise a bad batch raises on its own rank only).
        """
        self._refuse_if_restored()
        return shard_batch(batch, self.group, check=self.checks.due("batch"))

    def loss(
        self,
        logits: Tensor,
        shard: Shard | Mapping[str, Any],
        num_items: int | Tensor | None = None,
        *,
        label_smoothing: float = 0.0,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Returns the cross entropy of the group's whole sequences, the same value on each of its ranks.

        Args:
            logits: the local logits [B, T, V]. Those of a forward with gradients are not made yet, unless loss_tile is None;
                this makes them a tile of tokens at a time, with the gradients.
            shard: what `shard` returned, or the batch of a Trainer's loader.
            num_items: what `num_items(shards)` returned. The losses of the micro-batches and of the data-parallel groups
                then sum to the one-process loss of the optimizer step. Without it, the loss is the mean over this batch
                of this group, which is refused if it is not the mean of the step: with an engine that accumulates
                gradients, or with more than one data-parallel group.
            label_smoothing: as in torch's cross_entropy.
            token_weights: [B, T], by what the loss of each local token's label is multiplied. The sum is still divided by
                the number of supervised tokens.

        Backward: the SUM over ranks of each parameter's gradient is the one-process gradient. With an engine from
        `initialize`, the gradient is multiplied by what DeepSpeed divides by, so that its update is the one-process
        update.

        An auxiliary loss of routers is not part of it. `aux_loss` of a sequence-parallel forward's outputs is that of this
        micro-batch of the group, with a gradient of the same scale:
        `handle.loss(out.logits, shard) + model.router_aux_loss_coef * out.aux_loss`. Over micro-batches and data-parallel
        groups these terms add up.

        Raises:
            RuntimeError: the handle was restored.
            TypeError: shard is not a shard, or logits or num_items has another type. On all ranks with `checks` that are
                due, as the next ones.
            ValueError: logits and labels do not fit each other, there are no labels, or num_items is missing; labels
                outside the vocabulary; num_items or (without an engine, at the first loss) weights that differ between
                ranks.
        """
        self._refuse_if_restored()
        labels, problem = self._labels_of(shard, num_items)
        compares = self._engine is None and self.checks.policy != "never"
        if compares and torch.is_grad_enabled() and not self._compared_weights:
            self._compare_weights()
        return self.loss_of_labels(
            logits, labels, num_items, self.gradient_scale, label_smoothing, weights_BT=token_weights, problem=problem
        )

    def loss_of_labels(
        self,
        logits: Tensor,
        shift_labels_BT: Tensor,
        num_items: int | Tensor | None,
        gradient_scale: float,
        label_smoothing: float = 0.0,
        *,
        weights_BT: Tensor | None = None,
        problem: Exception | None = None,
    ) -> Tensor:
        """`sequence_loss` in this handle's group, with the checks that are due.

        Before the tiles of a head that ZeRO-3 shards, for which all ranks gather it, they agree that none has a problem.
        """
        check = self.checks.due("labels")
        if check and self._gathers_head:
            problem = problem or misfit(logits, shift_labels_BT, num_items, weights_BT)
            self._agree("loss", problem)
        return sequence_loss(
            logits,
            shift_labels_BT,
            self.group,
            num_items,
            gradient_scale,
            label_smoothing,
            weights_BT=weights_BT,
            check=check,
            problem=problem,
        )

    @property
    def _gathers_head(self) -> bool:
        """Whether the loss and whole logits gather the head, which is a collective of all ranks."""
        return self._patch.head is not None and self._patch.head.is_sharded and torch.is_grad_enabled()

    def _agree(self, about_to: str, problem: Exception | None = None) -> None:
        """Raises on all ranks of the world, if ZeRO-3 shards the head, unless all are about to do the same without a problem.

        Args:
            about_to: a key of _ABOUT_TO.

        Raises:
            RuntimeError: the ranks are about to do different things.
            Exception: the problem of a rank.
        """
        if self._patch.head is None or not self._patch.head.is_sharded or self.checks.policy == "never":
            return
        world = SequenceGroup.of(dist.group.WORLD)
        names = list(_ABOUT_TO)
        of_ranks = gather_numbers([names.index(about_to), int(problem is not None)], world)
        if any(has_problem for _, has_problem in of_ranks):
            raise_everywhere(problem, world)
        plans = [_ABOUT_TO[names[number]] for number, _ in of_ranks]
        differing = [rank for rank, plan in enumerate(plans) if plan != plans[0]]
        if differing:
            raise UlyssesRuntimeError(
                f"rank 0 is about to {plans[0]} and rank {differing[0]} to {plans[differing[0]]}. ZeRO-3 shards the head of "
                "this model, so logits can only be made by all ranks together: use them on every rank in the same order "
                "(printing or indexing makes them), or on none."
            )

    def _refuse_if_restored(self) -> None:
        if self.is_restored:
            raise UlyssesRuntimeError(
                "handle.restore() was called: the model attends to one rank's tokens only, so its result on a shard would be "
                "wrong. Call parallelize again."
            )

    def _labels_of(self, shard: Any, num_items: Any) -> tuple[Any, Exception | None]:
        """The labels of a shard, or why there is no loss of it."""
        steps = self._engine.gradient_accumulation_steps() if self._engine is not None else 1
        is_of_step = steps == 1 and (self._engine is None or self.data_size == 1)
        if num_items is None and torch.is_grad_enabled() and not is_of_step:
            return None, UlyssesValueError(
                f"with gradient_accumulation_steps={steps} and {self.data_size} data-parallel groups a mean over one "
                "micro-batch is not a mean over the step's tokens: pass num_items=handle.num_items(shards) with all "
                "micro-batches of the step."
            )
        try:
            labels = labels_of(shard)
        except (TypeError, ValueError) as error:
            return None, error
        layout = shard.layout if isinstance(shard, Shard) else shard.get(LAYOUT)
        sentence = problem_of_group(layout, self.group) if isinstance(layout, ShardLayout) else None
        return labels, None if sentence is None else UlyssesValueError(sentence)

    def _compare_weights(self) -> None:
        """Raises ValueError on all ranks if their weights differ, by a few values of each; once. Engines share weights."""
        self._compared_weights = True
        if self.group.size == 1:
            return
        samples = [
            p.detach().reshape(-1)[:: max(1, p.numel() // _SAMPLES)][:_SAMPLES].double().sum()
            for p in self.model.parameters()
            if p.numel() and not p.is_meta and p.dtype.is_floating_point and not _is_sharded(p)
        ]
        checksum = zlib.crc32(torch.stack(samples).cpu().numpy().tobytes()) if samples else 0
        of_ranks = [number for (number,) in gather_numbers([checksum], self.group)]
        differing = [rank for rank, number in enumerate(of_ranks) if number != of_ranks[0]]
        if differing:
            raise UlyssesValueError(
                f"the weights of ranks 0 and {differing[0]} of the sequence-parallel group differ: load or seed the model "
                "alike on all ranks, or let a DeepSpeed engine share them (ds_mla_ulysses.initialize)."
            )

    def num_items(self, shards: Sequence[Shard | Mapping[str, Any]]) -> int:
        """Returns the number of supervised tokens of an optimizer step, over its micro-batches and over all ranks.

        This is a collective of the whole world: every rank calls it, with its shards of all micro-batches.

        Raises:
            TypeError, ValueError: on all ranks, if one of them has something that is not a shard or has no labels.
        """
        everyone = SequenceGroup.of(dist.group.WORLD) if self.data_size > 1 else self.group
        labels, problem = [], None
        try:
            labels = [labels_of(shard) for shard in shards]
        except (TypeError, ValueError) as error:
            problem = error
        return count_items(labels, everyone, problem)

    def check_loss(self, loss: Any) -> None:
        """Refuses the loss of one rank's tokens, whose gradients would have another scale than that of the group.

        The engine of `initialize` calls it before each backward. A loss of the group is one number on all of its ranks,
        whichever function made it. Nothing is checked inside `plain`.

        Raises:
            RuntimeError: on all ranks of the group, if the loss differs between them.
        """
        if self.group.size == 1 or self._patch.is_plain or not isinstance(loss, Tensor) or loss.numel() != 1:
            return
        if not self.checks.due("loss"):
            return
        self._agree("backward")
        value = loss.detach().double().reshape(1)
        is_nan = value.isnan().double()
        value = value.nan_to_num(0.0, math.inf, -math.inf)
        extremes = torch.cat([value, -value, is_nan, -is_nan])
        extremes = all_reduce(extremes, self.group, "loss", dist.ReduceOp.MAX)
        highest, minus_lowest, some_nan, minus_all_nan = extremes.tolist()
        lowest = -minus_lowest
        if some_nan != -minus_all_nan:
            raise UlyssesRuntimeError(_LOSS_OF_A_RANK.format("nan on one rank and a number on another"))
        are_finite = math.isfinite(highest) and math.isfinite(lowest)
        tolerance = _LOSS_TOLERANCE * max(abs(highest), abs(lowest)) if are_finite else 0.0
        if highest != lowest and highest - lowest > tolerance:
            raise UlyssesRuntimeError(_LOSS_OF_A_RANK.format(f"{lowest:.6g} on one rank and {highest:.6g} on another"))

    def sum_gradients(self, model: nn.Module | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Replaces every gradient by its sum over the group's ranks; for loops without an engine.

        Gradients that some ranks do not have (an expert that got no token there) count as zero.

        Args:
            model: the module whose gradients are summed; this handle's model by default.
            group: ranks to sum over; the sequence-parallel group by default. With data parallelism and `num_items`,
                `torch.distributed.group.WORLD` gives the gradient of the whole step.
        """
        ranks = self.group if group is None else SequenceGroup.of(group)
        sum_gradients((model or self.model).parameters(), ranks)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Permits forwards without a layout that record gradients: they run the plain model, on this rank alone.

        Outside the block, such a forward is refused, since training would use one rank's tokens as if they were the whole
        sequence. Evaluation and generation under `torch.no_grad()` do not need it. Layers
        that ran inside the block are recomputed as plain layers, even after its end. If each rank trains on whole sequences,
        call `engine.backward` inside the block as well.
        """
        self._patch.plain_depth += 1
        try:
            yield
        finally:
            self._patch.plain_depth -= 1

    def restore(self) -> None:
        """Undoes everything that `parallelize` changed on the model. A second call does nothing."""
        self._patch.undo()
        self.is_restored = True


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether each rank has another part of it, as FSDP makes it."""
    return hasattr(parameter, "device_mesh") or type(parameter).__name__ == "FlatParameter"


def handle_of(model: nn.Module) -> Handle | None:
    """Returns the Handle of a parallelized model, of a model that contains it or of its engine; None if there is none."""
    return next((vars(m)[HANDLE] for m in model.modules() if HANDLE in vars(m)), None)
