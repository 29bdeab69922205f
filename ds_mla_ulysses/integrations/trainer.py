"""Replacements of methods of the Hugging Face Trainer: the loss, the counts of tokens, and evaluation.

Shape letters:
    B batch                          V vocabulary
    T tokens of this rank
    S tokens of the whole sequence
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import gather_to
from ..comm.group import SequenceGroup
from ..errors import UlyssesRuntimeError, UlyssesValueError
from ..hf.families import names_of
from ..hf.handle import Handle, handle_of
from ..layout.batch import IGNORED_LABEL, exchange_batches
from ..layout.loss import count_items, sum_of_losses, with_value
from ..layout.shard import LAYOUT, SHIFT_LABELS
from ..layout.split import in_order
from ..layout.tiled_loss import entropies_and_hits


def wrap_num_items(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `Trainer._get_num_items_in_batch` count the supervised tokens of an optimizer step over all ranks."""

    @functools.wraps(original)
    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or LAYOUT not in batch_samples[0]:
            return original(self, batch_samples, device)
        if any(SHIFT_LABELS not in batch for batch in batch_samples):
            return None
        handle = _handle_of_trainer(self)
        if self.args.average_tokens_across_devices:
            count = handle.num_items(batch_samples)
        else:  # each data-parallel group counts its tokens
            count = count_items([batch[SHIFT_LABELS] for batch in batch_samples], handle.group)
        return torch.tensor(count, device=device)

    return _get_num_items_in_batch


