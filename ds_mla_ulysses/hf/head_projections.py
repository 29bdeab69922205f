"""A linear projection of some heads only: the rows of its weight that belong to them.

Letters: H heads · M some of them · D output width of a head · L input width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .arguments import NotCopied


class WithHeads(NotCopied):
    """A forward for `linear`, whose output are `heads` heads: `linear(x, heads=slice)` gives those, else all.

    It is called as the module is, so that hooks fire, which gather the weight under ZeRO-3. The heads go by keyword,
    which leaves a hook's arguments as they are.
    """

    def __init__(self, linear: nn.Linear, heads: int) -> None:
        self.linear, self.width, self.original = linear, linear.out_features // heads, linear.forward

    def __call__(self, x: Tensor, heads: slice | None = None) -> Tensor:
        if heads is None:
            return self.original(x)
        rows = heads.start * self.width, heads.stop * self.width
        return LinearRows.apply(x, self.linear.weight, self.linear.bias, *rows)


def project(module: nn.Module, name: str, x: Tensor, heads: slice) -> Tensor:
    """Some heads of a projection that has such a forward.

    Raises:
        RuntimeError: it has been replaced since, by an adapter.
    """
    projection = module._modules[name]
    if type(projection) is not nn.Linear:
        raise RuntimeError(
            f"{type(module).__name__}.{name} was replaced after parallelize, which takes rows of its weight: put adapters "
            "on the model before it is parallelized, with strategy='packed' or 'gather_kv'."
        )
    return projection(x, heads=heads)


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
