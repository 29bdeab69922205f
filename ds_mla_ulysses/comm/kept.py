"""What gradient checkpointing keeps of attention, so that recomputing a layer repeats neither attention nor an exchange.

`keep_attention` and `keep_output` are values for `context_fn` of `torch.utils.checkpoint.checkpoint`. They do not look at
single operators, whose names differ between attention backends. Instead, attention and the exchanges say themselves what
they are:

| function      | wraps                                 | in the first forward       | in the recomputation              |
|---------------|---------------------------------------|----------------------------|-----------------------------------|
| `kept`        | a call without gradients: an exchange | keeps its result           | returns the result, calls nothing |
| `attend_once` | the local attention                   | keeps its output and graph | returns the output, calls nothing |

The graph of the local attention holds what its backward needs. Tensors that share memory with its arguments (queries, keys
and values) are left out of it and are recomputed with the layer, so that what stays is the output, the log-sum-exp, and
whatever else the backend saves.

Without such a checkpoint both functions only make the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import UlyssesRuntimeError

T = TypeVar("T")

#: What is kept: the result of an exchange in front of attention, of attention, and of the exchange of its output.
ARRIVING, ATTENTION, RETURNED = "an exchange in front of attention", "attention", "the exchange of its output"

Contexts = tuple[AbstractContextManager[None], AbstractContextManager[None]]


def keep_attention() -> Contexts:
    """Keeps the output of attention and of all its exchanges, as a `context_fn` of torch's checkpoint.

    The layer's recomputation then repeats neither attention nor an exchange: a step runs attention once in each layer and
    sends the bytes of a step without recomputation. Gradients are bitwise those of full recomputation. Use it through
    `parallelize(recompute="keep_attention")`, or directly:

        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": dmu.keep_attention}
        )

    Raises:
        RuntimeError: in forward, no attention of a parallelized model ran in the checkpoint, so nothing would be kept; in
            backward, the recomputation differs from the forward, or backward runs twice.
    """
    return _contexts(_Record(arriving=True))


def keep_output() -> Contexts:
    """As `keep_attention`, but what arrives for attention (queries, keys, values, latents) is exchanged once more.

    A step runs attention once in each layer and returns its output once. This takes less memory than `keep_attention`.
    """
    return _contexts(_Record(arriving=False))


class _Record:
    """What one forward of a checkpointed function keeps for its recomputation, in the order of the calls.

    Attributes:
        arriving: whether the exchanges in front of attention are kept too.
        recomputes: whether the recomputation runs now.
    """

    def __init__(self, arriving: bool) -> None:
        self.arriving, self.recomputes = arriving, False
        self._values: list[tuple[str, Any]] = []
        self._next = 0

    @property
    def is_empty(self) -> bool:
        return not self._values

    def begin_recomputation(self) -> None:
        self.recomputes, self._next = True, 0

    def put(self, kind: str, value: Any) -> None:
        """Keeps a tensor or a nested structure of them. `kind` says what it is the result of."""
        # What arrives may be pending, and waiting counts as a change.
        keep = Tensor.detach if kind == ARRIVING else _Unchanged
        self._values.append((kind, tree_map_only(Tensor, keep, value)))

    def take(self, kind: str) -> Any:
        """Returns the next value, and keeps it no longer."""
        found, value = self._values[self._next] if self._next < len(self._values) else (None, None)
        if found != kind:
            raise UlyssesRuntimeError(
                f"recomputing a layer came to {kind} where its forward came to {found}, so what was kept does not belong to "
                "it: do not change the model between forward and backward, and if its layers are compiled, use recompute= of "
                "parallelize or install instead of a context_fn."
            )
        if value is _TAKEN:
            raise UlyssesRuntimeError(_TWICE)
        self._values[self._next] = kind, _TAKEN
        self._next += 1
        return tree_map_only(_Unchanged, _Unchanged.get, value)


_TAKEN = object()
_TWICE = (
    "backward ran a second time through attention that was kept for one recomputation: run it once, or use gradient "
    "checkpointing without keeping attention."
)


class _Unchanged:
    """A tensor outside of any graph, of which it is noticed if it was written to."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.detach()
        self._version = self._x._version

    def get(self) -> Tensor:
        if self._x._version != self._version:
            raise UlyssesRuntimeError(
                "a result of attention that was kept for recomputation was changed in place: this model cannot keep "
                "attention."
            )
        return self._x


#: The checkpointed function that runs in this thread, and what it keeps. Backward may run in other threads.
_RUNNING: ContextVar[_Record | None] = ContextVar("ulysses_kept", default=None)


def _contexts(record: _Record) -> Contexts:
    return _forward(record), _Recomputation(record)


@contextmanager
def _set(record: _Record | None) -> Iterator[None]:
    token = _RUNNING.set(record)
    try:
        yield
    finally:
        _RUNNING.reset(token)


@contextmanager
def _forward(record: _Record) -> Iterator[None]:
    with _set(record):
        yield
    if record.is_empty:
        raise UlyssesRuntimeError(
            "nothing was kept for recomputation, because no attention over sharded sequences ran in the checkpoint: give "
            "the forward a layout (model(**handle.shard(batch).inputs)), and checkpoint whole layers of a parallelized "
            "model."
        )


