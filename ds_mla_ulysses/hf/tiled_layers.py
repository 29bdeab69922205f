"""Norms, MLPs, routers and experts that run a tile of tokens at a time, so that what they make exists for one tile only.

These modules compute each token by itself. Forward makes no graph. Backward runs each tile again, with one. A gradient of a
weight is summed over the tiles in fp32 (or wider), rounded once, and reaches autograd once: ZeRO reduces a gradient when it
arrives.

| module                  | how it is known                                                                             |
|-------------------------|---------------------------------------------------------------------------------------------|
| a norm                  | its class is a norm of transformers or torch, with at most one vector of weights and a bias |
| an MLP, shared experts  | a class of transformers with linear layers, activations, dropout and norms, and nothing else |
| a router                | a class of top-k routers of transformers with one matrix, which draws no random numbers      |
| routed experts          | a class of experts of transformers, which takes tokens, their experts and their weights      |

A router holds its input in fp32, which is why it is here; its logits are whole, and hooks and auxiliary losses see all of
them. Everything else is left as it is: layers that are quantised or have an adapter that torch's parametrization applies,
and modules of other packages.

Letters: N tokens · n tokens of a tile · D width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrize
from torch.utils.checkpoint import get_device_states, set_device_states

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesRuntimeError, UlyssesTypeError, UlyssesValueError
from .arguments import NotCopied, by_name
from .families import UnsupportedModelError
from .lazy_logits import is_linear
from .sharded_weights import (
    gathered,
    gathered_until_accumulated,
    has_hooks_of_the_user,
    package_of,
    without_hooks,
    without_tensor_hooks,
)

#: The arguments of routed experts in transformers: tokens [N, D], and [N, experts of a token] their experts and weights.
_OF_EXPERTS = (
    ("hidden_states", "top_k_index", "top_k_weights"),
    ("hidden_states", "router_indices", "routing_weights"),
)


def check_mlp_tile(mlp_tile: Any) -> None:
    """Refuses what is no number of tokens.

    Raises:
        TypeError: mlp_tile is neither an int nor None.
        ValueError: it is smaller than 1.
    """
    if mlp_tile is not None and type(mlp_tile) is not int:
        raise UlyssesTypeError(f"mlp_tile must be None or a number of tokens, got {mlp_tile!r}.")
    if mlp_tile is not None and mlp_tile < 1:
        raise UlyssesValueError(f"mlp_tile must be at least 1 token, got {mlp_tile}.")


def tiled_forwards(text_model: nn.Module, mlp_tile: int) -> list[tuple[nn.Module, TiledForward]]:
    """The modules of a model that can run in tiles, with the forwards that do so.

    Raises:
        UnsupportedModelError: there is neither an MLP nor experts that can.
    """
    width = int(text_model.config.hidden_size)  # type: ignore[union-attr, arg-type]
    found = list(_find(text_model))
    if not any(kind in ("mlp", "experts") for *_, kind in found):
        raise UnsupportedModelError(
            f"mlp_tile={mlp_tile} needs MLPs or experts that compute each token by itself, but {type(text_model).__name__} "
            "has none that are known to: leave mlp_tile out."
        )
    return [(module, TiledForward(module, names, kind, mlp_tile * width)) for module, names, kind in found]


def _find(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], str]]:
    """Modules inside of a module, the names of their tensors, and their kind. Not what is inside of those."""
    for child in module.children():
        names = _argument_names(child)
        kind = next((kind for kind, is_of_kind in _KINDS.items() if is_of_kind(child, names)), None)
        if kind is not None:
            yield child, names, kind
        elif not type(child).__module__.startswith("peft."):
            yield from _find(child)


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of the forward that its class defines; none if it takes any number of them."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return () if any(p.kind in kinds for p in parameters) else tuple(p.name for p in parameters)


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _has_known_forward(module: nn.Module) -> bool:
    """Whether a module has the forward of a class of transformers, or of one of Liger, which replaces classes and forwards."""
    forward = vars(module).get("forward")
    is_known = _is_of_transformers(module) or package_of(type(module)) == "liger_kernel"
    return is_known and (forward is None or package_of(forward) == "liger_kernel")


def _is_norm(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module normalises the last dimension. Modules with another instance's forward, as Liger's, save little."""
    if "forward" in vars(module) or len(names) != 1 or list(module.children()):
        return False
    if type(module) in (nn.LayerNorm, nn.RMSNorm):
        return len(module.normalized_shape) == 1  # type: ignore[arg-type]
    is_named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    return is_named and _is_of_transformers(module) and all(p.ndim == 1 for p in module.parameters())


