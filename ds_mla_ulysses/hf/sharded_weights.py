"""Weights that ZeRO-3 shards, used outside of their module's hooks: gathered for a while, or until their gradient is summed.

ZeRO-3 gives each parameter methods of its own (`all_gather`, `partition`) and a state, `ds_status`. Nothing is imported
from DeepSpeed. Gathering is a collective of all ranks of the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


def is_sharded_by_zero3(parameters: Sequence[Tensor]) -> bool:
    """Whether ZeRO-3 manages any of them."""
    return any(hasattr(p, "ds_status") for p in parameters)


def _away(parameters: Sequence[Tensor]) -> list[Any]:
    """Those of which this rank has only its shard now."""
    return [p for p in parameters if hasattr(p, "ds_status") and p.ds_status.name != "AVAILABLE"]


def _gather(parameters: Sequence[Any]) -> None:
    # One by one: with gloo, DeepSpeed 0.19.6 waits only for the last of several, and the others may not have arrived.
    for p in parameters:
        p.all_gather([p])


def _shard_again(parameters: Sequence[Any]) -> None:
    # A module whose forward or backward runs at the moment releases its weights itself.
    free = [p for p in parameters if not p.ds_active_sub_modules]
    if free:
        free[0].partition(free)


@contextmanager
def gathered(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, the parameters are whole; afterwards they are sharded as before. A collective."""
    away = _away(parameters)
    _gather(away)
    try:
        yield
    finally:
        _shard_again(away)


@contextmanager
def whole_shapes(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside the block, the parameters have their whole shapes, but no values. It communicates nothing.

    Autograd remembers the shape that a parameter has when it becomes part of a graph, and compares gradients with it.
    """
    shards = [(p, p.data) for p in _away(parameters)]
    for p, data in shards:
        p.data = data.new_empty(()).expand(p.ds_shape)
    try:
        yield
    finally:
        for p, data in shards:
            p.data = data


def gather_until_accumulated(parameters: Sequence[Tensor]) -> None:
    """Makes each parameter whole right before autograd adds to its gradient, and shards it again right afterwards.

    To be called during the backward that adds to them. A gradient can only be added to a whole parameter. A tied embedding
    gets its gradient at the end of the backward only, so nothing is gathered before.
    """
    for p in parameters:
        if hasattr(p, "ds_status") and p.requires_grad:
            _GatheredForGradient(p)


class _GatheredForGradient:
    """Two hooks of a parameter, which remove themselves."""

    def __init__(self, parameter: Any) -> None:
        self._parameter, self._was_away = parameter, False
        self._handles = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def _before(self, grad: Tensor) -> None:
        away = _away([self._parameter])
        self._was_away = bool(away)
        _gather(away)

    def _after(self, parameter: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if self._was_away:  # after DeepSpeed's hook, which is older and has reduced the gradient
            _shard_again([parameter])
