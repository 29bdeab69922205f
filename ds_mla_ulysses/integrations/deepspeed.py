"""DeepSpeed engines whose update is the one-process update.

DeepSpeed knows what it divides gradients by from its `mpu`. Ours reports data and model parallelism
and keeps silent about sequence parallelism, because what DeepSpeed does with that differs between
ZeRO stages (0.19.8: summed gradients are divided by ranks / sequence-parallel size everywhere but in
ZeRO-3's reduce-scatter, which divides by ranks). Told nothing, every path divides by the ranks, and
`Handle.loss` gives gradients that much larger: nothing in DeepSpeed is patched.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..hf.handle import Handle

Config = str | os.PathLike | Mapping[str, Any]


def initialize(
    *,
    model: nn.Module,
    config: Config | Sequence[Config],
    handle: Handle,
    args: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    collate_fn: Any = None,
    **auto: Any,
) -> tuple[Any, Any, Any, Any]:
    """`deepspeed.initialize` for a parallelized model: the update equals the one-process update.

    From here on `handle.loss` gives gradients scaled by what the engine divides by. Expert modules
    are marked as ZeRO-3 leaf modules, since ranks that route to different experts would otherwise
    wait for each other. DeepSpeed's process-wide state is put back before it returns.

    Args:
        model: the parallelized model, or one that contains it.
        config: a DeepSpeed JSON file, a dict, or several of them, of which later ones override.
        handle: what `parallelize` returned.
        args, optimizer, model_parameters, training_data, lr_scheduler, collate_fn: as for `deepspeed.initialize`.
        **auto: values for the keys of the config that say "auto", by the key's own name
            (`train_micro_batch_size_per_gpu=1, lr=1e-4`).

    Returns:
        engine, optimizer, dataloader, lr_scheduler, as `deepspeed.initialize` does.

    Raises:
        ValueError: a key left "auto", or settings under which the update would not be right.
        RuntimeError: another parallel layout is active in DeepSpeed, or it is older than 0.19.
    """
    import deepspeed

    engine_arguments = dict(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        collate_fn=collate_fn,
    )
    return build_engine(deepspeed.initialize, handle, _fill_auto(load_config(config), auto), engine_arguments)


def build_engine(
    create: Callable[..., tuple[Any, Any, Any, Any]],
    handle: Handle,
    settings: dict[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """All that makes an engine's update right, around the call that creates it.

    Args:
        create: `deepspeed.initialize`.
        settings: the DeepSpeed config; changed in place.
        arguments: all others of `create`, without config and mpu.

    Raises: as `initialize`.
    """
    import deepspeed
    from deepspeed.utils import groups, set_z3_leaf_modules_by_name

    model = arguments["model"]
    if handle.is_restored:
        raise RuntimeError("the handle was restored: parallelize the model again.")
    inside = {id(m) for m in model.modules()}
    if not all(id(m) in inside for m in handle.model.modules()):
        raise ValueError("handle belongs to another model: pass the model that parallelize was given.")
    if tuple(map(int, deepspeed.__version__.split(".")[:2])) < (0, 19):
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} gives other updates than one process: install deepspeed >= 0.19.0."
        )
    _refuse(settings, handle)
    if getattr(groups, "mesh_device", None) is not None:
        raise RuntimeError("DeepSpeed already has a device mesh, which overrides the groups of this handle.")
    for key in ("sequence_parallel_size", "data_parallel_size"):
        settings.pop(key, None)  # DeepSpeed would build a mesh of its own from them
    if any(settings.get(name, {}).get("enabled") for name in ("bf16", "bfloat16", "fp16")):
        # What DeepSpeed itself does under sequence parallelism: ranks' partial sums travel in fp32.
        partial_sums = settings.get("seq_parallel_communication_data_type", "fp32")
        settings.setdefault("communication_data_type", partial_sums)

    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if settings.get("zero_optimization", {}).get("stage", 0) == 3 and experts:
        set_z3_leaf_modules_by_name(model, experts)

    if dist.get_world_size() == 1:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants it, and no launcher has set it
    with _restored(groups, "mpu"), without_cpu_extension():
        engine, *rest = create(**arguments, mpu=SequenceMpu(handle), config=settings)
    if engine.sequence_parallel_size != 1 or engine.seq_dp_world_size != dist.get_world_size():
        raise RuntimeError(
            f"DeepSpeed {deepspeed.__version__} averages gradients over other ranks than the versions that this package "
            "is tested with: install the pinned version of constraints.txt."
        )
    if not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()):
        _keep_norm(engine)
    _check_losses(engine, handle)
    handle.attach_engine(engine)
    return (engine, *rest)


def _check_losses(engine: Any, handle: Handle) -> None:
    """Has the handle look at each loss before the engine's backward."""
    backward = engine.backward

    @functools.wraps(backward)
    def checked_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        handle.check_loss(loss)
        return backward(loss, *args, **kwargs)

    engine.backward = checked_backward


