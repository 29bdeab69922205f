"""The differentiable operator behind every implementation but the reference.

An implementation is a module with these functions:

| function   | takes                                                                        | returns                     |
|------------|------------------------------------------------------------------------------|-----------------------------|
| `forward`  | q, k, v, documents, block, topk, places, scale                               | out_THV, lse_TH, blocks_THJ |
| `backward` | grad_THV, q, k, v, out, lse, blocks, documents, block, topk, scale           | dq_THK, dk_SGK, dv_SGV      |
| `check`    | q, k, v                                                                      | nothing, or raises          |

Tensors come with a last dimension without gaps. `out` and the gradients may be of any dtype that holds q's: they are
rounded here, once. `lse` is in fp32 or wider, of scores times scale, over everything that the row attends to.
`blocks` is what `select_blocks` returns; `places` is its J, 0 where no document needs the gate. `check` raises a
ValueError that says what to choose instead where the implementation cannot run with such tensors or here.

Letters: T queries · S keys · H query heads · G key/value heads · K query/key width · V value width ·
J = topk - 1 places for past blocks.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.collectives import accumulation_dtype
from .grid import read_documents

_MODULES = {"torch": "native", "flash": "flash", "triton": "triton"}


class MoBAAttention(torch.autograd.Function):
    """q_THK, k_SGK, v_SGV -> out_THV. Backward: gradients of all three; the gate carries none.

    Saves q, k, v, out, lse_TH and the picked blocks_THJ.
    """

    @staticmethod
    def forward(
        ctx, q_THK, k_SGK, v_SGV, cu_q, cu_k, max_seqlen: int, block: int, topk: int, places: int, scale, implementation
    ):
        out, lse, blocks = _forward(
            q_THK, k_SGK, v_SGV, cu_q, cu_k, max_seqlen, block, topk, places, scale, implementation
        )
        ctx.save_for_backward(q_THK, k_SGK, v_SGV, out, lse, blocks, cu_q, cu_k)
        ctx.settings = block, topk, scale, implementation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_THV):
        return *_backward(grad_THV, *ctx.saved_tensors, *ctx.settings), *[None] * 8


# The operators. They take plain values, so that a compiled graph can hold them, and read cu_seqlens inside.


@torch.library.custom_op("ds_mla_ulysses::moba_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_seqlen: int,
    block: int,
    topk: int,
    places: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = _module(implementation)
    module.check(q, k, v)
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0], max_seqlen)
    q, k, v = map(_dense_rows, (q, k, v))
    # Autocast would round what is kept wide on purpose.
    with torch.autocast(q.device.type, enabled=False):
        out, lse, blocks = module.forward(q, k, v, documents, block, topk, places, scale)
        return out.to(q.dtype), lse, blocks


@_forward.register_fake
def _(q, k, v, cu_q, cu_k, max_seqlen, block, topk, places, scale, implementation):
    T, H, _ = q.shape
    return (
        q.new_empty(T, H, v.shape[-1]),
        q.new_empty(T, H, dtype=accumulation_dtype(q.dtype)),
        q.new_empty(T, H, places, dtype=torch.int32),
    )


@torch.library.custom_op("ds_mla_ulysses::moba_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    block: int,
    topk: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0])
    grad, q, k, v = map(_dense_rows, (grad, q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        grads = _module(implementation).backward(grad, q, k, v, out, lse, blocks, documents, block, topk, scale)
        dq, dk, dv = (x.to(q.dtype) for x in grads)
        return dq, dk, dv


@_backward.register_fake
def _(grad, q, k, v, out, lse, blocks, cu_q, cu_k, block, topk, scale, implementation):
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _module(implementation: str) -> ModuleType:
    # Imported when it is first called: triton need not be there.
    return importlib.import_module(f".{_MODULES[implementation]}", __package__)


def _dense_rows(x_THD: Tensor) -> Tensor:
    """Kernels take any strides but the last: the gradient of a sum has none."""
    return x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
