"""Logits that a model's forward returns before they are made, so that the loss can make them a tile at a time.

In a sequence-parallel forward that records gradients, the call of the model's head (its output embeddings) returns
`LazyLogits`. They look like the logits [B, T, V], but hold the hidden states, the head, and the elementwise operations by
numbers that the model applies afterwards (scales, soft caps, conversions):

| what happens to them                         | what it does                                                          |
|----------------------------------------------|-----------------------------------------------------------------------|
| `sum_of_cross_entropies`, in `handle.loss`   | makes head, operations and loss tile by tile, with the gradients       |
| an operation by numbers, `float`, `to(dtype)` | is recorded                                                           |
| `detach`, `clone`, hooks of DeepSpeed         | returns LazyLogits with another place in the graph                    |
| shape, dtype, device, `requires_grad`        | answers for the logits                                                |
| everything else                              | makes the whole logits, once; at ZeRO-3 a collective of all ranks      |

The graph. LazyLogits are a scalar without values for autograd. The node behind it (`_Head`) holds the hidden states' and the head's
edges. A loss, or real logits, is a use of them. In backward, each use leaves its gradients at the head and sends 1 to
the scalar, so hooks on outputs (which begin DeepSpeed's backward, and may multiply) run before any gradient is
summed. `_Head` receives the number of uses times the factor of these hooks, and gives out the gradients.

Letters: B batch · T local tokens · n tokens of a tile · D hidden width · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesRuntimeError
from ..layout.tiled_loss import (
    entropies_and_hits,
    scaled,
    sum_of_cross_entropies,
    tiled_sum_of_cross_entropies,
    tokens_of_tile,
)
from .arguments import NotCopied
from .sharded_weights import (
    gather_until_accumulated,
    gathered,
    has_hooks_of_the_user,
    is_sharded_by_zero3,
    package_of,
    whole_shapes,
    without_hooks,
    without_tensor_hooks,
)

#: Elementwise operations, recorded if everything but the logits is a number, a bool, None or a dtype.
_ELEMENTWISE = {
    getattr(owner, name)
    for owner, names in (
        (torch, "mul multiply div divide true_divide tanh neg add sub clamp"),
        (
            Tensor,
            "mul multiply div divide true_divide tanh neg add sub clamp float double half bfloat16 to clone contiguous "
            "__mul__ __rmul__ __truediv__ __div__ __neg__ __add__ __radd__ __sub__",
        ),
    )
    for name in names.split()
}
#: The same, which change the logits themselves.
_IN_PLACE = {
    getattr(Tensor, name)
    for name in [
        "mul_",
        "div_",
        "tanh_",
        "neg_",
        "add_",
        "sub_",
        "clamp_",
        "__imul__",
        "__itruediv__",
        "__idiv__",
        "__iadd__",
        "__isub__",
    ]
}
#: What autograd and the device say of the scalar holds for the logits.
_OF_SCALAR = {
    *(
        vars(torch._C.TensorBase)[name].__get__
        for name in [
            "requires_grad",
            "grad_fn",
            "is_leaf",
            "device",
            "layout",
            "is_cuda",
            "is_cpu",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "is_mkldnn",
            "is_xla",
            "is_nested",
            "_backward_hooks",
            "output_nr",
        ]
    ),
    *(getattr(Tensor, name) for name in ["get_device", "__hash__", "is_inference"]),
}
#: Functions that need a graph of their arguments, with gradients enabled or not.
_OF_GRAPHS = {torch.autograd.backward, torch.autograd.grad, Tensor.backward}
#: Packages whose hooks on outputs only look for the start of backward, or multiply.
_HOOKS_OF = ("deepspeed", "torch", "accelerate")


@dataclass
class _Backward:
    """What backward needs of one call of the head, and the gradients that the uses of the logits have left.

    It is all that the graph holds of the call: the hidden states would otherwise exist until the graph is gone.

    Attributes:
        like: no elements, with the dtype and the device of the hidden states.
        takes_gradient: whether the hidden states need a gradient.
        trained: the head's parameters that need a gradient.
    """

    like: Tensor
    takes_gradient: bool
    trained: Sequence[Tensor]
    left: list[tuple[Tensor, Callable[[Tensor], list[Tensor | None]]]] = field(default_factory=list)

    def one(self) -> Tensor:
        """The gradient that a use sends, in the dtype in which gradients are scaled."""
        return torch.ones((), dtype=accumulation_dtype(self.like.dtype), device=self.like.device)


@dataclass
class _Call:
    """One call of the head: what its logits need.

    Attributes:
        hidden: the argument, [B, T, D], without its graph.
        parameters: all of the head's.
        autocast: arguments of torch.autocast.
    """

    head: DeferredHead
    hidden: Tensor
    parameters: Sequence[Tensor]
    autocast: dict[str, Any]
    backward: _Backward

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's logits of any hidden states. The weights have to be whole."""
        with torch.autocast(**self.autocast), without_hooks(self.head.module):
            result: Tensor = self.head.module.forward(hidden)
            return result