def _keep_norm(engine: Any) -> None:
    """At stage 0 in fp32 DeepSpeed clips and forgets the norm, which get_global_grad_norm then cannot tell."""
    take_step = engine._take_model_step

    def keep_norm_and_step(*args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        engine._global_grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        take_step(*args, **kwargs)

    engine._take_model_step = keep_norm_and_step


def init_deepspeed_on_cpu() -> None:
    """Initialises DeepSpeed's communication, if this process has been launched as one of several on CPUs."""
    import deepspeed

    if torch.cuda.is_available() or "RANK" not in os.environ or deepspeed.comm.is_initialized():
        return
    with without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def load_config(config: Config | Sequence[Config]) -> dict[str, Any]:
    """A DeepSpeed config as a dict of its own; of several, later ones override key by key."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            return json.load(file)
    merged: dict[str, Any] = {}
    for part in config:
        _merge(merged, load_config(part))
    return merged


class SequenceMpu:
    """What DeepSpeed asks about parallelism: data-parallel size and rank for batch sizes and samplers,
    the whole world as the group that parameters are sharded and gradients are summed over (ZeRO-3 asks
    for it as the *data-parallel* group), a group of one for model parallelism.

    Sequence parallelism is deliberately absent (see the top of this file), and so is an alias of it
    as model parallelism, which breaks universal checkpoints.
    """

    def __init__(self, handle: Handle) -> None:
        self._data_rank, self._data_size = handle.data_rank, handle.data_size
        # Only the members of a group have to create it, so this does not grow with the world.
        self._model_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    get_sequence_data_parallel_group = get_data_parallel_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(range(dist.get_world_size()))

    def get_data_parallel_world_size(self) -> int:
        return self._data_size

    def get_data_parallel_rank(self) -> int:
        return self._data_rank

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._model_group

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    # Universal checkpoints ask by these names.
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _fill_auto(settings: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    missing, used = [], set()

    def fill(node: dict[str, Any], path: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                fill(value, f"{path}{key}.")
            elif value == "auto" and key in values:
                node[key] = values[key]
                used.add(key)
            elif value == "auto":
                missing.append(f"{path}{key}")

    fill(settings, "")
    if missing:
        keywords = ", ".join(f"{path.rpartition('.')[2]}=..." for path in missing)
        raise ValueError(
            f'the DeepSpeed config leaves {", ".join(missing)} "auto": give initialize({keywords}), or write values '
            "into the config."
        )
    unused = sorted(set(values) - used)
    if unused:
        raise ValueError(f'{", ".join(unused)}: no key of that name is "auto" in the DeepSpeed config.')
    return settings


def _refuse(settings: Mapping[str, Any], handle: Handle) -> None:
    zero = settings.get("zero_optimization", {})
    refused = {
        "prescale_gradients": settings.get("prescale_gradients", False),
        "gradient_predivide_factor": settings.get("gradient_predivide_factor", 1.0) != 1.0,
        "managed_gradient_accumulation=false": settings.get("managed_gradient_accumulation", True) is False,
        "tensor_parallel": settings.get("tensor_parallel", {}).get("autotp_size", 0) > 1,
        "zero_optimization.mics_shard_size": zero.get("mics_shard_size", -1) > 0,
    }
    for key, is_set in refused.items():
        if is_set:
            raise ValueError(f"{key} changes the gradient scale in a way this package does not follow: remove it.")
    for key, have in (("sequence_parallel_size", handle.group.size), ("data_parallel_size", handle.data_size)):
        if settings.get(key, have) != have:
            raise ValueError(f"{key} is {settings[key]} in the DeepSpeed config, but the handle has {have}.")


@contextmanager
def _restored(owner: Any, name: str) -> Iterator[None]:
    before = getattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_cpu_extension() -> Iterator[None]:
    """Keeps DeepSpeed from compiling its shared-memory all-reduce, a C++ extension for CPU inference."""
    import deepspeed.ops

    table, name = deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm"
    if torch.cuda.is_available() or name not in table:
        yield
        return
    before, table[name] = table[name], False
    try:
        yield
    finally:
        table[name] = before
