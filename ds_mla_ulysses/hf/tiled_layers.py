"""Norms, MLPs and experts that run a tile of tokens at a time, so that what they make exists for one tile only.

These modules compute each token by itself. Forward makes no graph. Backward runs each tile again, with one. A gradient of a
weight is summed over the tiles in fp32 (or wider), rounded once, and reaches autograd once: ZeRO reduces a gradient when it
arrives.

| module                  | how it is known                                                                             |
|-------------------------|---------------------------------------------------------------------------------------------|
| a norm                  | its class is a norm of transformers or torch, with at most one vector of weights and a bias |
| an MLP, shared experts  | a class of transformers with linear layers, activations, dropout and norms, and nothing else |
| routed experts          | a class of experts of transformers, which takes tokens, their experts and their weights      |

Everything else is left as it is: routers, so that auxiliary losses see all tokens at once, layers that are quantised or have
an adapter that torch's parametrization applies, and modules of other packages.

Letters: N tokens · n tokens of a tile.
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
    found, norms = [], 0
    for module, names, is_norm in _find(text_model):
        norms += is_norm
        found.append((module, TiledForward(module, names, mlp_tile * width, draws=not is_norm)))
    if len(found) == norms:
        raise UnsupportedModelError(
            f"mlp_tile={mlp_tile} needs MLPs or experts that compute each token by itself, but {type(text_model).__name__} "
            "has none that are known to: leave mlp_tile out."
        )
    return found


def _find(module: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], bool]]:
    """Modules inside of a module, the names of their tensors, and whether it is a norm. Not what is inside of those."""
    for child in module.children():
        names = _argument_names(child)
        if _is_norm(child, names):
            yield child, names, True
        elif _is_mlp(child, names) or _is_experts(child, names):
            yield child, names, False
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
    """Whether a module has the forward of a class of transformers, or one that Liger has put in its place."""
    forward = vars(module).get("forward")
    return _is_of_transformers(module) and (forward is None or package_of(forward) == "liger_kernel")


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


class TiledForward(NotCopied):
    """Takes the place of a module's forward.

    Every call runs in tiles, however few tokens there are: weights that ZeRO-3 shards are gathered once in forward and once
    in backward, on all ranks alike, whereas the number of tiles may differ between them.

    Args:
        module: whose forward computes each token by itself.
        names: of the forward's arguments, all of which have tokens in front of the last dimension.
        elements: of the first argument in a tile, at most, unless a single token has more.
        draws: whether it may draw random numbers, which backward is then to draw again.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...], elements: int, draws: bool = True) -> None:
        self.module, self.names, self.elements, self.draws = module, names, elements, draws
        self.original, self._signature = module.forward, inspect.signature(module.forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = by_name(self._signature, args, kwargs)
        inputs = [given.pop(name, None) for name in self.names]
        self._check(inputs, given)
        parameters = list(self.module.parameters())
        if not torch.is_grad_enabled() or not any(x.requires_grad for x in (*inputs, *parameters)):
            with gathered(parameters), self.unhooked():
                return _in_tiles(self, inputs)
        return self._recorded(inputs, parameters)

    def _recorded(self, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
        trained = [p for p in parameters if p.requires_grad]
        node = None
        if any(x.requires_grad for x in inputs):
            inputs = list(_Saved.apply(*inputs))
            node = next(x.grad_fn for x in inputs if x.grad_fn is not None)
        random = _random_state(inputs) if self.draws else None
        call = _Call(self, parameters, trained, len(inputs), node, _autocast(inputs[0]), random)
        with gathered(parameters):
            result: Tensor = _Tiles.apply(call, *inputs, *trained)
        return result

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
    """Forward: the module's result, tile by tile. Backward: each tile again, with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Tensor:
        ctx.call, inputs = call, tensors[: call.inputs]
        if call.saved is None:
            ctx.save_for_backward(*inputs)
        with call.forward.unhooked():
            return _in_tiles(call.forward, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        inputs: tuple[Tensor, ...] = (ctx if call.saved is None else call.saved).saved_tensors
        takes = list(ctx.needs_input_grad[1 : 1 + call.inputs])
        with gathered_until_accumulated(call.parameters) as stay, call.forward.unhooked(), ExitStack() as stack:
            stack.enter_context(without_tensor_hooks(call.trained))
            stack.enter_context(torch.autocast(**call.autocast))
            if call.random is not None:
                stack.enter_context(call.random())
            of_inputs, of_parameters = _gradients(call, inputs, takes, grad)
            stay += [p for p, g in zip(call.trained, of_parameters, strict=True) if g is not None]
        return (None, *of_inputs, *of_parameters)


def _in_tiles(forward: TiledForward, inputs: Sequence[Tensor]) -> Tensor:
    """The module's result [..., D], without a graph."""
    out: Any = None
    leading = inputs[0].shape[:-1]
    for here, tile in forward.tiles([x.detach() for x in inputs]):
        with torch.no_grad():
            part = forward.original(*tile)
        _check_part(forward, part, tile[0])
        if out is None:
            if len(part.flatten(0, -2)) == leading.numel():
                return part.reshape(*leading, part.shape[-1])
            out = part.new_empty(leading.numel(), part.shape[-1])
        out[here] = part.flatten(0, -2)
    result: Tensor = out.view(*leading, out.shape[-1])
    return result


def _check_part(forward: TiledForward, part: Any, tile: Tensor) -> None:
    if not isinstance(part, Tensor) or part.shape[:-1] != tile.shape[:-1]:
        raise UlyssesRuntimeError(
            f"{type(forward.module).__name__} does not return one tensor with its tokens, so it cannot run in tiles: "
            "parallelize (or install) without mlp_tile."
        )


def _gradients(
    call: _Call, inputs: Sequence[Tensor], takes: Sequence[bool], grad: Tensor
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients of the inputs and of the trained parameters.

    Args:
        takes: which inputs take a gradient.
        grad: of the result.
    """
    made = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if t else None
        for x, t in zip(inputs, takes, strict=True)
    ]
    rows = [None if x is None else x.view(-1, x.shape[-1]) for x in made]
    sums: list[Tensor | None] = [None] * len(call.trained)
    grad_rows = grad.reshape(-1, grad.shape[-1])
    for here, tile in call.forward.tiles(inputs):
        leaves = [x.detach().requires_grad_(t) for x, t in zip(tile, takes, strict=True)]
        with torch.enable_grad():
            out = call.forward.original(*leaves)
        wanted = [x for x in leaves if x.requires_grad] + list(call.trained)
        found: list[Tensor | None] = [None] * len(wanted)  # if no token of the tile has an expert
        if out.requires_grad:
            found = list(torch.autograd.grad(out, wanted, grad_rows[here].view_as(out), allow_unused=True))
        del out
        for row in rows:
            if row is not None:
                part = found.pop(0)
                row[here] = 0 if part is None else part.flatten(0, -2)
        for i in range(len(sums)):  # no variable holds a gradient while the next tile runs
            sums[i] = _plus(sums[i], found.pop(0))
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
