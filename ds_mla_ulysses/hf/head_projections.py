"""Linear projections that can compute some of their heads only, from the rows of the weight that belong to those heads.

Shape letters:
    H all heads                       D output width of a head
    M the heads that are asked for    L input width
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import NotCopied


class WithHeads(NotCopied):
    """A forward for a linear module: `linear(x, heads=slice)` computes those heads, `linear(x)` computes all of them.

    The module itself is called, so its hooks run, which gather the weight under ZeRO-3. `heads` is a keyword argument,
    so the positional arguments that hooks see do not change.

    Args:
        linear: the projection, whose forward is replaced by this object.
        heads: the number of its heads.
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
    """Computes some heads of the projection `name` of an attention module: x [..., L] -> [..., M*D].

    Raises:
        RuntimeError: the projection was replaced after `parallelize`, for example by an adapter.
    """
    projection = module._modules[name]
    if type(projection) is not nn.Linear:
        raise RuntimeError(
            f"{type(module).__name__}.{name} was replaced after parallelize, whose strategy uses single rows of its weight: "
            "put adapters on the model before it is parallelized, and use strategy='packed' or 'gather_kv'."
        )
    out: Tensor = projection(x, heads=heads)
    return out


class LinearRows(torch.autograd.Function):
    """Multiplies by some rows of a weight: x [..., L], weight [H*D, L] -> [..., M*D], rows [start, stop).

    It saves x and whole parameters for backward, because a saved part of the weight would keep the gathered weight
    alive until backward under ZeRO-3.

    Backward: no collective. The gradient has the size of the whole weight, with zeros in the other rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.rows = slice(start, stop)
        return F.linear(x, weight[ctx.rows], None if bias is None else bias[ctx.rows])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
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
