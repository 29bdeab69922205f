"""DeepSpeed engines whose update equals the update of one process.

DeepSpeed decides by its `mpu` what it divides gradients by. Our mpu reports data and model parallelism, but no sequence
parallelism, because DeepSpeed's handling of that differs between ZeRO stages: in 0.19.8, summed gradients are divided by
ranks / sequence-parallel size, except in ZeRO-3's reduce-scatter, which divides by ranks. Without it, every stage divides
by the number of ranks, and `Handle.loss` multiplies its gradients by this number.

The mpu is an argument of `deepspeed.initialize`. Beyond it, `initialize` touches the following:

| what                                                                | why                                         | until        |
|---------------------------------------------------------------------|---------------------------------------------|--------------|
| environment variable LOCAL_RANK, if it is missing in a job of one process | DeepSpeed reads it                    | the engine is built; at ZeRO-3 it stays, because each step may read it |
| `deepspeed.utils.groups.mpu`                                        | DeepSpeed stores our mpu there              | the engine is built: later engines must not find it |
| `deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"]`, without a GPU | DeepSpeed would compile a C++ extension | the engine is built |
| the model's expert modules, at ZeRO-3: marked as leaf modules by `set_z3_leaf_modules_by_name` | ranks that route to different experts would wait for each other | the model is deleted |
| the engine's method `backward`                                      | to refuse a loss that is not the group's    | the engine is deleted |
| the engine's method `_take_model_step`, at stage 0 in fp32          | to keep the gradient norm                   | the engine is deleted |

No class or function of DeepSpeed is replaced. (`install` does replace some, see there.)
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

from ..errors import UlyssesRuntimeError, UlyssesValueError
from ..hf.handle import Handle
from ..requirements import check, lowest

Config = str | os.PathLike[str] | Mapping[str, Any]


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
    """Calls `deepspeed.initialize` for a parallelized model, so that the update equals the one-process update.

    From now on, the gradients of `handle.loss` are multiplied by the number that the engine divides them by. Expert modules are marked
    as ZeRO-3 leaf modules, because ranks that route to different experts would otherwise wait for each other. The
    process-wide state of DeepSpeed is put back before this returns.

    Args:
        model: the parallelized model, or a model that contains it.
        config: a DeepSpeed JSON file, a dict, or a sequence of them, in which later ones override earlier ones.
        handle: the return value of `parallelize`.
        args, optimizer, model_parameters, training_data, lr_scheduler, collate_fn: arguments of `deepspeed.initialize`.
        **auto: values for the config's keys whose value is "auto", by the name of the key
            (`train_micro_batch_size_per_gpu=1, lr=1e-4`).

    Returns:
        engine, optimizer, dataloader, lr_scheduler, as `deepspeed.initialize` does.

    Raises:
        ValueError: a key is still "auto", the handle belongs to another model, or the update would be wrong with a setting.
        RuntimeError: the handle was restored or has an engine already, DeepSpeed has a device mesh, or its version is lower
            than `version.REQUIREMENTS` allows.
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
    """Builds an engine whose update equals the one-process update.

    Args:
        create: `deepspeed.initialize`.
        handle: the handle of the parallelized model.
        settings: the DeepSpeed config, which is changed in place.
        arguments: all other arguments of `create`, without config and mpu.

    Returns and raises: as `initialize`.
    """
    model = arguments["model"]
    _check_handle(handle, model)
    _check_deepspeed()
    _check_settings(settings, handle)
    _complete_settings(settings)
    _mark_experts(model, settings)
    engine, *rest = _create(create, handle, settings, arguments)
    _check_average(engine)
    if not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()):
        _keep_norm(engine)
    _check_losses(engine, handle)
    handle.attach_engine(engine)
    return (engine, *rest)


def _check_handle(handle: Handle, model: nn.Module) -> None:
    """Raises an error unless the handle is that of the model, or of a part of it, and is still in force."""
    if handle.is_restored:
        raise UlyssesRuntimeError("the handle was restored: parallelize the model again.")
    inside = {id(m) for m in model.modules()}
    if not all(id(m) in inside for m in handle.model.modules()):
        raise UlyssesValueError("handle belongs to another model: pass the model that parallelize was given.")


def _check_deepspeed() -> None:
    """Raises RuntimeError if the version or the state of DeepSpeed would make the update wrong."""
    import deepspeed
    from deepspeed.utils import groups

    if check("deepspeed", deepspeed.__version__) == "too old":
        raise UlyssesRuntimeError(
            f"With DeepSpeed {deepspeed.__version__} the updates differ from those of one process: "
            f"install deepspeed >= {lowest('deepspeed')}."
        )
    if getattr(groups, "mesh_device", None) is not None:
        raise UlyssesRuntimeError("DeepSpeed already has a device mesh, which overrides the groups of this handle.")


def _check_settings(settings: Mapping[str, Any], handle: Handle) -> None:
    """Raises ValueError for settings that change the gradient scale, and for sizes that are not the handle's."""
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
            raise UlyssesValueError(
                f"{key} changes the gradient scale in a way that this package does not support: remove it."
            )
    for key, have in (("sequence_parallel_size", handle.group.size), ("data_parallel_size", handle.data_size)):
        if settings.get(key, have) != have:
            raise UlyssesValueError(f"{key} is {settings[key]} in the DeepSpeed config, but the handle has {have}.")


