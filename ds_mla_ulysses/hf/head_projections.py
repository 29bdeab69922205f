"""Linear projections that are computed for some heads only, from the rows of the weight that belong to those heads.

Shape letters: H heads · M some of the heads · D output width of a head · L input width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UlyssesRuntimeError
from ..planner.strategies import names_that_call_projections_whole, one_of
from .arguments import NotCopied


class WithHeads(NotCopied):
    """A forward for a linear projection to heads: `linear(x, heads=slice)` computes those heads, `linear(x)` all of them.

    It is called through the module, so hooks fire; under ZeRO-3 they gather the weight. The heads are passed by keyword,
    which leaves the positional arguments that hooks see as they are.

    Args:
        linear: weight [H*D, L].
        heads: H.
    """

    def __init__(self, linear: nn.Linear, heads: int) -> None:
        self.linear, self.width, self.original = linear, linear.out_features // heads, linear.forward

    def __call__(self, x: Tensor, heads: slice | None = None) -> Tensor:
        """Computes x [..., L] -> [..., M*D], or [..., H*D] without `heads`."""
        if heads is None:
            return self.original(x)
        rows = heads.start * self.width, heads.stop * self.width
        return LinearRows.apply(x, self.linear.weight, self.linear.bias, *rows)


def project(module: nn.Module, name: str, x: Tensor, heads: slice) -> Tensor:
    """Computes some heads of a projection whose forward is a `WithHeads`.

    Args:
        module: the attention module.
        name: of the projection in the module.
        x: [..., L].
        heads: M consecutive heads.

    Returns:
        [..., M*D].

    Raises:
        RuntimeError: the projection was replaced after the model was parallelized, for example by an adapter.
    """
    projection = module._modules[name]
    if type(projection) is not nn.Linear:
        raise UlyssesRuntimeError(
            f"{type(module).__name__}.{name} was replaced after parallelize, which takes rows of its weight: put adapters "
            "on the model before it is parallelized, with strategy="
            f"{one_of(names_that_call_projections_whole())}."
        )
    computed: Tensor = projection(x, heads=heads)
    return computed


class LinearRows(torch.autograd.Function):
    """x [..., L] and weight [H*D, L] -> [..., M*D], with the rows of the weight from `start` to `stop`.

    It saves x and the whole parameters, not a slice of the weight: under ZeRO-3 a slice would keep the gathered weight
    alive until backward. Backward: a gradient of the whole weight, with zeros in the other rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.rows = slice(start, stop)
        return F.linear(x, weight[ctx.rows], None if bias is None else bias[ctx.rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (grad @ weight[ctx.rows].to(grad.dtype)).to(x.dtype)
        flat = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            dweight = torch.zeros_like(weight)
            dweight[ctx.rows] = flat.T @ x.flatten(0, -2).to(grad.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            dbias = torch.zeros_like(bias)
            dbias[ctx.rows] = flat.sum(0)
        return dx, dweight, dbias, None, None
