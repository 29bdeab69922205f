"""MLA's shared RoPE key: it joins the keys of the local heads, and its gradient returns to the ranks of its tokens.

Shape letters:
    P ranks                             M heads of this rank
    T tokens of this rank               N key width without position
    S = P*T, tokens of the sequence     R width of the shared RoPE key
    B batch                             K = N + R, key width
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype, start_all_to_all, wait


@torch.library.custom_op("ds_mla_ulysses::join_shared_key", mutates_args=())
def join_shared_key(k_nope_SBMN: Tensor, pending_SBR: Tensor, batch_first: bool) -> Tensor:
    """Waits for the shared key and writes K = [nope | shared] of the local heads, once.

    Returns:
        [B, S, M, N+R] if batch_first, else [S, B, M, N+R]; contiguous.
    """
    shared_SBR = wait(pending_SBR)
    key = _empty_key(k_nope_SBMN, pending_SBR, batch_first)
    k_SBMK, N = (key.transpose(0, 1) if batch_first else key), k_nope_SBMN.shape[-1]
    k_SBMK[..., :N].copy_(k_nope_SBMN)
    k_SBMK[..., N:].copy_(shared_SBR.unsqueeze(2).expand(-1, -1, k_nope_SBMN.shape[2], -1))
    return key


@join_shared_key.register_fake
def _fake_join_shared_key(k_nope_SBMN: Tensor, pending_SBR: Tensor, batch_first: bool) -> Tensor:
    return _empty_key(k_nope_SBMN, pending_SBR, batch_first)


def _empty_key(k_nope_SBMN: Tensor, shared_SBR: Tensor, batch_first: bool) -> Tensor:
    S, B, M, N = k_nope_SBMN.shape
    rows = (B, S) if batch_first else (S, B)
    return k_nope_SBMN.new_empty(*rows, M, N + shared_SBR.shape[-1])


@torch.library.custom_op("ds_mla_ulysses::return_shared_key_grad", mutates_args=())
def return_shared_key_grad(grad_SBMR: Tensor, size: int, rank: int, group: str) -> Tensor:
    """Starts sending each rank the local heads' gradient of the shared key of its tokens.

    The gradients of the local heads are summed in fp32 (or wider) and rounded once for the wire.

    Returns:
        *pending* [P*T, B, R], for `sum_over_ranks`.
    """
    dtype = grad_SBMR.dtype
    grad_SBR = grad_SBMR.sum(2, dtype=accumulation_dtype(dtype)).to(dtype).contiguous()
    if size == 1:
        return grad_SBR
    parts = [grad_SBR.numel() // size] * size
    return start_all_to_all(grad_SBR.view(-1), parts, parts, rank, group, "backward").view(grad_SBR.shape)


@return_shared_key_grad.register_fake
def _fake_return_shared_key_grad(grad_SBMR: Tensor, size: int, rank: int, group: str) -> Tensor:
    S, B, _, R = grad_SBMR.shape
    return grad_SBMR.new_empty(S, B, R)
