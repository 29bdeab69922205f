"""Small collectives by which ranks agree: numbers, Python objects, sums. `TrafficMeter` counts all of them.

| function       | carries                               | cost                                                              |
|----------------|---------------------------------------|-------------------------------------------------------------------|
| gather_numbers | as many integers from every rank      | one all-gather; no wait for an accelerator if the group has a CPU backend |
| gather_objects | picklable values of different sizes   | two all-gathers; the values are pickled                           |
| all_reduce     | one tensor, reduced in place          | one all-reduce                                                    |
| raise_everywhere | the problem of any rank             | that of gather_objects                                            |
| sum_gradients  | the gradients of parameters           | an all-reduce for each, and one that says which there are          |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import UlyssesValueError
from . import traffic
from .collectives import gather_now
from .group import SequenceGroup


def gather_numbers(numbers: Sequence[int], group: SequenceGroup) -> list[list[int]]:
    """The integers of every rank, in rank order; each rank gives the same number of them."""
    if group.size == 1:
        return [list(numbers)]
    mine = torch.tensor(numbers, dtype=torch.int64, device=_device_for_numbers(group))
    gathered: list[list[int]] = gather_now(mine, group, "setup").view(group.size, -1).tolist()
    return gathered


def _device_for_numbers(group: SequenceGroup) -> torch.device:
    """The CPU if the group has a backend for it, so that the host does not wait for an accelerator."""
    backends = dist.get_backend_config(group.process_group)  # such as "cpu:gloo,cuda:nccl"
    kinds = [part.split(":")[0] for part in backends.split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def gather_objects(group: SequenceGroup, value: Any) -> list[Any]:
    """The values of every rank, in rank order. For small picklable values."""
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    traffic.record("all_gather_object", "setup", 0)  # torch pickles the values: their size is not known here
    return values


def all_reduce(
    x: Tensor, group: SequenceGroup, direction: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Reduces x over the ranks in place and returns it. Counted as a ring: each rank sends 2 (ranks-1)/ranks of x."""
    if group.size > 1:
        _record_all_reduce(x, group, direction)
        dist.all_reduce(x, op, group=group.process_group)
    return x


def sum_gradients(parameters: Iterable[nn.Parameter], group: SequenceGroup) -> None:
    """Replaces every gradient by its sum over the ranks. A gradient that some ranks do not have counts as zero there."""
    trained = [p for p in parameters if p.requires_grad]
    if group.size == 1 or not trained:
        return
    present = torch.tensor([p.grad is not None for p in trained], device=trained[0].device).int()
    all_reduce(present, group, "gradients", dist.ReduceOp.MAX)
    works = []
    for parameter, anywhere in zip(trained, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _record_all_reduce(parameter.grad, group, "gradients")
            works.append(dist.all_reduce(parameter.grad, group=group.process_group, async_op=True))
    for work in works:
        work.wait()


def _record_all_reduce(x: Tensor, group: SequenceGroup, direction: str) -> None:
    traffic.record("all_reduce", direction, 2 * x.nbytes * (group.size - 1) // group.size)


#: What a problem says of itself to other ranks: the class of its exception and the text.
Report = tuple[type[Exception], str]


def report_of(problem: Exception | None) -> Report | None:
    """What other ranks are told of a problem. Foreign classes of exceptions become the builtin ones that they derive from."""
    if problem is None:
        return None
    builtin = (ValueError, TypeError, RuntimeError)
    for kind in type(problem).__mro__:
        if kind in builtin or kind.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return kind, str(problem)
    return RuntimeError, f"{type(problem).__name__}: {problem}"


def raise_everywhere(problem: Exception | None, group: SequenceGroup) -> None:
    """Raises the problem of this rank, or the first one of another rank. A collective: every rank calls it."""
    reports = gather_objects(group, report_of(problem))
    if problem is not None:
        raise problem
    raise_first(reports)


def raise_first(problems: Sequence[Report | str | None]) -> None:
    """Raises the problem of the first rank that has one; a text is a ValueError."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, text = (UlyssesValueError, problem) if isinstance(problem, str) else problem
            raise kind(text if len(problems) == 1 else f"rank {rank} of the group: {text}")
