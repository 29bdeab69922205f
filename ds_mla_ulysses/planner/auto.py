"""strategy="auto": decided once, the same on all ranks, from widths, ranks, length, link and rate."""

from __future__ import annotations

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
        tokens: of all sequences of a micro-batch together; by default 4,096 for each rank, all one sequence.
        sequence: tokens of one sequence; by default all are one.
        link_gbps: Gbit/s that a rank sends to others; measured by default.
        tflops: 10^12 operations a second in products; measured by default.
    """

    tokens: int | None = None
    sequence: int | None = None
    link_gbps: float | None = None
    tflops: float | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequence", "link_gbps", "tflops"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"Auto({name}={value!r}) must be a positive number, or left out.")


def decide(
    auto: Auto, work: Work, refused: Mapping[str, str], group: SequenceGroup, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """The strategy and why, the same on every rank of the job; every rank has to call it.

    Args:
        work: of one layer; its tokens are taken from `auto`.
        refused: strategies that the model excludes, and why.
        dtype, device: of the model, for what is measured.

    Raises:
        ValueError: no strategy is possible.
    """
    if group.size == 1:
        strategy = "packed" if group.split == "contiguous" else "gather_kv"
        return strategy, f"{strategy}: a group of one sends nothing"
    link = auto.link_gbps if auto.link_gbps is not None else _measured_link(group, device)
    rate = auto.tflops if auto.tflops is not None else _measured_rate(dtype, device)
    # Groups may measure otherwise than each other: what the first rank of the job found holds for all.
    said = [(link, rate)]
    dist.broadcast_object_list(said, src=0)
    machine = Machine(*said[0])
    work = replace(work, tokens=int(auto.tokens or 4096 * group.size), sequence=auto.sequence)
    found = [Estimate(s, refused[s]) if s in refused else estimate(work, s, machine) for s in STRATEGIES]
    best, why = choose(found)
    how = ["measured" if x is None else "given" for x in (auto.link_gbps, auto.tflops)]
    length = "assumed: say Auto(tokens=...)" if auto.tokens is None else "given"
    why += "" if "gather_kv" in refused else head_tail(work, machine, best)
    return best.strategy, (
        f"{why}; {work.tokens:,} tokens ({length}) on {group.size} ranks, {machine.link_gbps:.3g} Gbit/s ({how[0]}), "
        f"{machine.tflops:.3g} TFLOP/s ({how[1]})"
    )


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
