"""install / uninstall: HF Trainer, Accelerate and TRL with `ParallelismConfig(sp_backend="deepspeed")`.

What is replaced, for the whole process and until `uninstall`:

| symbol                                                        | what ours does                                      |
|---------------------------------------------------------------|-----------------------------------------------------|
| deepspeed: UlyssesSPAttentionHF.register_with_transformers    | parallelizes the given model, and no other          |
| deepspeed: UlyssesSPDataLoaderAdapter                         | ShardedDataLoader                                   |
| deepspeed: initialize                                         | engines of such models are built as by `initialize` |
| deepspeed: utils.groups._get_sequence_parallel_group          | the group of the latest model (until now a KeyError) |
| deepspeed: utils.groups._get_sequence_parallel_world_size, _get_sequence_parallel_rank | its size, this rank in it |
| accelerate: Accelerator.deepspeed_ulysses_dl_adapter          | ShardedDataLoader of the model's group              |
| accelerate, transformers.trainer: skip_first_batches          | skips in a ShardedDataLoader                        |
| transformers: Trainer.compute_loss                            | the loss of the group's whole sequences             |
| transformers: Trainer._get_num_items_in_batch                 | supervised tokens of the step, over all ranks       |
| transformers: Trainer.prediction_step (with sp_in_eval)       | evaluates sharded                                   |

Each falls through to the original for models and batches that are not sequence-parallel. A batch is sequence-parallel
if it has a layout (`ulysses_layout`): neither `training` nor a setting decides it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.group import SequenceGroup
from ..hf.checks import Checks
from ..hf.handle import Handle, handle_of
from ..hf.moba import implementations_of
from ..hf.parallelize import parallelize
from ..hf.strategies import check_strategy
from ..layout.batch import exchange_batches
from ..layout.loss import count_items, sequence_loss, sum_of_losses, with_value
from ..layout.shard import LAYOUT, SHIFT_LABELS
from ..layout.split import in_order
from ..planner.auto import Auto
from ..process_state import PROCESS
from ..requirements import check, highest_tested, installed, lowest
from .dataloader import ShardedDataLoader
from .deepspeed import build_engine, init_deepspeed_on_cpu, load_config

#: Packages of whose symbols `install` replaces some.
_REPLACES_IN = ("deepspeed", "accelerate", "transformers")
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"


def install(
    *,
    sp_in_eval: bool = False,
    strategy: str | Auto = "packed",
    split: str = "contiguous",
    head_chunks: int = 1,
    checks: str = "always",
) -> None:
    """Makes Trainer and Accelerate train over sequences that ranks share, with the numbers of one process.

    Call it before the Trainer (or the Accelerator) is built, and before TrainingArguments. A second call with the
    same settings does nothing. Under a launcher on a machine without accelerator it initialises DeepSpeed's
    communication (gloo), which Accelerate does on others only.

    Args:
        sp_in_eval: evaluation and prediction of a Trainer share sequences too. By default each rank evaluates
            samples of its own with the plain model, as without sequence parallelism.
        strategy, split, head_chunks, checks: as in `parallelize`, for every model.

    Raises:
        ValueError: an unknown strategy, a split that it does not have, no number of parts.
        RuntimeError: a symbol of the table is missing in the installed versions, or another setting is installed.

    Warns: UserWarning for each package whose version lies outside the tested range.
    """
    settings = {
        "sp_in_eval": sp_in_eval,
        "strategy": strategy,
        "split": split,
        "head_chunks": head_chunks,
        "checks": checks,
    }
    if PROCESS.installation is not None:
        if PROCESS.installation.settings != settings:
            found = ", ".join(f"{name}={value!r}" for name, value in PROCESS.installation.settings.items())
            raise RuntimeError(f"installed already, with {found}: call ds_mla_ulysses.uninstall() first.")
        return
    check_strategy(strategy, split, head_chunks)
    Checks(checks)
    for package in _REPLACES_IN:
        if check(package) != "ok":
            warnings.warn(
                f"{package} {installed(package)} is outside the tested range ({lowest(package)} to "
                f"{highest_tested(package)}).",
                stacklevel=2,
            )
    PROCESS.installation = _Installation(settings)
    # A process group whose threads outlive the interpreter can abort the process after all work is done.
    atexit.register(uninstall)
    init_deepspeed_on_cpu()


def uninstall() -> None:
    """Puts every replaced symbol back and restores the models that were parallelized through them."""
    if PROCESS.installation is not None:
        PROCESS.installation.undo()
        PROCESS.installation = None
        atexit.unregister(uninstall)


@dataclass(frozen=True)
class _Symbol:
    """An attribute of a module, or of a class in it, as it was found."""

    owner: Any
    name: str
    original: Any

    @classmethod
    def find(cls, module: str, path: str) -> _Symbol:
        owner: Any = importlib.import_module(module)
        *classes, name = path.split(".")
        for part in classes:
            owner = getattr(owner, part, object)
        if name not in vars(owner):
            package = module.split(".")[0]
            raise RuntimeError(
                f"{package} {importlib.metadata.version(package)} has no {module}.{path}, which install() replaces: "
                f"use {package}=={highest_tested(package)}."
            )
        # From the class's own dict: a classmethod looked up would be a new object each time.
        return cls(owner, name, vars(owner)[name])

    def replace(self, new: Any) -> None:
        setattr(self.owner, self.name, new)

    def put_back(self) -> None:
        setattr(self.owner, self.name, self.original)


class _Installation:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self._handles: list[Handle] = []
        self._groups: dict[int, SequenceGroup] = {}
        self._engines_in_building = 0
        table: list[tuple[str, str, Callable[[Any], Any]]] = [
            (_ULYSSES, "UlyssesSPAttentionHF.register_with_transformers", lambda _: classmethod(self._register)),
            (_ULYSSES, "UlyssesSPDataLoaderAdapter", lambda _: _adapter),
            ("deepspeed", "initialize", self._wrap_initialize),
            ("deepspeed.utils.groups", "_get_sequence_parallel_group", self._answer(_process_group)),
            ("deepspeed.utils.groups", "_get_sequence_parallel_world_size", self._answer(lambda group: group.size)),
            ("deepspeed.utils.groups", "_get_sequence_parallel_rank", self._answer(lambda group: group.rank)),
            ("accelerate.accelerator", "Accelerator.deepspeed_ulysses_dl_adapter", _wrap_dl_adapter),
            ("accelerate.accelerator", "skip_first_batches", _wrap_skip),
            ("transformers.trainer", "skip_first_batches", _wrap_skip),
            ("transformers.trainer", "Trainer.compute_loss", _wrap_compute_loss),
            ("transformers.trainer", "Trainer._get_num_items_in_batch", _wrap_num_items),
        ]
        if settings["sp_in_eval"]:
            table.append(("transformers.trainer", "Trainer.prediction_step", _wrap_prediction_step))
        # All are found before the first is replaced.
        self.symbols = [_Symbol.find(module, path) for module, path, _ in table]
        for symbol, (_, _, make) in zip(self.symbols, table, strict=True):
            symbol.replace(make(symbol.original))

    def _answer(self, of_group: Callable[[SequenceGroup], Any]) -> Callable[[Any], Any]:
        """Makes one of DeepSpeed's functions about its sequence-parallel group answer for the model's group.

        While any engine is built, or if another mpu or device mesh is set, DeepSpeed answers: an engine would divide its
        gradients by the answer.
        """

        def wrap(original: Callable[[], Any]) -> Callable[[], Any]:
            @functools.wraps(original)
            def ask() -> Any:
                from deepspeed.utils import groups

                others = self._engines_in_building or groups.mpu is not None or groups.mesh_device is not None
                if others or not self._handles:
                    return original()
                return of_group(self._handles[-1].group)

            return ask

        return wrap

    def _wrap_initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            self._engines_in_building += 1
            try:
                if not isinstance(kwargs.get("mpu"), RegisteredMpu):
                    return original(*args, **kwargs)
                return _build(original, kwargs)
            finally:
                self._engines_in_building -= 1

        return initialize

    def undo(self) -> None:
        for symbol in reversed(self.symbols):
            symbol.put_back()
        for handle in self._handles:
            handle.restore()

    def _register(
        self,
        _: type,
        model_name_or_path: Any,
        core_attn_implementation: str | None = None,
        sequence_parallel_size: int = 1,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> RegisteredMpu | None:
        """In the place of `register_with_transformers`; lengths and batch sizes may be any."""
        from accelerate import PartialState

        model, sp_size = model_name_or_path, sequence_parallel_size
        if sp_size == 1:
            return None
        if not isinstance(model, nn.Module):
            raise ValueError(f"give the loaded model, not {model!r}: only that one is made sequence-parallel.")
        processes, seen = dist.get_world_size(), PartialState().num_processes
        if seen != processes:
            raise ValueError(
                f"Accelerate sees {seen} of the {processes} processes: on a machine without accelerator set use_cpu=True in "
                "TrainingArguments, or call accelerate.PartialState(cpu=True) before the Accelerator is built."
            )
        before = handle_of(model)
        if before in self._handles:  # of an earlier Trainer
            self._handles.remove(before)
            before.restore()
        implementation, *others = implementations_of(model.config.get_text_config())
        if core_attn_implementation not in (None, implementation, *others):
            raise ValueError(
                f"sp_attn_implementation={core_attn_implementation!r}, but the model was loaded with "
                f"attn_implementation={implementation!r}: leave sp_attn_implementation out (accelerate launch says 'sdpa' by "
                f"itself: set parallelism_config_sp_attn_implementation to {implementation!r}), or load the model with it."
            )
        group = self._groups.get(sp_size)
        which: dict[str, Any] = {"sp_size": sp_size} if group is None else {"group": group}
        settings = {name: value for name, value in self.settings.items() if name != "sp_in_eval"}
        handle = parallelize(model, **settings, **which)
        self._groups[sp_size] = handle.group
        self._handles.append(handle)
        return RegisteredMpu(handle)


def _process_group(group: SequenceGroup) -> dist.ProcessGroup | None:
    return group.process_group


class RegisteredMpu:
    """What `register_with_transformers` returns: Accelerate asks it for the group, `initialize` for the handle."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        return self.handle.group.process_group

    def get_sequence_parallel_world_size(self) -> int:
        return self.handle.group.size

    def get_sequence_parallel_rank(self) -> int:
        return self.handle.group.rank


