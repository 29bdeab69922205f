"""A linear projection of some heads only: the rows of its weight that belong to them.

Letters: H heads · M some of them · D output width of a head · L input width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def with_heads(linear: nn.Linear, heads: int) -> Callable[..., Tensor]:
    """A forward for `linear`, whose output are `heads` heads: `linear(x, slice)` gives those, else all.

    It is called as the module is, so that hooks fire, which gather the weight under ZeRO-3.
    """
    original = linear.forward

    def forward(x: Tensor, heads_of: slice | None = None) -> Tensor:
        if heads_of is None:
            return original(x)
        width = linear.out_features // heads
        return LinearRows.apply(x, linear.weight, linear.bias, heads_of.start * width, heads_of.stop * width)

    return forward


class LinearRows(torch.autograd.Function):
    """x [..., L] and weight [H*D, L] -> [..., M*D], of the rows from `start` to `stop`.

    Keeps x and the parameters themselves, not a part of the weight: under ZeRO-3 that would hold the gathered weight
    until backward. Backward: a gradient of the whole weight, zeros in the other rows.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.rows = slice(start, stop)
        return F.linear(x, weight[ctx.rows], None if bias is None else bias[ctx.rows])

    @staticmethod
    def backward(ctx, grad: Tensor):
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