class _Head(torch.autograd.Function):
    """The head's place in the graph. Forward: LazyLogits. Backward: the gradients that the uses have left."""

    @staticmethod
    def forward(ctx: Any, call: _Call, operations: _Operations, hidden: Tensor, *trained: Tensor) -> LazyLogits:
        ctx.of_call = call.backward
        return LazyLogits._of(call, operations)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Backward = ctx.of_call
        left, call.left = call.left, []
        factor = grad / len(left)
        total: list[Tensor | None] = [None] * (1 + len(call.trained))
        for upstream, gradients_of in left:
            for i, gradient in enumerate(gradients_of(upstream * factor)):
                if gradient is not None:
                    before = total[i]
                    total[i] = gradient if before is None else before + gradient
        gather_until_accumulated(call.trained)
        return (None, None, *total)


class _Recorded(torch.autograd.Function):
    """Forward: the same logits after other operations. Backward: sends on how they are used."""

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, operations: _Operations) -> LazyLogits:
        return LazyLogits._of(lazy._call, operations)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Loss(torch.autograd.Function):
    """Forward: a loss that was computed in tiles. Backward: leaves its gradients at the head.

    They are kept unscaled, so that backward may run more than once (retain_graph).
    """

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, value: Tensor, *gradients: Tensor | None) -> Tensor:
        ctx.of_call = lazy._call.backward
        ctx.save_for_backward(*gradients)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Backward = ctx.of_call
        gradients = ctx.saved_tensors
        dtypes = [x.dtype for x in (call.like, *call.trained)]

        def times(factor: Tensor) -> list[Tensor | None]:
            return [None if x is None else scaled(x, factor, dtype) for x, dtype in zip(gradients, dtypes, strict=True)]

        call.left.append((grad, times))
        return (call.one(), None, *([None] * len(gradients)))


class _Real(torch.autograd.Function):
    """Forward: whole logits. Backward: leaves their gradients at the head.

    Args:
        logits: with a graph of its own, which begins at `leaf`, the hidden states.
    """

    @staticmethod
    def forward(ctx: Any, lazy: LazyLogits, graph: tuple[Tensor, Tensor]) -> Tensor:
        ctx.of_call, ctx.graph = lazy._call.backward, graph
        return graph[1].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        call: _Backward = ctx.of_call
        leaf, logits = ctx.graph

        def through_head(factor: Tensor) -> list[Tensor | None]:
            inputs = [leaf, *call.trained] if call.takes_gradient else list(call.trained)
            with without_tensor_hooks(call.trained):
                grads = torch.autograd.grad(
                    logits, inputs, scaled(grad, factor, grad.dtype), retain_graph=True, allow_unused=True
                )
            return list(grads) if call.takes_gradient else [None, *grads]

        call.left.append((call.one(), through_head))
        return call.one(), None


