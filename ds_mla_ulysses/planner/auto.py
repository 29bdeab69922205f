"""strategy="auto": chosen once, the same on all ranks, from widths, ranks, sequence length, link and compute rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from .cost import Estimate, choose, estimate, other_splits
from .strategies import STRATEGIES, names_with_split
from .work import Machine, Work

#: The measurement sends this many bytes from each rank, and multiplies square matrices of this size.
_BYTES, _EDGE = 2**23, 1024
_REPEATS = 3


@dataclass(frozen=True)
class Auto:
    """What `strategy="auto"` bases its choice on; pass it instead of the name "auto".

    Attributes:
        tokens: tokens of all sequences of a micro-batch together. Default: 4,096 for each rank, or one sequence if that
            is more.
        sequence: tokens of one sequence. Default: all tokens are one sequence.
        link_gbps: Gbit/s that a rank sends to other ranks. Measured by default.
        tflops: 10^12 floating-point operations per second in matrix products. Measured by default.
        dtype: the dtype that the model trains in. Default: the dtype of its parameters, which an engine or autocast may
            change later.

    Raises:
        ValueError: a value is not positive or has the wrong type.
    """

    tokens: int | None = None
    sequence: int | None = None
    link_gbps: float | None = None
    tflops: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        kinds: tuple[type, ...]
        for names, kinds, of in (
            (("tokens", "sequence"), (int,), "whole number"),
            (("link_gbps", "tflops"), (int, float), "number"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (type(value) in kinds and 0 < value < math.inf):
                    raise UlyssesValueError(f"Auto({name}={value!r}) must be a positive {of}, or left out.")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise UlyssesValueError(
                f"Auto(dtype={self.dtype!r}) must be a torch.dtype such as torch.bfloat16, or left out."
            )


def decide(
    auto: Auto, work: Work, refused: Mapping[str, str], group: SequenceGroup, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """Returns the strategy and the reason, the same on every rank of the job. Every rank has to call it.

    Args:
        work: one layer; its tokens and the bytes of an element are replaced by what `auto` says.
        refused: the strategies that the model excludes, and why.
        group: the sequence-parallel group.
        dtype, device: of the model's parameters.

    Raises:
        ValueError: no strategy is possible, or the link cannot be measured.
    """
    if group.size == 1:
        strategy = names_with_split(group.split)[0]
        return strategy, f"{strategy}: a group of one sends nothing"
    dtype = auto.dtype or dtype
    if auto.link_gbps is None or auto.tflops is None:
        device = _device_of_job(group, device)
    link = auto.link_gbps if auto.link_gbps is not None else _measured_link(group, device)
    rate = auto.tflops if auto.tflops is not None else _measured_rate(dtype, device)
    # Groups may measure different rates. What the first rank of the job measured is used by all ranks.
    measured = [(link, rate)]
    dist.broadcast_object_list(measured, src=0)
    machine = Machine(*measured[0])
    tokens = auto.tokens or max(4096 * group.size, auto.sequence or 0)
    work = replace(work, tokens=tokens, sequence=auto.sequence, element_bytes=dtype.itemsize)
    found = [Estimate(s, refused[s]) if s in refused else estimate(work, s, machine) for s in STRATEGIES]
    best, why = choose(found)
    how = [f"measured on {device.type}" if x is None else "given" for x in (auto.link_gbps, auto.tflops)]
    of = "the parameters'" if auto.dtype is None else "given"
    length = "assumed: say Auto(tokens=...)" if auto.tokens is None else "given"
    why += other_splits(work, machine, best, excluded=refused)
    return best.strategy, (
        f"{why}; {work.tokens:,} tokens ({length}) on {group.size} ranks, {str(dtype).removeprefix('torch.')} ({of}), "
        f"{machine.link_gbps:.3g} Gbit/s ({how[0]}), {machine.tflops:.3g} TFLOP/s ({how[1]})"
    )


def _device_of_job(group: SequenceGroup, device: torch.device) -> torch.device:
    """Returns the device on which the job will run. A model is often still on the CPU or on meta when it is parallelized.

    Raises:
        ValueError: the model is on the CPU, over which the job's backend cannot send.
    """
    if device.type not in ("cpu", "meta"):
        return device
    named = dist.get_backend_config(group.process_group)
    backends = dict(part.split(":") for part in named.split(","))
    # A gloo backend is registered for accelerators too, but jobs on accelerators do not use it.
    accelerators = [kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"]
    if accelerators:
        return torch.device(accelerators[0], torch.accelerator.current_device_index())
    if "cpu" not in backends:
        raise UlyssesValueError(
            f"strategy='auto' cannot measure on a CPU over the backend {named!r}: move the model to its device first, or "
            "give Auto(link_gbps=, tflops=)."
        )
    return torch.device("cpu")


def _measured_link(group: SequenceGroup, device: torch.device) -> float:
    """Returns the Gbit/s that a rank sends to other ranks in an all-to-all of its group."""
    part = _BYTES // (group.size - 1)
    out, x = (torch.empty(group.size * part, dtype=torch.uint8, device=device).zero_() for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(out, x, group=group.process_group)

    return 8e-9 * part * (group.size - 1) / _shortest(exchange, device)


def _measured_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the 10^12 operations per second of a product of square matrices."""
    a, b = (torch.ones(_EDGE, _EDGE, dtype=dtype, device=device) for _ in range(2))
    return 2e-12 * _EDGE**3 / _shortest(lambda: a @ b, device)


def _shortest(run: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of the fastest of several runs, after one warm-up run."""
    found = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])
