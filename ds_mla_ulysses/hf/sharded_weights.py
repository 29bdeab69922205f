"""Weights that ZeRO-3 shards, used outside of their module's hooks: gathered for a while, or until their gradient is summed.

ZeRO-3 gives each parameter methods of its own (`all_gather`, `partition`) and a state, `ds_status`. Nothing is imported
from DeepSpeed. Gathering is a collective of all ranks of the engine.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


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


@contextmanager
def gathered_until_accumulated(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Inside the block, the parameters are whole. Some stay whole until autograd has added to their gradients. A collective.

    To be used in the backward that adds to them; it gathers them once for both.

    Yields:
        the parameters that are to stay whole, a list that the block fills.
    """
    away = _away(parameters)
    _gather(away)
    stay: list[Tensor] = []
    try:
        yield stay
    finally:
        kept = {id(p) for p in stay}
        _shard_again([p for p in away if id(p) not in kept])
        for p in away:
            if id(p) in kept:
                _GatheredForGradient(p, was_away=True)


def gather_until_accumulated(parameters: Sequence[Tensor]) -> None:
    """Makes each parameter whole right before autograd adds to its gradient, and shards it again right afterwards.

    To be called during the backward that adds to them. A gradient can only be added to a whole parameter. A tied embedding
    gets its gradient at the end of the backward only, so nothing is gathered before.
    """
    for p in parameters:
        if hasattr(p, "ds_status") and p.requires_grad:
            _GatheredForGradient(p)


class _GatheredForGradient:
    """Two hooks of a parameter, which remove themselves.

    Args:
        was_away: whether the parameter has been gathered already, to be sharded again afterwards.
    """

    def __init__(self, parameter: Any, was_away: bool = False) -> None:
        self._parameter, self._was_away = parameter, was_away
        self._handles = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def _before(self, grad: Tensor) -> None:
        away = _away([self._parameter])
        self._was_away = self._was_away or bool(away)
        _gather(away)

    def _after(self, parameter: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if self._was_away:  # after DeepSpeed's hook, which is older and has reduced the gradient
            _shard_again([parameter])


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Inside the block, modules inside of the module run without their hooks, which are ZeRO-3's: the weights are whole."""
    inside = list(module.modules())[1:]
    hooks = [(m, m._forward_hooks, m._forward_pre_hooks) for m in inside]
    for m in inside:
        m._forward_hooks, m._forward_pre_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for m, after, before in hooks:
            m._forward_hooks, m._forward_pre_hooks = after, before


def has_hooks_of_the_user(modules: Sequence[nn.Module]) -> bool:
    """Whether modules have hooks other than DeepSpeed's."""
    if any(m._backward_hooks or m._backward_pre_hooks for m in modules):
        return True
    hooks = [hook for m in modules for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return not all(package_of(hook) == "deepspeed" for hook in hooks)


def package_of(function: Any) -> str:
    """The name of the package in which a function or the class of a callable is defined."""
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]