@dataclass(frozen=True)
class _Operations:
    """What was applied to the logits, in order, and the outcome for no tokens, which tells dtype and vocabulary."""

    outcome: Tensor
    steps: tuple[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]], ...] = ()

    def then(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operations:
        with torch.no_grad():
            outcome = function(self.outcome.clone(), *args, **kwargs)
        return _Operations(outcome, (*self.steps, (function, args, kwargs)))

    def __call__(self, logits: Tensor) -> Tensor:
        for function, args, kwargs in self.steps:
            logits = function(logits, *args, **kwargs)
        return logits


class LazyLogits(Tensor):
    """Logits that are not made yet; see the top of this file. Made by `DeferredHead` only."""

    _call: _Call
    _operations: _Operations
    _real: dict[bool, Tensor]

    @classmethod
    def _of(cls, call: _Call, operations: _Operations) -> LazyLogits:
        """Logits that are not part of a graph; the autograd functions above put those that they return into theirs."""
        lazy: LazyLogits = Tensor._make_wrapper_subclass(
            cls, (), dtype=accumulation_dtype(call.hidden.dtype), device=call.hidden.device
        )
        lazy._call, lazy._operations, lazy._real = call, operations, {}
        return lazy

    def _shape(self) -> torch.Size:
        return torch.Size((*self._call.hidden.shape[:-1], self._operations.outcome.shape[-1]))

    def materialise(self) -> Tensor:
        """Returns the whole logits. They are made once, and once more with a graph if gradients are recorded.

        With a head that ZeRO-3 shards it is a collective of all ranks.

        Raises:
            RuntimeError: on all ranks, if some of them compute the loss or run backward instead, with `checks` other than
                "never".
        """
        call = self._call
        records = torch.is_grad_enabled() and self.requires_grad
        if records not in self._real:
            call.head.agree("logits")
            leaf = call.hidden.detach().requires_grad_(records and call.backward.takes_gradient)
            with gathered(call.parameters), torch.set_grad_enabled(records):
                logits = self._operations(call.logits(leaf))
            self._real[records] = _Real.apply(self, (leaf, logits)) if records else logits
        return self._real[records]

    def _detached(self) -> LazyLogits:
        return LazyLogits._of(self._call, self._operations)

    def _sum_of_cross_entropies(self, labels_N: Tensor, label_smoothing: float, weights_N: Tensor | None) -> Tensor:
        """`sum_of_cross_entropies` in tiles. With a head that ZeRO-3 shards it is a collective of all ranks."""
        call = self._call
        records = torch.is_grad_enabled() and self.requires_grad
        with gathered(call.parameters), without_tensor_hooks(call.backward.trained):
            sums = tiled_sum_of_cross_entropies(
                lambda hidden: self._operations(call.logits(hidden)),
                call.hidden,
                labels_N,
                tokens_of_tile(call.head.loss_tile, self.shape[-1]),
                call.backward.trained if records else (),
                hidden_gradient=records and call.backward.takes_gradient,
                label_smoothing=label_smoothing,
                weights_N=weights_N,
            )
        if not records:
            return sums.value
        loss: Tensor = _Loss.apply(self, sums.value, sums.hidden, *sums.parameters)
        return loss

    def _entropies_and_hits(self, labels_N: Tensor) -> tuple[Tensor, Tensor]:
        """`entropies_and_hits` in tiles. With a head that ZeRO-3 shards it is a collective of all ranks."""
        call, tile = self._call, tokens_of_tile(self._call.head.loss_tile, self.shape[-1])
        tiles = zip(call.hidden.flatten(0, -2).split(tile), labels_N.split(tile), strict=True)
        with gathered(call.parameters), torch.no_grad():
            parts = [entropies_and_hits(self._operations(call.logits(x.unsqueeze(0))), y) for x, y in tiles]
        entropies, hits = zip(*parts, strict=True)
        return torch.cat(entropies), torch.cat(hits)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            if func is sum_of_cross_entropies:
                return first._sum_of_cross_entropies(*args[1:], **kwargs)
            if func is entropies_and_hits:
                return first._entropies_and_hits(*args[1:], **kwargs)
            if func in _OF_SCALAR:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func in _ANSWERS:
                return _ANSWERS[func](first, *args[1:], **kwargs)
            if (func in _ELEMENTWISE or func in _IN_PLACE) and first._is_by_numbers(args[1:], kwargs):
                operations = first._operations.then(func, args[1:], kwargs)
                if func not in _IN_PLACE:
                    return _Recorded.apply(first, operations)
                first._operations, first._real = operations, {}
                return first
        with torch.set_grad_enabled(torch.is_grad_enabled() or func in _OF_GRAPHS):
            args, kwargs = tree_map(_real, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UlyssesRuntimeError(
            f"{func} was given logits that are not made yet, past torch's function overrides: call it with "
            "logits.materialise(), or parallelize (or install) with loss_tile=None."
        )

    def _is_by_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        kinds = (int, float, bool, torch.dtype, torch.memory_format)
        return all(
            x is None or isinstance(x, kinds) or (isinstance(x, torch.device) and x == self.device)
            for x in (*args, *kwargs.values())
        )

    def _size(self, dim: int | None = None) -> Any:
        return self._shape() if dim is None else self._shape()[dim]

    def _item(self, index: Any) -> Any:
        """Indexing: whole slices return the same logits, a slice of the vocabulary alone is recorded."""
        indices = index if isinstance(index, tuple) else (index,)
        if index is Ellipsis or all(isinstance(i, slice) and i == slice(None) for i in indices):
            return self
        *leading, last = indices
        is_of_last = len(indices) == self._call.hidden.ndim or leading == [Ellipsis]
        is_whole = leading == [Ellipsis] or all(isinstance(i, slice) and i == slice(None) for i in leading)
        if is_of_last and is_whole and isinstance(last, slice):
            operations = self._operations.then(Tensor.__getitem__, (index,), {})
            return _Recorded.apply(self, operations)
        return self.materialise()[index]

    def _hook(self, hook: Callable[..., Any]) -> Any:
        if package_of(hook) not in _HOOKS_OF:
            raise UlyssesRuntimeError(
                "a hook on the logits needs their gradient, which is never made whole: parallelize (or install) with "
                "loss_tile=None."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return self.register_hook(hook)

    def _retain_grad(self) -> None:
        raise UlyssesRuntimeError(
            "the gradient of the logits is never made whole: parallelize (or install) with loss_tile=None."
        )

    def _describe(self, **_: Any) -> str:
        return f"LazyLogits(shape={tuple(self._shape())}, dtype={self.dtype}, not made yet)"


#: Answers that need no logits.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: LazyLogits._shape,  # type: ignore[attr-defined]
    Tensor.size: LazyLogits._size,
    Tensor.dim: lambda lazy: len(lazy._shape()),
    Tensor.ndim.__get__: lambda lazy: len(lazy._shape()),  # type: ignore[attr-defined]
    Tensor.numel: lambda lazy: lazy._shape().numel(),
    Tensor.nelement: lambda lazy: lazy._shape().numel(),
    Tensor.__len__: lambda lazy: lazy._shape()[0],
    Tensor.dtype.__get__: lambda lazy: lazy._operations.outcome.dtype,  # type: ignore[attr-defined]
    Tensor.is_floating_point: lambda lazy: True,
    torch.is_floating_point: lambda lazy: True,
    Tensor.is_complex: lambda lazy: False,
    Tensor.detach: LazyLogits._detached,
    torch.detach: LazyLogits._detached,
    Tensor.data.__get__: LazyLogits._detached,  # type: ignore[attr-defined]
    Tensor.__getitem__: LazyLogits._item,
    Tensor.register_hook: LazyLogits._hook,
    Tensor.retain_grad: LazyLogits._retain_grad,
    Tensor.__repr__: LazyLogits._describe,
}


def _real(x: Any) -> Any:
    return x.materialise() if isinstance(x, LazyLogits) else x


#: Whether the forwards of models that run in this thread, the innermost last, defer their heads.
_DEFERS: ContextVar[tuple[bool, ...]] = ContextVar("ulysses_defers_head", default=())


class DeferredHead(NotCopied):
    """Takes the place of the call of a model's head. Everything else of the head stays: class, keys, weights, hooks.

    It calls the head as it is unless a sequence-parallel forward of the whole model records gradients. So it does for
    heads with hooks of the user, which have to see logits, and in compiled code.

    Args:
        module: the head.
        loss_tile: see `parallelize`.
    """

    def __init__(self, module: nn.Module, loss_tile: int | str) -> None:
        self.module, self.loss_tile = module, loss_tile
        #: Says to all ranks what this rank is about to do, before it gathers the head; the Handle knows how.
        self.agree: Callable[[str], None] = lambda _: None

    @classmethod
    def of(cls, model: nn.Module, loss_tile: int | str | None) -> DeferredHead | None:
        """The head of a model; None if it is to make its logits whole, or has no head that is known to be linear."""
        find = getattr(model, "get_output_embeddings", None)
        head = find() if find is not None and loss_tile is not None else None
        return None if head is None or loss_tile is None or not is_linear(head) else cls(head, loss_tile)

    @property
    def is_sharded(self) -> bool:
        """Whether ZeRO-3 shards the head, so that to make logits is a collective."""
        return is_sharded_by_zero3(list(self.module.parameters()))

    @staticmethod
    def begin(*, defers: bool) -> None:
        """A forward of the model begins. It ends with `end`, also if it raises."""
        _DEFERS.set((*_DEFERS.get(), defers))

    @staticmethod
    def end() -> None:
        """The forward ends; the one in which it ran goes on."""
        _DEFERS.set(_DEFERS.get()[:-1])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if len(args) == 1 and not kwargs else None
        if torch.compiler.is_compiling() or not any(_DEFERS.get()[-1:]) or not self._is_deferrable(hidden):
            return nn.Module._call_impl(self.module, *args, **kwargs)
        assert isinstance(hidden, Tensor)
        return self._defer(hidden)

    def _is_deferrable(self, hidden: Any) -> bool:
        if not isinstance(hidden, Tensor) or hidden.ndim < 2 or not torch.is_grad_enabled():
            return False
        return is_linear(self.module) and not has_hooks_of_the_user(list(self.module.modules()))

    def _defer(self, hidden: Tensor) -> LazyLogits:
        device, parameters = hidden.device.type, list(self.module.parameters())
        is_on = torch.is_autocast_enabled(device)
        autocast: dict[str, Any] = dict(
            device_type=device, dtype=torch.get_autocast_dtype(device), enabled=is_on, cache_enabled=False
        )
        trained = [p for p in parameters if p.requires_grad]
        backward = _Backward(hidden.new_empty(0), hidden.requires_grad, trained)
        call = _Call(self, hidden.detach(), parameters, autocast, backward)
        dtype = autocast["dtype"] if is_on and hidden.dtype != torch.float64 else hidden.dtype
        vocabulary: Any = self.module.out_features
        outcome = torch.empty((*(1,) * (hidden.ndim - 2), 0, vocabulary), dtype=dtype, device=hidden.device)
        with whole_shapes(trained):
            lazy: LazyLogits = _Head.apply(call, _Operations(outcome), hidden, *trained)
        return lazy


def is_linear(head: nn.Module) -> bool:
    """Whether a module is an nn.Linear, or one in PEFT's adapters (LoRA, modules_to_save)."""
    if type(head) is nn.Linear:
        return True
    is_adapter = type(head).__module__.startswith("peft.") and hasattr(head, "out_features")
    known = (nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict)
    return is_adapter and all(type(m) in known or m is head for m in head.modules())
