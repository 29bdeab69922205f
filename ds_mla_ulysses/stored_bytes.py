"""The peak memory of a computation, counted from the sizes of the tensors that it makes.

It needs no accelerator, and with torch's fake tensors nothing is computed and nothing is allocated.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAIT = "_c10d_functional.wait_tensor.default"
#: What made a storage: the operator, the shape of its result, and the dtype.
Origin = tuple[str, tuple[int, ...], str]


class StoredBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make while the mode is on and that are still alive.

    An allocator's rounding and fragmentation, the buffers of kernels and of collective libraries, and memory that is not a
    torch tensor are not counted.

    Args:
        given: tensors whose storages are not counted. They are kept, so that their addresses are not used again. Storages
            that an operator is given, and that no operator has made, are not counted either.
        opens: namespaces of operators written in Python, which run as their Python code under the mode, so that the
            buffers inside count too. With fake tensors, an operator is otherwise only its results.
        explains: whether to remember what made the storages that are alive at the peak, for `at_peak`.

    Attributes:
        now, peak: bytes that are alive, and the most that were alive at a time.
    """

    def __init__(self, given: Iterable[Tensor] = (), opens: tuple[str, ...] = (), explains: bool = False) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._given = list(given)
        self._alive: dict[int, tuple[int, Origin]] = {
            x.untyped_storage()._cdata: (0, ("given", tuple(x.shape), str(x.dtype))) for x in self._given
        }
        self._at_peak: dict[int, tuple[int, Origin]] = {}
        self._opens, self._explains = opens, explains

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(function) == _WAIT and isinstance(args[0], FakeTensor):
            return args[0]  # as it does; its fake would be another tensor
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type != "meta":
                self._ignore(x)
        body = self._body_of(function)
        if body is None:
            out = function(*args, **(kwargs or {}))
        else:
            with self:
                out = body(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.layout == torch.strided and x.device.type != "meta":
                self._count(x, str(function))
        return out

    def _body_of(self, function: Any) -> Callable[..., Any] | None:
        """The Python code of an operator that is to be opened."""
        if getattr(function, "namespace", None) not in self._opens:
            return None
        from torch._library.custom_ops import OPDEFS

        definition = OPDEFS.get(function.name())
        return None if definition is None else definition._init_fn

    def _ignore(self, x: Tensor) -> None:
        """Leaves out a storage that existed before, of which an operator may return a view."""
        storage = x.untyped_storage()
        if storage._cdata not in self._alive:
            self._alive[storage._cdata] = 0, ("given", tuple(x.shape), str(x.dtype))
            weakref.finalize(storage, self._drop, storage._cdata)

    def _count(self, x: Tensor, operator: str) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return
        self._alive[key] = size, (operator, tuple(x.shape), str(x.dtype).removeprefix("torch."))
        self.now += size
        if self.now > self.peak:
            self.peak = self.now
            if self._explains:
                self._at_peak = dict(self._alive)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        size, _ = self._alive.pop(key)
        self.now -= size

    def at_peak(self) -> list[tuple[int, Origin]]:
        """The bytes that were alive at the peak by what made them, the most first. It needs `explains`."""
        found: Counter[Origin] = Counter()
        for size, origin in self._at_peak.values():
            found[origin] += size
        return [(size, origin) for origin, size in found.most_common() if size]


class PeakBytes:
    """Measures the most bytes that a block holds, beside those from before it: `with peak: ...`, then `peak.bytes`.

    On a GPU it is what torch has allocated. Without a GPU it counts the tensors that the block makes, which takes time.

    Attributes:
        bytes: of the last block; 0 before the first one has ended.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> PeakBytes:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            self._counted = StoredBytes()
            self._counted.__enter__()
        return self

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with each call as a block."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return measured

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated() - self._before
        else:
            self._counted.__exit__(*error)
            self.bytes = self._counted.peak
