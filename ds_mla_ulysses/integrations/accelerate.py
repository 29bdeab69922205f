"""Replacements of what Accelerate calls: registration of a model, its engine, its process group and its data loader."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from ..hf.handle import Handle, handle_of
from ..hf.moba import implementations_of
from ..hf.parallelize import parallelize
from .dataloader import ShardedDataLoader
from .deepspeed import build_engine, load_config


class RegisteredMpu:
    """The return value of `register_with_transformers`. Accelerate asks it for the group, `initialize` for the handle."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def get_sequence_parallel_group(self) -> dist.ProcessGroup | None:
        """Returns the sequence-parallel process group; None if it has one rank."""
        return self.handle.group.process_group

    def get_sequence_parallel_world_size(self) -> int:
        """Returns the number of ranks of the sequence-parallel group."""
        return self.handle.group.size

    def get_sequence_parallel_rank(self) -> int:
        """Returns the rank of this process in the sequence-parallel group."""
        return self.handle.group.rank


class RegisteredModels:
    """The models that Accelerate has registered since `install`, and the replacements that depend on them.

    Args:
        settings: further arguments of `parallelize`, for every model.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._handles: list[Handle] = []
        self._groups: dict[int, SequenceGroup] = {}  # a group is created once for each sp_size

    def restore(self) -> None:
        """Restores all registered models."""
        for handle in self._handles:
            handle.restore()

    def register_model(
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
        """Replaces `UlyssesSPAttentionHF.register_with_transformers`: parallelizes the model, and no other.

        Lengths and batch sizes are ignored, because they may differ between batches.

        Returns:
            the mpu for `deepspeed.initialize`; None for sequence_parallel_size=1.

        Raises:
            ValueError: a name was given instead of the model, Accelerate does not use all processes, or the model was
                loaded with another attention implementation.
        """
        model, sp_size = model_name_or_path, sequence_parallel_size
        if sp_size == 1:
            return None
        if not isinstance(model, nn.Module):
            raise UlyssesValueError(f"give the loaded model, not {model!r}: only that one is made sequence-parallel.")
        _check_processes()
        before = handle_of(model)
        if before is not None and before in self._handles:  # registered by an earlier Trainer
            self._handles.remove(before)
            before.restore()
        _check_implementation(model, core_attn_implementation)
        group = self._groups.get(sp_size)
        ranks: dict[str, Any] = {"sp_size": sp_size} if group is None else {"group": group}
        handle = parallelize(model, **self._settings, **ranks)
        self._groups[sp_size] = handle.group
        self._handles.append(handle)
        return RegisteredMpu(handle)

    def answering(self, of_group: Callable[[SequenceGroup], Any]) -> Callable[[Any], Any]:
        """Makes a function of `deepspeed.utils.groups` answer with the group of the model that was registered last.

        DeepSpeed itself gets its own answer: an engine divides its gradients by it. So does everybody while another mpu or
        a device mesh is set.
        """

        def wrap(original: Callable[[], Any]) -> Callable[[], Any]:
            @functools.wraps(original)
            def ask() -> Any:
                from deepspeed.utils import groups

                caller = sys._getframe(1).f_globals.get("__name__", "")
                others = groups.mpu is not None or groups.mesh_device is not None
                if others or not self._handles or caller.split(".")[0] == "deepspeed":
                    return original()
                return of_group(self._handles[-1].group)

            return ask

        return wrap


def _check_processes() -> None:
    from accelerate import PartialState

    processes, seen = dist.get_world_size(), PartialState().num_processes
    if seen != processes:
        raise UlyssesValueError(
            f"Accelerate sees {seen} of the {processes} processes: on a machine without accelerator set use_cpu=True in "
            "TrainingArguments, or call accelerate.PartialState(cpu=True) before the Accelerator is built."
        )


def _check_implementation(model: Any, asked_for: str | None) -> None:
    implementation, *others = implementations_of(model.config.get_text_config())
    if asked_for not in (None, implementation, *others):
        raise UlyssesValueError(
            f"sp_attn_implementation={asked_for!r}, but the model was loaded with attn_implementation="
            f"{implementation!r}: leave sp_attn_implementation out (accelerate launch passes 'sdpa' by default: set "
            f"parallelism_config_sp_attn_implementation to {implementation!r}), or load the model with it."
        )


def _build_registered(create: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
    """Builds the engine of a registered model from the arguments that Accelerate gives to `deepspeed.initialize`."""
    handle = kwargs.pop("mpu").handle
    given = [kwargs.pop(name, None) for name in ("config", "config_params")]
    settings = load_config(next(config for config in given if config is not None))
    # Accelerate computes it from the sizes in ParallelismConfig, which may leave data parallelism out.
    sizes = (settings.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))
    micro, steps = (size if isinstance(size, int) else 1 for size in sizes)
    settings["train_batch_size"] = micro * steps * handle.data_size
    return build_engine(create, handle, settings, kwargs)


def adapt_dataloader(dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> ShardedDataLoader:
    """Replaces `UlyssesSPDataLoaderAdapter`."""
    return ShardedDataLoader(dl, SequenceGroup.of(sp_group), device)


def wrap_initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `deepspeed.initialize` build the engines of registered models as our `initialize` does."""

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("mpu"), RegisteredMpu):
            return original(*args, **kwargs)
        return _build_registered(original, kwargs)

    return initialize


def wrap_dl_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `Accelerator.deepspeed_ulysses_dl_adapter` shard over the group of a parallelized model."""

    @functools.wraps(original)
    def deepspeed_ulysses_dl_adapter(self: Any, dl: Any, model: nn.Module) -> Any:
        handle = handle_of(model)
        return original(self, dl, model) if handle is None else ShardedDataLoader(dl, handle.group, self.device)

    return deepspeed_ulysses_dl_adapter


def wrap_skip(original: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `skip_first_batches` count the micro-batches of a `ShardedDataLoader`."""

    @functools.wraps(original)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardedDataLoader):
            return dataloader.skip_first(num_batches)
        return original(dataloader, num_batches)

    return skip_first_batches
