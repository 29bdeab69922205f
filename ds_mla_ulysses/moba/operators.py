"""The differentiable operator behind every implementation except the reference.

Letters: T queries · S keys · H query heads · G KV heads · K query and key width · V value width ·
J = the places for past blocks: top_k - 1, or 0 if no document needs the gate · D any width.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.collectives import accumulation_dtype
from ..comm.kept import ATTENTION, kept
from .boundaries import Document, read_documents

_MODULES = {
    "torch": "torch_implementation",
    "flash": "flash_implementation",
    "triton": "triton_implementation",
}


class Implementation(Protocol):
    """The functions that an implementation of MoBA has. Each implementation is a module.

    The last dimension of every tensor is contiguous. `out` and the gradients may have any dtype that can represent
    the values of q's dtype: the operator rounds them to q's dtype. `lse` is the log-sum-exp of scores times scale over
    everything that a row attends to, in fp32 or wider. `blocks` has the format of `select_blocks`.
    """

    def check(self, q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor) -> None:
        """Raises a ValueError that names an alternative if the implementation cannot run with such tensors here."""

    def forward(
        self,
        q_THK: Tensor,
        k_SGK: Tensor,
        v_SGV: Tensor,
        documents: Sequence[Document],
        block_size: int,
        top_k: int,
        places: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns out_THV, lse_TH and blocks_THJ. `places` is J."""
        ...

    def backward(
        self,
        grad_THV: Tensor,
        q_THK: Tensor,
        k_SGK: Tensor,
        v_SGV: Tensor,
        out_THV: Tensor,
        lse_TH: Tensor,
        blocks_THJ: Tensor,
        documents: Sequence[Document],
        block_size: int,
        top_k: int,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients dq_THK, dk_SGK and dv_SGV."""
        ...


if TYPE_CHECKING:
    from . import flash_implementation, torch_implementation, triton_implementation

    # Type checkers compare the modules with the protocol here.
    _ALL: tuple[Implementation, ...] = (torch_implementation, flash_implementation, triton_implementation)


class MoBAAttention(torch.autograd.Function):
    """Maps q_THK, k_SGK and v_SGV to out_THV.

    Saves q, k, v, out, lse_TH and the picked blocks_THJ.

    Backward: returns the gradients of q, k and v. The gate carries no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_SGK: Tensor,
        v_SGV: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_seqlen: int,
        block_size: int,
        top_k: int,
        places: int,
        scale: float,
        implementation: str,
    ) -> Tensor:
        settings = max_seqlen, block_size, top_k, places, scale, implementation
        out, lse, blocks = kept(lambda: _forward(q_THK, k_SGK, v_SGV, cu_q, cu_k, *settings), ATTENTION)
        ctx.save_for_backward(q_THK, k_SGK, v_SGV, out, lse, blocks, cu_q, cu_k)
        ctx.settings = block_size, top_k, scale, implementation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THV: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(grad_THV, *ctx.saved_tensors, *ctx.settings), *[None] * 8


# The two operators take plain values, so that a compiled graph can contain them, and read cu_seqlens themselves.


@torch.library.custom_op("ds_mla_ulysses::moba_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_seqlen: int,
    block_size: int,
    top_k: int,
    places: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module = _module(implementation)
    module.check(q, k, v)
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0], max_seqlen)
    q, k, v = map(_contiguous_rows, (q, k, v))
    # Autocast would round values that are kept in fp32 on purpose.
    with torch.autocast(q.device.type, enabled=False):
        out, lse, blocks = module.forward(q, k, v, documents, block_size, top_k, places, scale)
        return out.to(q.dtype), lse, blocks


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_seqlen: int,
    block_size: int,
    top_k: int,
    places: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
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
    block_size: int,
    top_k: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0])
    grad, q, k, v = map(_contiguous_rows, (grad, q, k, v))
    with torch.autocast(q.device.type, enabled=False):
        grads = _module(implementation).backward(grad, q, k, v, out, lse, blocks, documents, block_size, top_k, scale)
        dq, dk, dv = (x.to(q.dtype) for x in grads)
        return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    blocks: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    block_size: int,
    top_k: int,
    scale: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _module(implementation: str) -> Implementation:
    # A module is imported when it is first called, since triton may not be installed.
    return cast(Implementation, importlib.import_module(f".{_MODULES[implementation]}", __package__))


def _contiguous_rows(x_TD: Tensor) -> Tensor:
    """Copies the tensor unless its last dimension is contiguous: the gradient of a sum, for example, has stride 0."""
    return x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