class _Recomputation(AbstractContextManager[None]):
    """Unlike a generator, it can be entered again, which a second backward does."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def __enter__(self) -> None:
        self._record.begin_recomputation()
        self._running = _set(self._record)
        self._running.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._running.__exit__(*error)


def is_keeping() -> bool:
    """Whether a checkpoint that keeps attention runs now."""
    return not torch.compiler.is_compiling() and _RUNNING.get() is not None


def kept(call: Callable[[], T], kind: str) -> T:
    """Returns the result of the call; in a recomputation the result that was kept, without calling.

    Args:
        call: makes tensors, or a list of them, outside of any graph.
        kind: ARRIVING, RETURNED or ATTENTION.
    """
    running = None if torch.compiler.is_compiling() else _RUNNING.get()
    if running is None or (kind == ARRIVING and not running.arriving):
        return call()
    if running.recomputes:
        return running.take(kind)
    result = call()
    running.put(kind, result)
    return result


def attend_once(attend: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Returns `attend(*args, **kwargs)`; in a recomputation the output that was kept, without calling.

    Args:
        attend: the local attention. Tensors that require gradients reach it as arguments only.

    Backward: that of `attend`, once.
    """
    running = None if torch.compiler.is_compiling() else _RUNNING.get()
    if running is None:
        return attend(*args, **kwargs)
    leaves, structure = tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]

    def attend_to(*given: Tensor) -> Tensor:
        for i, x in zip(places, given, strict=True):
            leaves[i] = x
        of_args, of_kwargs = tree_unflatten(leaves, structure)
        leaves.clear()  # or they would live as long as this function
        # What attention calls itself is a part of it, and not kept once more.
        with _set(None):
            return attend(*of_args, **of_kwargs)

    if not places:  # nothing to differentiate
        return kept(lambda: attend_to().detach(), ATTENTION)
    given = [leaves[i] for i in places]
    return _AttendOnce.apply(attend_to, running, *given)


class _AttendOnce(torch.autograd.Function):
    """The local attention as one node, which saves its arguments where a checkpoint finds them and keeps the rest."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], record: _Record, *given: Tensor) -> Tensor:
        ctx.save_for_backward(*given)
        if record.recomputes:
            out, states = record.take(ATTENTION)
            _set_random_states(states, given)
            return out
        before = _random_states(given)
        ctx.graph = _Graph(given)
        out = ctx.graph.run(attend)
        after = _random_states(given)
        with _disable_current_modes():  # the states are real also where tensors are fake
            drew = any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
        record.put(ATTENTION, (out, after if drew else []))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        given = ctx.saved_tensors  # recomputes the layer
        graph, ctx.graph = ctx.graph, None
        if graph is None:
            raise UlyssesRuntimeError(_TWICE)
        return None, None, *graph.gradients(grad, given)


class _Graph:
    """The graph of one call, from tensors outside of any graph to its output.

    It holds what the call saves, except tensors that share memory with its arguments: of these it only knows the place.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._arguments = _Arguments(given)

    def run(self, attend: Callable[..., Tensor]) -> Tensor:
        """Calls `attend` with the arguments and returns its output, outside of any graph."""
        arguments = self._arguments
        with torch.enable_grad(), saved_tensors_hooks(arguments.pack, arguments.unpack):
            # The graph would hold its leaves, which the arguments may not be.
            origin = torch.empty(0, requires_grad=True)
            inputs = [_Begin.apply(origin, x) for x in arguments.tensors]
            out = attend(*inputs)
            self._inputs: list[GradientEdge] = [get_gradient_edge(x) for x in inputs]
            self._out = get_gradient_edge(out)
        arguments.tensors = []
        return out.detach()

    def gradients(self, grad: Tensor, given: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the arguments, which are given as they were in `run`; the graph is freed."""
        self._arguments.restore(given)
        return torch.autograd.grad([self._out], self._inputs, [grad], allow_unused=True)


class _Arguments:
    """The arguments of a call, while it runs and while its backward runs.

    The graph's saved tensors refer to it, so it does not refer to the graph: such a cycle would never be freed.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.tensors = [x.detach() for x in given]
        self._strides = [x.stride() for x in given]

    def restore(self, given: Sequence[Tensor]) -> None:
        if [x.stride() for x in given] != self._strides:
            raise UlyssesRuntimeError("recomputing a layer gave attention tensors with other strides than its forward.")
        self.tensors = [x.detach() for x in given]

    def pack(self, x: Tensor) -> Tensor | _Place:
        for i, argument in enumerate(self.tensors):
            if x.dtype == argument.dtype and x.untyped_storage()._cdata == argument.untyped_storage()._cdata:
                return _Place(i, x.shape, x.stride(), int(x.storage_offset() - argument.storage_offset()))
        return x.detach()

    def unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        x = self.tensors[packed.argument]
        return x.as_strided(packed.shape, packed.strides, x.storage_offset() + packed.offset)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the memory of an argument; `offset` counts from the argument's first element."""

    argument: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Begin(torch.autograd.Function):
    """Returns x as the result of a node that holds no tensor."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None


def _random_states(given: Sequence[Tensor]) -> list[Tensor]:
    """The states of the generators of the CPU and of the device that the tensors are on."""
    states, device = [torch.get_rng_state()], given[0].device
    if device.type not in ("cpu", "meta") and torch.get_device_module(device).is_available():
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def _set_random_states(states: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Sets the generators as attention left them; none if it drew nothing."""
    if states:
        torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(given[0].device).set_rng_state(states[1], given[0].device)