def _complete_settings(settings: dict[str, Any]) -> None:
    """Removes sizes from which DeepSpeed would build a mesh, and sets the dtype in which gradients are summed."""
    for key in ("sequence_parallel_size", "data_parallel_size"):
        settings.pop(key, None)
    if any(settings.get(name, {}).get("enabled") for name in ("bf16", "bfloat16", "fp16")):
        # DeepSpeed does the same under its sequence parallelism: the partial sums of the ranks travel in fp32.
        partial_sums = settings.get("seq_parallel_communication_data_type", "fp32")
        settings.setdefault("communication_data_type", partial_sums)


def _stage(settings: Mapping[str, Any]) -> int:
    stage: int = settings.get("zero_optimization", {}).get("stage", 0)
    return stage


def _mark_experts(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Marks expert modules as leaf modules of ZeRO-3, which gathers all parameters of a leaf module together."""
    from deepspeed.utils import set_z3_leaf_modules_by_name

    experts = [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    if _stage(settings) == 3 and experts:
        set_z3_leaf_modules_by_name(model, experts)


def _create(
    create: Callable[..., tuple[Any, Any, Any, Any]],
    handle: Handle,
    settings: dict[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[Any, Any, Any, Any]:
    """Calls `deepspeed.initialize` with our mpu, and puts the process-wide state back."""
    from deepspeed.utils import groups

    with _local_rank(stays=_stage(settings) == 3), _restored(groups, "mpu"), without_cpu_extension():
        return create(**arguments, mpu=SequenceMpu(handle), config=settings)


def _check_average(engine: Any) -> None:
    """Raises RuntimeError if the engine would divide gradients by another number than that of all ranks."""
    import deepspeed

    if engine.sequence_parallel_size != 1 or engine.seq_dp_world_size != dist.get_world_size():
        raise UlyssesRuntimeError(
            f"DeepSpeed {deepspeed.__version__} averages gradients over other ranks than the versions that this package "
            "is tested with: install the pinned version of constraints.txt."
        )


def _check_losses(engine: Any, handle: Handle) -> None:
    """Replaces the engine's `backward`: the handle checks each loss before it."""
    backward = engine.backward

    @functools.wraps(backward)
    def checked_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
        handle.check_loss(loss)
        return backward(loss, *args, **kwargs)

    engine.backward = checked_backward


def _keep_norm(engine: Any) -> None:
    """Replaces the engine's `_take_model_step`, so that `get_global_grad_norm` returns the norm before clipping.

    At stage 0 in fp32, DeepSpeed clips without keeping the norm.
    """
    take_step = engine._take_model_step

    def keep_norm_and_step(*args: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        engine._global_grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        take_step(*args, **kwargs)

    engine._take_model_step = keep_norm_and_step


def init_deepspeed_on_cpu() -> None:
    """Initialises DeepSpeed's communication on a machine without a GPU, if a launcher has started this process."""
    import deepspeed

    if torch.cuda.is_available() or "RANK" not in os.environ or deepspeed.comm.is_initialized():
        return
    with without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def load_config(config: Config | Sequence[Config]) -> dict[str, Any]:
    """Returns a new dict with a DeepSpeed config. In a sequence of configs, later ones override earlier ones key by key."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if isinstance(config, (str, os.PathLike)):
        with open(config, encoding="utf-8") as file:
            loaded: dict[str, Any] = json.load(file)
            return loaded
    merged: dict[str, Any] = {}
    for part in config:
        _merge(merged, load_config(part))
    return merged


class SequenceMpu:
    """Answers DeepSpeed's questions about parallelism.

    Size and rank of data parallelism are those for batch sizes and samplers. The group over which parameters are sharded
    and gradients are summed is the whole world; ZeRO-3 asks for it as the *data-parallel* group. The model-parallel group
    has one rank.

    Sequence parallelism is absent on purpose (see the top of this file). It is not reported as model parallelism either,
    because that breaks universal checkpoints.
    """

    def __init__(self, handle: Handle) -> None:
        self._data_rank, self._data_size = handle.data_rank, handle.data_size
        # Only the members of a group have to create it, so the cost does not grow with the world.
        self._model_group = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        assert dist.group.WORLD is not None
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

    # Universal checkpoints use these names.
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
    """Replaces "auto" by the values of the same names, in place.

    Raises:
        ValueError: a key is still "auto", or no key is "auto" for a value.
    """
    missing: list[str] = []
    used: set[str] = set()

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
        raise UlyssesValueError(
            f'the DeepSpeed config leaves {", ".join(missing)} "auto": give initialize({keywords}), or write values '
            "into the config."
        )
    unused = sorted(set(values) - used)
    if unused:
        raise UlyssesValueError(f'{", ".join(unused)}: no key of that name is "auto" in the DeepSpeed config.')
    return settings


@contextmanager
def _local_rank(*, stays: bool) -> Iterator[None]:
    """Sets LOCAL_RANK, which DeepSpeed reads, if no launcher has set it because the job is one process.

    Args:
        stays: whether it is still set afterwards, unless the block raises.
    """
    if dist.get_world_size() > 1 or "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = "0"
    is_built = False
    try:
        yield
        is_built = True
    finally:
        if not (stays and is_built):
            os.environ.pop("LOCAL_RANK", None)


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
