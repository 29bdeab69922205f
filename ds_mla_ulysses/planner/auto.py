"""strategy="auto": decided once, the same on all ranks, from widths, ranks, length, link and rate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from ..comm.group import SequenceGroup
from .cost import STRATEGIES, Estimate, Machine, Work, choose, estimate, head_tail

#: Bytes that a rank sends in the measurement, and the edge of its square products.
_BYTES, _EDGE = 2**23, 1024
_REPEATS = 3


@dataclass(frozen=True)
class Auto:
    """What `strategy="auto"` is decided by; give it in the place of the name.

    Attributes:
        tokens: of all sequences of a micro-batch together; by default 4,096 for each rank, or one sequence if that is more.
        sequence: tokens of one sequence; by default all are one.
        link_gbps: Gbit/s that a rank sends to others; measured by default.
        tflops: 10^12 operations a second in products; measured by default.
        dtype: that the model trains in; by default that of its parameters, which an engine or autocast may change later.
    """

    tokens: int | None = None
    sequence: int | None = None
    link_gbps: float | None = None
    tflops: float | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for names, kinds, of in (
            (("tokens", "sequence"), (int,), "whole number"),
            (("link_gbps", "tflops"), (int, float), "number"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (type(value) in kinds and 0 < value < math.inf):
                    raise ValueError(f"Auto({name}={value!r}) must be a positive {of}, or left out.")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"Auto(dtype={self.dtype!r}) must be a torch.dtype such as torch.bfloat16, or left out.")


def decide(
    auto: Auto, work: Work, refused: Mapping[str, str], group: SequenceGroup, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """The strategy and why, the same on every rank of the job; every rank has to call it.

    Args:
        work: of one layer; its tokens and the bytes of an element are taken from `auto`.
        refused: strategies that the model excludes, and why.
        dtype, device: of the model's parameters.

    Raises:
        ValueError: no strategy is possible.
    """
    if group.size == 1:
        strategy = "packed" if group.split == "contiguous" else "gather_kv"
        return strategy, f"{strategy}: a group of one sends nothing"
    dtype = auto.dtype or dtype
    if auto.link_gbps is None or auto.tflops is None:
        device = _device_of_job(group, device)
    link = auto.link_gbps if auto.link_gbps is not None else _measured_link(group, device)
    rate = auto.tflops if auto.tflops is not None else _measured_rate(dtype, device)
    # Groups may measure otherwise than each other: what the first rank of the job found holds for all.
    said = [(link, rate)]
    dist.broadcast_object_list(said, src=0)
    machine = Machine(*said[0])
    tokens = auto.tokens or max(4096 * group.size, auto.sequence or 0)
    work = replace(work, tokens=tokens, sequence=auto.sequence, element_bytes=dtype.itemsize)
    found = [Estimate(s, refused[s]) if s in refused else estimate(work, s, machine) for s in STRATEGIES]
    best, why = choose(found)
    how = [f"measured on {device.type}" if x is None else "given" for x in (auto.link_gbps, auto.tflops)]
    of = "the parameters'" if auto.dtype is None else "given"
    length = "assumed: say Auto(tokens=...)" if auto.tokens is None else "given"
    why += "" if "gather_kv" in refused else head_tail(work, machine, best)
    return best.strategy, (
        f"{why}; {work.tokens:,} tokens ({length}) on {group.size} ranks, {str(dtype).removeprefix('torch.')} ({of}), "
        f"{machine.link_gbps:.3g} Gbit/s ({how[0]}), {machine.tflops:.3g} TFLOP/s ({how[1]})"
    )


def _device_of_job(group: SequenceGroup, device: torch.device) -> torch.device:
    """Where ranks will compute and send from: a model is often still on the CPU, or on meta, when it is parallelized."""
    if device.type not in ("cpu", "meta"):
        return device
    named = dist.get_backend_config(group.process_group)
    backends = dict(part.split(":") for part in named.split(","))
    # gloo is named for accelerators too, wherever it is asked for; no job on them chooses it.
    accelerators = [kind for kind, backend in backends.items() if kind != "cpu" and backend != "gloo"]
    if accelerators:
        return torch.device(accelerators[0], torch.accelerator.current_device_index())
    if "cpu" not in backends:
        raise ValueError(
            f"strategy='auto' cannot measure on a CPU over the backend {named!r}: move the model to its device first, or "
            "give Auto(link_gbps=, tflops=)."
        )
    return torch.device("cpu")


def _measured_link(group: SequenceGroup, device: torch.device) -> float:
    """Gbit/s that a rank sends to others in an all-to-all of its group."""
    part = _BYTES // (group.size - 1)
    out, x = (torch.empty(group.size * part, dtype=torch.uint8, device=device).zero_() for _ in range(2))

    def exchange() -> None:
        dist.all_to_all_single(out, x, group=group.process_group)

    return 8e-9 * part * (group.size - 1) / _shortest(exchange, device)


def _measured_rate(dtype: torch.dtype, device: torch.device) -> float:
    """10^12 operations a second of a square product."""
    a, b = (torch.ones(_EDGE, _EDGE, dtype=dtype, device=device) for _ in range(2))
    return 2e-12 * _EDGE**3 / _shortest(lambda: a @ b, device)


def _shortest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs, behind one that is not counted."""
    found = []
    for _ in range(_REPEATS + 1):
        begin = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])