def _build(create: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """The engine of a model that Accelerate has registered, from its arguments for `deepspeed.initialize`."""
    handle = kwargs.pop("mpu").handle
    given = [kwargs.pop(name, None) for name in ("config", "config_params")]
    settings = load_config(next(config for config in given if config is not None))
    # Accelerate derives it from ParallelismConfig's own sizes, where data parallelism may be left out.
    sizes = (settings.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    micro, steps = (size if isinstance(size, int) else 1 for size in sizes)
    settings["train_batch_size"] = micro * steps * handle.data_size
    return build_engine(create, handle, settings, kwargs)


def _adapter(dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> ShardedDataLoader:
    return ShardedDataLoader(dl, SequenceGroup.of(sp_group), device)


def _wrap_dl_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def deepspeed_ulysses_dl_adapter(self: Any, dl: Any, model: nn.Module) -> Any:
        handle = handle_of(model)
        return original(self, dl, model) if handle is None else ShardedDataLoader(dl, handle.group, self.device)

    return deepspeed_ulysses_dl_adapter


def _wrap_skip(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedDataLoader):
            return dataloader.skip_first(num_batches)
        return original(dataloader, num_batches)

    return skip_first_batches


def _wrap_num_items(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_num_items_in_batch(self: Any, batch_samples: list[Any], device: torch.device) -> Any:
        if not batch_samples or LAYOUT not in batch_samples[0]:
            return original(self, batch_samples, device)
        if any(SHIFT_LABELS not in batch for batch in batch_samples):
            return None
        handle = _handle_of_trainer(self)
        if self.args.average_tokens_across_devices:
            count = handle.num_items(batch_samples)
        else:  # each data-parallel group's own
            count = count_items([batch[SHIFT_LABELS] for batch in batch_samples], handle.group)
        return torch.tensor(count, device=device)

    return _get_num_items_in_batch


def _wrap_compute_loss(original: Callable[..., Any]) -> Callable[..., Any]:
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
            return (loss, outputs) if return_outputs else loss
        if self.model.training and self.get_sp_size() > 1:
            raise ValueError(
                "a training batch is not sharded over the sequence group: batches have to come from the loader that "
                "the Trainer (or accelerator.prepare) returns."
            )
        return original(self, model, inputs, return_outputs, num_items_in_batch)

    return compute_loss


def _sharded_loss(
    trainer: Any, model: nn.Module, inputs: dict[str, Any], num_items: Tensor | int | None
) -> tuple[Tensor, Any]:
    """Trainer's loss of a batch of which `inputs` is this rank's part; and the model's outputs of that part.

    Averaged over all ranks, as Trainer logs it, the value is that of one process; so is the gradient that
    DeepSpeed averages over all ranks.
    """
    handle = _handle_of_trainer(trainer)
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func is not supported under sequence parallelism: it would see a part of each sequence. "
            "Remove it, or train without sequence parallelism."
        )
    if getattr(trainer.args, "neftune_noise_alpha", None) is not None:
        raise ValueError(
            "neftune_noise_alpha is not supported under sequence parallelism: the noise would be scaled by the length of "
            "one rank's part. Leave it out, or train without sequence parallelism."
        )
    inputs = dict(inputs)
    shift_labels = inputs.pop(SHIFT_LABELS, None)
    if shift_labels is None:
        raise ValueError("the batch has no labels: the loss under sequence parallelism is computed from them.")
    epsilon = getattr(trainer.label_smoother, "epsilon", 0.0)
    if _is_fused(handle.model, inputs):
        if epsilon:
            raise ValueError(
                "label_smoothing_factor is not supported with a fused loss: switch off fused_linear_cross_entropy."
            )
        # num_items_in_batch=1: the sum over this rank's tokens.
        outputs = model(**inputs, labels=shift_labels, shift_labels=shift_labels, num_items_in_batch=1)
        loss = sum_of_losses(_local_sum(outputs), shift_labels, handle.group, num_items, handle.group.size)
    else:
        _check_loss(handle.model)
        outputs = model(**inputs)
        loss = sequence_loss(
            outputs["logits"],
            shift_labels,
            handle.group,
            num_items,
            handle.group.size,
            epsilon,
            check=handle.checks.due("labels"),
        )
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


def _local_sum(outputs: Any) -> Tensor:
    """The sum of the local tokens' losses that a fused kernel has made, without any auxiliary loss."""
    if outputs.loss is not None:
        return outputs.loss
    if getattr(outputs, "log_probs", None) is None:
        raise ValueError(
            "the auxiliary loss of routers is not supported with Liger's fused loss under sequence parallelism: switch off "
            "fused_linear_cross_entropy, or set output_router_logits=False."
        )
    return -outputs.log_probs.sum()  # TRL's fused head; ignored tokens are zero


def _wrap_prediction_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prediction_step(
        self: Any,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """This rank's loss, logits and labels of its own batch, which the whole group computes with it."""
        handle = handle_of(self.model)
        if handle is None or handle.group.size == 1:
            return original(self, model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        own_loss = own_logits = None
        for owner, part in enumerate(exchange_batches(inputs, handle.group, self.args.device)):
            if part is None:
                continue
            with torch.no_grad(), self.compute_loss_context_manager():
                if SHIFT_LABELS in part:
                    loss, outputs = self.compute_loss(model, part, return_outputs=True)
                else:
                    loss, outputs = None, model(**part)
            logits = None if prediction_loss_only else _gather_to(owner, outputs["logits"], handle.group)
            if owner == handle.group.rank:
                own_loss, own_logits = loss, logits
        if own_logits is not None:
            own_logits = own_logits[:, : inputs["input_ids"].shape[1]]
        return own_loss, own_logits, None if prediction_loss_only else inputs.get("labels")

    return prediction_step


def _gather_to(owner: int, x_BTV: Tensor, group: SequenceGroup) -> Tensor | None:
    """x_BSV on the owner, None elsewhere."""
    x_BTV = x_BTV.contiguous()
    parts = [torch.empty_like(x_BTV) for _ in range(group.size)] if owner == group.rank else None
    dist.gather(x_BTV, parts, group=group.process_group, group_dst=owner)
    return None if parts is None else in_order(torch.cat(parts, dim=1), group, dim=1)


def _handle_of_trainer(trainer: Any) -> Handle:
    handle = handle_of(trainer.model)
    if handle is None:
        raise RuntimeError("the batch is one rank's part, but the Trainer's model is not parallelized.")
    return handle


def _base_model(model: nn.Module) -> nn.Module:
    """The transformers model inside of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _is_fused(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the loss comes out of a kernel without logits: TRL's fused head, or Liger's in training.

    Both take `shift_labels` and `num_items_in_batch`.
    """
    base = _base_model(model)
    is_ligers = inspect.unwrap(base.forward).__module__.startswith("liger_kernel.")
    return bool(inputs.get("fused_lm_head")) or (is_ligers and base.training)


def _check_loss(model: nn.Module) -> None:
    """Raises ValueError if the model has a loss of its own, which cross entropy of its logits is not."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    base = _base_model(model)
    calls = getattr(getattr(inspect.unwrap(base.forward), "__code__", None), "co_names", ())
    if "loss_function" not in calls or base.loss_function is not ForCausalLMLoss:
        raise ValueError(
            f"{type(base).__name__} has a loss other than the cross entropy of the next token (ForCausalLMLoss), and would "
            "compute it on one rank's tokens: train it without sequence parallelism, or with a loop of your own and "
            "handle.loss."
        )