def wrap_track_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `Trainer._track_num_input_tokens` leave out the padding that makes a sequence divisible by the ranks."""

    @functools.wraps(original)
    def _track_num_input_tokens(self: Any, inputs: dict[str, Any]) -> None:
        if LAYOUT in inputs:
            name = getattr(self.model, "main_input_name", "input_ids")
            counted = {
                key: inputs[key][:, : inputs[LAYOUT].local_tokens] for key in (name, "attention_mask") if key in inputs
            }
            inputs = inputs | counted
        original(self, inputs)

    return _track_num_input_tokens


def _leave_out_padding(trainer: Any, inputs: dict[str, Any]) -> None:
    """Subtracts that padding from TRL's count of tokens, to which TRL adds the length of the positions afterwards."""
    layout = inputs[LAYOUT]
    if not hasattr(trainer, "_total_train_tokens") or "attention_mask" in inputs or not trainer.model.training:
        return
    padding = torch.tensor(layout.length // layout.ranks - layout.local_tokens, device=trainer.args.device)
    trainer._total_train_tokens -= int(trainer.accelerator.gather_for_metrics(padding).sum())


def wrap_compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `Trainer.compute_loss` return the loss of the group's whole sequences for a batch with a layout."""

    @functools.wraps(original)
    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        if LAYOUT in inputs:
            loss, outputs = _sharded_loss(self, model, inputs, num_items_in_batch)
            _leave_out_padding(self, inputs)
            return (loss, outputs) if return_outputs else loss
        if torch.is_grad_enabled() and self.get_sp_size() > 1:
            raise UlyssesValueError(
                "a training batch is not sharded over the sequence-parallel group: give the Trainer batches of the loader "
                "that the Trainer (or accelerator.prepare) returns, with all their keys."
            )
        return original(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss


def _sharded_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None
) -> tuple[Tensor, Any]:
    """Returns the Trainer's loss of the sequences of which `inputs` is this rank's shard, and the outputs of the shard.

    The mean over all ranks of the value, which the Trainer logs, is the value of one process. The mean over all ranks of
    the gradient, which DeepSpeed computes, is the gradient of one process.
    """
    handle = _handle_of_trainer(trainer)
    _refuse_settings(trainer)
    inputs = dict(inputs)
    shift_labels = inputs.pop(SHIFT_LABELS, None)
    if shift_labels is None:
        raise UlyssesValueError("the batch has no labels: the loss under sequence parallelism is computed from them.")
    epsilon = getattr(trainer.label_smoother, "epsilon", 0.0)
    if epsilon:
        # TRL's fused head has no label smoothing, so the loss is that of logits, in tiles.
        of_trl = inputs.pop("fused_lm_head", False)
    if _is_fused(handle.model, inputs):
        if epsilon:
            raise UlyssesValueError(
                "label_smoothing_factor is not supported with a fused loss: switch off fused_linear_cross_entropy."
            )
        # With num_items_in_batch=1, the model's loss is the sum over the local tokens.
        outputs = model(**inputs, labels=shift_labels, shift_labels=shift_labels, num_items_in_batch=1)
        loss = sum_of_losses(_local_sum(outputs), shift_labels, handle.group, num_items, handle.group.size)
    else:
        _check_loss(handle)
        outputs = model(**inputs)
        loss = handle.loss_of_labels(outputs["logits"], shift_labels, num_items, handle.group.size, epsilon)
        if epsilon and of_trl:
            outputs = _with_metrics_of_trl(outputs, shift_labels)
    sums_groups = num_items is not None and trainer.args.average_tokens_across_devices
    if sums_groups:
        loss = loss * handle.data_size  # of the mean over data-parallel groups, the sum
    aux_loss = getattr(outputs, "aux_loss", None)
    if aux_loss is not None and not epsilon:  # Trainer's label smoother leaves it out
        # The gradient of outputs.aux_loss has the scale of handle.loss; the one of `loss` here is averaged over ranks.
        aux_loss = with_value(aux_loss, aux_loss.detach(), handle.group.size / handle.gradient_scale)
        if inputs.get("fused_lm_head"):  # TRL averages it over micro-batches and groups
            steps = trainer.current_gradient_accumulation_steps if num_items is not None else 1
            loss = loss + trainer.router_aux_loss_coef / steps * aux_loss
        else:  # Trainer sums it, as it does the losses
            loss = loss + handle.aux_loss_coefficient * (handle.data_size if sums_groups else 1) * aux_loss
    trainer.loss_is_scaled_for_ga = num_items is not None
    return loss, outputs


def _with_metrics_of_trl(outputs: Any, shift_labels_BT: Tensor) -> Any:
    """The outputs with what SFTTrainer logs: the entropy of each token, and whether its label is the most likely one."""
    entropies_N, is_top1_N = entropies_and_hits(outputs["logits"], shift_labels_BT.flatten())
    metrics = {
        "label_mask": shift_labels_BT != IGNORED_LABEL,
        "entropy": entropies_N.view_as(shift_labels_BT),
        "is_top1": is_top1_N.view_as(shift_labels_BT),
    }
    return SimpleNamespace(**{**outputs, "aux_loss": getattr(outputs, "aux_loss", None), **metrics})


def wrap_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets SFTTrainer be built with label_smoothing_factor under DeepSpeed's sequence parallelism.

    SFTTrainer refuses it after `Trainer.__init__`, because the loss of its fused head has no label smoothing; that of
    `wrap_compute_loss` has. The factor is 0 in its arguments until training begins.
    """

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        is_sft = any(kind.__module__ == "trl.trainer.sft_trainer" for kind in type(self).__mro__)
        if is_sft and self.label_smoother is not None and parallelism is not None and parallelism.sp_enabled:
            from .callbacks import HiddenLabelSmoothing

            self.add_callback(HiddenLabelSmoothing(self.args))

    return __init__


def _refuse_settings(trainer: Any) -> None:
    """Raises ValueError for settings of a Trainer that would compute something else on a shard."""
    if trainer.compute_loss_func is not None:
        raise UlyssesValueError(
            "compute_loss_func is not supported under sequence parallelism: it would see one shard of each sequence. "
            "Remove it, or train without sequence parallelism."
        )
    if getattr(trainer.args, "neftune_noise_alpha", None) is not None:
        raise UlyssesValueError(
            "neftune_noise_alpha is not supported under sequence parallelism: the noise would be scaled by the length of "
            "one rank's shard. Leave it out, or train without sequence parallelism."
        )


def _local_sum(outputs: Any) -> Tensor:
    """The sum of the local tokens' losses that a fused kernel has made, without any auxiliary loss."""
    if outputs.loss is not None:
        return outputs.loss
    if getattr(outputs, "log_probs", None) is None:
        raise UlyssesValueError(
            "the auxiliary loss of routers is not supported with Liger's fused loss under sequence parallelism: switch off "
            "fused_linear_cross_entropy, or set output_router_logits=False."
        )
    return -outputs.log_probs.sum()  # TRL's fused head; ignored tokens are zero


def wrap_prediction_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `Trainer.prediction_step` share each rank's evaluation batch over the group."""

    @functools.wraps(original)
    def prediction_step(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Returns loss, logits and labels of this rank's batch. All ranks of the group compute them together."""
        handle = handle_of(self.model)
        if handle is None or handle.group.size == 1:
            return original(self, model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        local_loss = local_logits = None
        for owner, shard in enumerate(exchange_batches(inputs, handle.group, self.args.device)):
            if shard is None:
                continue
            loss: Tensor | None = None
            with torch.no_grad(), self.compute_loss_context_manager():
                if SHIFT_LABELS in shard:
                    loss, outputs = self.compute_loss(model, shard, return_outputs=True)
                else:
                    outputs = model(**shard)
            logits = None if prediction_loss_only else _gather_sequence(outputs["logits"], owner, handle.group)
            if owner == handle.group.rank:
                local_loss, local_logits = loss, logits
        if local_logits is not None:
            local_logits = local_logits[:, : inputs["input_ids"].shape[1]]
        return local_loss, local_logits, None if prediction_loss_only else inputs.get("labels")

    return prediction_step


def _gather_sequence(x_BTV: Tensor, owner: int, group: SequenceGroup) -> Tensor | None:
    """Returns x_BSV on the owner, None on the other ranks."""
    shards = gather_to(x_BTV, owner, group, "evaluation")
    return None if shards is None else in_order(torch.cat(shards, dim=1), group, dim=1)


def _handle_of_trainer(trainer: Any) -> Handle:
    handle = handle_of(trainer.model)
    if handle is None:
        raise UlyssesRuntimeError(
            "the batch is one rank's shard, but the Trainer's model is not parallelized: call install() before the Trainer is built."
        )
    return handle


def _base_model(model: nn.Module) -> nn.Module:
    """Returns the transformers model inside a PEFT model."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


def _is_fused(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Returns whether a kernel computes the loss without logits: TRL's fused head, or Liger's in training.

    Both accept `shift_labels` and `num_items_in_batch`.
    """
    base = _base_model(model)
    is_ligers = inspect.unwrap(base.forward).__module__.startswith("liger_kernel.")
    return bool(inputs.get("fused_lm_head")) or (is_ligers and base.training)


def _check_loss(handle: Handle) -> None:
    """Raises ValueError if the model has a loss of its own, which cross entropy of its logits is not."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    base: Any = _base_model(handle.model)
    is_its_result = handle.returns_loss_function
    if is_its_result is None:  # its forward cannot be run without weights, so its code has to tell
        is_its_result = "loss_function" in names_of(base)
    if not is_its_result or inspect.unwrap(base.loss_function) is not ForCausalLMLoss:
        raise UlyssesValueError(
            f"{type(base).__name__} has a loss other than the cross entropy of the next token (ForCausalLMLoss), and would "
            "compute it on one rank's tokens: train it without sequence parallelism, or with a loop of your own and "
            "handle.loss."
        )
