"""The arguments of a module's call, positional or by keyword, and a base class for objects that must not be copied."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


class NotCopied:
    """Refuses copying and pickling, because a copy would share the model's process group, hooks or weights.

    Raises:
        RuntimeError: the object, or a model that holds it, is copied or pickled.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a parallelized model cannot be copied or pickled: call handle.restore() first.")


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by name, those of `**kwargs` included."""
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def is_given(value: Any) -> bool:
    """Returns whether the value of an argument asks for anything: it is a tensor, or neither None nor False nor 0."""
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)