def _is_simple(module: nn.Module) -> bool:
    """Whether a module is an activation, dropout, or a norm."""
    is_activation = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    return is_activation or type(module) in (nn.Dropout, nn.Identity) or _is_norm(module, _argument_names(module))


def _is_mlp(module: nn.Module, names: tuple[str, ...]) -> bool:
    linear = [child for child in module.children() if is_linear(child) or type(child).__name__ == "Conv1D"]
    return (
        len(names) == 1
        and len(linear) >= 2
        and _has_known_forward(module)
        and not list(module.parameters(recurse=False))
        and not list(module.buffers(recurse=False))
        and all(child in linear or _is_simple(child) for child in module.children())
    )


def _is_experts(module: nn.Module, names: tuple[str, ...]) -> bool:
    return (
        names in _OF_EXPERTS
        and type(module).__name__.endswith("Experts")
        and _has_known_forward(module)
        and all(p.is_floating_point() for p in module.parameters())
        and all(_is_simple(child) for child in module.children())
    )


def _is_router(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Whether a module returns logits, weights and experts of tokens. One with jitter would change its input in place."""
    return (
        names == ("hidden_states",)
        and type(module).__name__.lower().endswith("topkrouter")
        and _has_known_forward(module)
        and sum(p.ndim == 2 for p in module.parameters()) == 1
        and all(p.ndim <= 2 for p in module.parameters())
        and all(_is_simple(child) for child in module.children())
        and not any("jitter" in name for name in vars(module))
    )


_KINDS = {"norm": _is_norm, "mlp": _is_mlp, "experts": _is_experts, "router": _is_router}


class TiledForward(NotCopied):
    """Takes the place of a module's forward.

    Every call runs in tiles, however few tokens there are: weights that ZeRO-3 shards are gathered once in forward and once
    in backward, on all ranks alike, whereas the number of tiles may differ between them.

    Args:
        module: whose forward computes each token by itself.
        names: of the forward's arguments, all of which have tokens in front of the last dimension.
        kind: "norm", "mlp", "experts" or "router", which returns several tensors.
        elements: of the first argument in a tile, at most, unless a single token has more.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], kind: str, elements: int) -> None:
        self.module, self.names, self.kind, self.elements = module, names, kind, elements
        self.original, self._signature = module.forward, inspect.signature(module.forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = by_name(self._signature, args, kwargs)
        inputs = [given.pop(name, None) for name in self.names]
        self._check(inputs, given)
        parameters = list(self.module.parameters())
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
            with gathered(parameters), self.unhooked():
                results = _in_tiles(self, inputs)
        else:
            results = self._recorded(inputs, parameters)
        return results if self.kind == "router" else results[0]

    def _recorded(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        trained = [p for p in parameters if p.requires_grad]
        node = None
        if any(x.requires_grad for x in inputs):
            inputs = list(_Saved.apply(*inputs))
            node = next(x.grad_fn for x in inputs if x.grad_fn is not None)
        random = _random_state(inputs) if self.kind != "norm" else None
        call = _Call(self, parameters, trained, len(inputs), node, _autocast(inputs[0]), random)
        with gathered(parameters):
            results: tuple[Tensor, ...] = _Tiles.apply(call, *inputs, *trained)
        return results

    def _check(self, inputs: list[Any], others: dict[str, Any]) -> None:
        kind = type(self.module).__name__
        are_tokens = all(isinstance(x, Tensor) and x.ndim >= 2 and x.shape[:-1] == inputs[0].shape[:-1] for x in inputs)
        if others or not are_tokens:
            found = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
            raise UlyssesRuntimeError(
                f"{kind} was called with {found} for {', '.join(self.names)}"
                f"{f' and with {sorted(others)}' if others else ''}, which cannot be split into tiles of tokens: parallelize "
                "(or install) without mlp_tile."
            )
        if parametrize.is_parametrized(self.module) or has_hooks_of_the_user(list(self.module.modules())[1:]):
            raise UlyssesRuntimeError(
                f"{kind} runs in tiles of tokens (mlp_tile), but hooks inside of it would see one tile at a time, and "
                "adapters that parametrize its weights would not be trained: parallelize (or install) without mlp_tile."
            )

    def results(self, tile: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the module returns for a tile: tensors with the tile's tokens, which a router has in one dimension."""
        result = self.original(*tile)
        results: tuple[Any, ...] = result if self.kind == "router" and isinstance(result, tuple) else (result,)
        # Some routers take their softmax over dimension 1, so they are right for rows of tokens only.
        leading = (tile[0].shape[:-1].numel(),) if self.kind == "router" else tile[0].shape[:-1]
        if not all(isinstance(x, Tensor) and x.shape[:-1] == leading for x in results):
            raise UlyssesRuntimeError(
                f"{type(self.module).__name__} does not return one vector for each of its tokens, so it cannot run in tiles: "
                "parallelize (or install) without mlp_tile."
            )
        return results

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Inside the block, hooks of the modules inside do not run: the weights are gathered already."""
        with without_hooks(self.module):
            yield

    def tiles(self, tensors: Sequence[Tensor]) -> Iterator[tuple[slice, list[Tensor]]]:
        """The tokens of each tile, and its part of each tensor, with as many dimensions as the tensor has."""
        flat = [x.reshape(-1, x.shape[-1]) for x in tensors]
        tile = max(1, self.elements // flat[0].shape[1])
        for start in range(0, max(1, len(flat[0])), tile):
            here = slice(start, start + tile)
            yield (
                here,
                [rows[here].view(*(1,) * (x.ndim - 2), -1, x.shape[-1]) for rows, x in zip(flat, tensors, strict=True)],
            )


@dataclass(frozen=True)
class _Call:
    """One call of a module in tiles.

    Attributes:
        parameters: all of the module's; `trained` are those that need a gradient.
        inputs: how many tensors the forward takes.
        saved: the node of `_Saved` that keeps them; None if `_Tiles` does.
        autocast: arguments of torch.autocast.
        random: makes a block that draws the random numbers of the forward again; None if it draws none.
    """

    forward: TiledForward
    parameters: Sequence[Tensor]
    trained: Sequence[Tensor]
    inputs: int
    saved: Any
    autocast: dict[str, Any]
    random: Callable[[], AbstractContextManager[None]] | None


class _Saved(torch.autograd.Function):
    """Returns its tensors and keeps them for the backward of `_Tiles`.

    A non-reentrant checkpoint ends its recomputation as soon as everything that was saved exists again. So if the inputs of
    the last tiles of a layer are saved before these run, they do not run once more.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class _Tiles(torch.autograd.Function):
    """Forward: the module's results, tile by tile. Backward: each tile again, with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call, inputs = call, tensors[: call.inputs]
        if call.saved is None:
            ctx.save_for_backward(*inputs)
        with call.forward.unhooked():
            return _in_tiles(call.forward, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        inputs: tuple[Tensor, ...] = (ctx if call.saved is None else call.saved).saved_tensors
        takes = list(ctx.needs_input_grad[1 : 1 + call.inputs])
        with gathered_until_accumulated(call.parameters) as stay, call.forward.unhooked(), ExitStack() as stack:
            stack.enter_context(without_tensor_hooks(call.trained))
            stack.enter_context(torch.autocast(**call.autocast))
            if call.random is not None:
                stack.enter_context(call.random())
            of_inputs, of_parameters = _gradients(call, inputs, takes, grads)
            stay += [p for p, g in zip(call.trained, of_parameters, strict=True) if g is not None]
        return (None, *of_inputs, *of_parameters)


def _in_tiles(forward: TiledForward, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The module's results, without a graph."""
    whole: list[Tensor] = []
    leading = inputs[0].shape[:-1]
    shapes: list[tuple[int, ...]] = []
    for here, tile in forward.tiles([x.detach() for x in inputs]):
        with torch.no_grad():
            parts = forward.results(tile)
        if not whole:
            shapes = [(*(leading if x.ndim == tile[0].ndim else (leading.numel(),)), x.shape[-1]) for x in parts]
            if len(parts[0].flatten(0, -2)) == leading.numel():
                whole = list(parts)
                break
            whole = [x.new_empty(leading.numel(), x.shape[-1]) for x in parts]
        for out, part in zip(whole, parts, strict=True):
            out[here] = part.flatten(0, -2)
    return tuple(x.reshape(shape) for x, shape in zip(whole, shapes, strict=True))


def _gradients(
    call: _Call, inputs: Sequence[Tensor], takes: Sequence[bool], grads: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the inputs and of the trained parameters.

    Args:
        takes: which inputs take a gradient.
        grads: of the results.
    """
    made = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if t else None
        for x, t in zip(inputs, takes, strict=True)
    ]
    rows = [None if x is None else x.view(-1, x.shape[-1]) for x in made]
    sums: list[Tensor | None] = [None] * len(call.trained)
    grad_rows = [None if x is None else x.reshape(-1, x.shape[-1]) for x in grads]
    for here, tile in call.forward.tiles(inputs):
        leaves = [x.detach().requires_grad_(t) for x, t in zip(tile, takes, strict=True)]
        with torch.enable_grad():
            results = call.forward.results(leaves)
        wanted = [x for x in leaves if x.requires_grad] + list(call.trained)
        found: list[Tensor | None] = [None] * len(wanted)  # if no token of the tile has an expert
        used = [(x, g[here].view_as(x)) for x, g in zip(results, grad_rows, strict=True) if g is not None]
        used = [(x, g) for x, g in used if x.requires_grad]
        if used:
            outputs, given = zip(*used, strict=True)
            found = list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))
            del outputs, given
        del results, used
        found.reverse()  # each is taken from the end, so that none is held while the next tile runs
        for row in rows:
            if row is not None:
                part = found.pop()
                row[here] = 0 if part is None else part.flatten(0, -2)
        for i in range(len(sums)):
            sums[i] = _plus(sums[i], found.pop())
    return made, [None if x is None else x.to(p.dtype) for x, p in zip(sums, call.trained, strict=True)]


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    if total is None:
        return part.to(accumulation_dtype(part.dtype), copy=True)
    return total.add_(part)


def _autocast(x: Tensor) -> dict[str, Any]:
    """The state of autocast, as arguments of torch.autocast."""
    device = x.device.type
    is_on = torch.is_autocast_enabled(device)
    return {"device_type": device, "dtype": torch.get_autocast_dtype(device), "enabled": is_on, "cache_enabled": False}


def _random_state(inputs: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
    """What makes a block in which the random numbers of now are drawn again: dropout may be a function, not a module."""
    device, state, (devices, states) = inputs[0].device.type, torch.get_rng_state(), get_device_states(*inputs)

    @contextmanager
    def again() -> Iterator[None]:
        with torch.random.fork_rng(devices, device_type=device):
            torch.set_rng_state(state)
            set_device_states(devices, states, device_type=device)
            yield

    return again
