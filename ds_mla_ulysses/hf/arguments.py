"""Arguments of a module's call, whichever way they were given; and what a patched module alone may have."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor


class NotCopied:
    """What belongs to a patched model alone: a copy would share its process group, its hooks or its weights."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a parallelized model cannot be copied or pickled: call handle.restore() first.")


def by_name(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by keyword."""
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def is_given(value: Any) -> bool:
    """Whether an argument was given, and not switched off."""
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)
