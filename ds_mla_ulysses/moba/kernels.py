"""Dense attention that also returns the log-sum-exp of every row, and its gradients from a merged result.

With `out` and `lse` of one call, the gradients are that call's. With those merged over several calls that
share queries, they are the call's part of the gradients of the whole.

Letters: B calls in one · H query heads · G key/value heads, H a multiple of G · Q queries · S keys · K query/key
width · V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype

_aten = torch.ops.aten
#: Scores of one tile of queries in plain matmuls.
_TILE_SCORES = 2**26


def has_flash(device: torch.device) -> bool:
    """Whether the device has a flash operator that returns log-sum-exp and takes merged ones; else plain matmuls."""
    return device.type == "cpu"


def attend(q_BHQK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out_BHQV; lse_BHQ in fp32 or wider. Causal needs as many keys as queries; there must be some of both."""
    assert q_BHQK.shape[2] > 0 and k_BGSK.shape[2] > 0, "the CPU operator ends the process without queries"
    if not has_flash(q_BHQK.device):
        return _plain_forward(q_BHQK, k_BGSK, v_BGSV, causal, scale)
    V = v_BGSV.shape[-1]
    q, k, v = _one_width(q_BHQK, k_BGSK, v_BGSV)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out[..., :V], lse


def attend_backward(
    grad_BHQV: Tensor,
    q_BHQK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in their dtype or wider. `out` and `lse` may be merged over several calls."""
    if not has_flash(q_BHQK.device):
        return _plain_backward(grad_BHQV, q_BHQK, k_BGSK, v_BGSV, out_BHQV, lse_BHQ, causal, scale)
    K, V = q_BHQK.shape[-1], v_BGSV.shape[-1]
    grad, q, k, v, out = _one_width(grad_BHQV, q_BHQK, k_BGSK, v_BGSV, out_BHQV)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_BHQ, 0.0, causal, scale=scale
    )
    return dq[..., :K], dk[..., :K], dv[..., :V]


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """The operator knows one width: zeros change neither scores nor the columns that are kept."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _tiles(B: int, H: int, Q: int, S: int) -> list[slice]:
    rows = max(1, _TILE_SCORES // (B * H * S))
    return [slice(start, min(Q, start + rows)) for start in range(0, Q, rows)]


def _future(tile: slice, S: int, device: torch.device) -> Tensor:
    queries = torch.arange(tile.start, tile.stop, device=device)
    return torch.arange(S, device=device) > queries[:, None]


def _grouped(x_BHQD: Tensor, G: int, tile: slice, dtype: torch.dtype) -> Tensor:
    """[B, G, R*Q, D]: the rows of all heads that read one key/value head."""
    return x_BHQD[:, :, tile].to(dtype).unflatten(1, (G, -1)).flatten(2, 3)


def _scores(q_BGXK: Tensor, k_BGSK: Tensor, R: int, tile: slice, causal: bool, scale: float) -> Tensor:
    scores_BGXS = q_BGXK @ k_BGSK.mT * scale
    if causal:
        S = k_BGSK.shape[2]
        scores_BGXS.unflatten(2, (R, -1)).masked_fill_(_future(tile, S, scores_BGXS.device), float("-inf"))
    return scores_BGXS


def _plain_forward(q_BHQK, k_BGSK, v_BGSV, causal, scale):
    (B, H, Q, _), (_, G, S, V) = q_BHQK.shape, v_BGSV.shape
    wide = accumulation_dtype(q_BHQK.dtype)
    k, v = k_BGSK.to(wide), v_BGSV.to(wide)
    # Laid out as the flash operator does, tokens before heads.
    out_BHQV = q_BHQK.new_empty(B, Q, H, V).transpose(1, 2)
    lse_BHQ = q_BHQK.new_empty(B, Q, H, dtype=wide).transpose(1, 2)
    for tile in _tiles(B, H, Q, S):
        scores_BGXS = _scores(_grouped(q_BHQK, G, tile, wide), k, H // G, tile, causal, scale)
        lse_BGX = scores_BGXS.logsumexp(-1)
        out_BGXV = (scores_BGXS - lse_BGX.unsqueeze(-1)).exp() @ v
        out_BHQV[:, :, tile] = out_BGXV.unflatten(2, (H // G, -1)).flatten(1, 2)
        lse_BHQ[:, :, tile] = lse_BGX.unflatten(2, (H // G, -1)).flatten(1, 2)
    return out_BHQV, lse_BHQ


def _plain_backward(grad_BHQV, q_BHQK, k_BGSK, v_BGSV, out_BHQV, lse_BHQ, causal, scale):
    (B, H, Q, K), (_, G, S, _) = q_BHQK.shape, v_BGSV.shape
    wide = accumulation_dtype(q_BHQK.dtype)
    k, v = k_BGSK.to(wide), v_BGSV.to(wide)
    dq_BHQK = q_BHQK.new_empty(B, Q, H, K, dtype=wide).transpose(1, 2)
    dk_BGSK, dv_BGSV = torch.zeros_like(k), torch.zeros_like(v)
    for tile in _tiles(B, H, Q, S):
        q, grad, out = (_grouped(x, G, tile, wide) for x in (q_BHQK, grad_BHQV, out_BHQV))
        lse_BGX = lse_BHQ[:, :, tile].unflatten(1, (G, -1)).flatten(2, 3)
        weights_BGXS = (_scores(q, k, H // G, tile, causal, scale) - lse_BGX.unsqueeze(-1)).exp()
        dv_BGSV += weights_BGXS.mT @ grad
        dscores_BGXS = weights_BGXS * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        dk_BGSK += dscores_BGXS.mT @ q
        dq_BHQK[:, :, tile] = (dscores_BGXS @ k).unflatten(2, (H // G, -1)).flatten(1, 2)
    return dq_BHQK, dk_BGSK, dv_BGSV
