"""Dense attention that also returns each row's log-sum-exp (lse), and the gradients from a merged output and lse.

If `out` and `lse` come from one call, `attend_backward` returns the gradients of that call. If they are merged over
several calls that share queries, it returns that call's contribution to the gradients of the merged result.

Letters: B attentions in one call · H query heads · G KV heads (H is a multiple of G) · R = H/G · Q queries ·
S keys · X = R*Q, the rows of all query heads that share a KV head · K query and key width · V value width ·
D any width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype

_aten = torch.ops.aten
#: The number of scores in one tile of queries, when plain matmuls compute them.
_TILE_SCORES = 2**26


def has_flash(device: torch.device) -> bool:
    """Returns whether the device has a flash operator that returns the lse and takes a merged one.

    `attend` uses plain matmuls on all other devices.
    """
    return device.type == "cpu"


def attend(q_BHQK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out_BHQV, and lse_BHQ in fp32 or wider.

    There must be at least one query and one key. Causal attention needs as many keys as queries.
    """
    assert q_BHQK.shape[2] > 0 and k_BGSK.shape[2] > 0, "the CPU operator crashes the process without queries"
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
    """Returns the gradients of q, k and v in their dtype or wider. `out` and `lse` may be merged over several calls."""
    if not has_flash(q_BHQK.device):
        return _plain_backward(grad_BHQV, q_BHQK, k_BGSK, v_BGSV, out_BHQV, lse_BHQ, causal, scale)
    K, V = q_BHQK.shape[-1], v_BGSV.shape[-1]
    grad, q, k, v, out = _one_width(grad_BHQV, q_BHQK, k_BGSK, v_BGSV, out_BHQV)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse_BHQ, 0.0, causal, scale=scale
    )
    return dq[..., :K], dk[..., :K], dv[..., :V]


def _one_width(*tensors: Tensor) -> list[Tensor]:
    """Pads all tensors to one width, as the operator requires. Zeros change neither the scores nor the kept columns."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def _tiles(B: int, H: int, Q: int, S: int) -> list[slice]:
    rows = max(1, _TILE_SCORES // (B * H * S))
    return [slice(start, min(Q, start + rows)) for start in range(0, Q, rows)]


def _future(tile: slice, S: int, device: torch.device) -> Tensor:
    queries = torch.arange(tile.start, tile.stop, device=device)
    return torch.arange(S, device=device) > queries[:, None]


def _by_kv_head(x_BHQD: Tensor, G: int, tile: slice, dtype: torch.dtype) -> Tensor:
    """Returns x_BGXD: the rows of all query heads that share a KV head."""
    return x_BHQD[:, :, tile].to(dtype).unflatten(1, (G, -1)).flatten(2, 3)


def _scores(q_BGXK: Tensor, k_BGSK: Tensor, R: int, tile: slice, causal: bool, scale: float) -> Tensor:
    scores_BGXS = q_BGXK @ k_BGSK.mT * scale
    if causal:
        S = k_BGSK.shape[2]
        scores_BGXS.unflatten(2, (R, -1)).masked_fill_(_future(tile, S, scores_BGXS.device), float("-inf"))
    return scores_BGXS


def _plain_forward(q_BHQK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    (B, H, Q, _), (_, G, S, V) = q_BHQK.shape, v_BGSV.shape
    wide = accumulation_dtype(q_BHQK.dtype)
    k, v = k_BGSK.to(wide), v_BGSV.to(wide)
    # The memory layout is that of the flash operator: tokens before heads.
    out_BHQV = q_BHQK.new_empty(B, Q, H, V).transpose(1, 2)
    lse_BHQ = q_BHQK.new_empty(B, Q, H, dtype=wide).transpose(1, 2)
    for tile in _tiles(B, H, Q, S):
        scores_BGXS = _scores(_by_kv_head(q_BHQK, G, tile, wide), k, H // G, tile, causal, scale)
        lse_BGX = scores_BGXS.logsumexp(-1)
        out_BGXV = (scores_BGXS - lse_BGX.unsqueeze(-1)).exp() @ v
        out_BHQV[:, :, tile] = out_BGXV.unflatten(2, (H // G, -1)).flatten(1, 2)
        lse_BHQ[:, :, tile] = lse_BGX.unflatten(2, (H // G, -1)).flatten(1, 2)
    return out_BHQV, lse_BHQ


def _plain_backward(
    grad_BHQV: Tensor,
    q_BHQK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    out_BHQV: Tensor,
    lse_BHQ: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, Q, K), (_, G, S, _) = q_BHQK.shape, v_BGSV.shape
    wide = accumulation_dtype(q_BHQK.dtype)
    k, v = k_BGSK.to(wide), v_BGSV.to(wide)
    dq_BHQK = q_BHQK.new_empty(B, Q, H, K, dtype=wide).transpose(1, 2)
    dk_BGSK, dv_BGSV = torch.zeros_like(k), torch.zeros_like(v)
    for tile in _tiles(B, H, Q, S):
        q, grad, out = (_by_kv_head(x, G, tile, wide) for x in (q_BHQK, grad_BHQV, out_BHQV))
        lse_BGX = lse_BHQ[:, :, tile].unflatten(1, (G, -1)).flatten(2, 3)
        weights_BGXS = (_scores(q, k, H // G, tile, causal, scale) - lse_BGX.unsqueeze(-1)).exp()
        dv_BGSV += weights_BGXS.mT @ grad
        dscores_BGXS = weights_BGXS * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        dk_BGSK += dscores_BGXS.mT @ q
        dq_BHQK[:, :, tile] = (dscores_BGXS @ k).unflatten(2, (H // G, -1)).flatten(1, 2)
    return dq_BHQK, dk_BGSK, dv_BGSV
