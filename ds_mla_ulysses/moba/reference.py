"""The oracle: MoBA as one boolean mask per document, and a softmax in fp32 or wider. For small inputs.

Shares no code with the fast path, not even the gate.

Letters: T queries · S keys · H query heads · G key/value heads · K query/key width · V value width ·
N blocks of a document, the incomplete last one counted · J = topk - 1 places for past blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .grid import Document


def reference_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    documents: Sequence[Document],
    block: int,
    topk: int,
    scale: float,
    blocks_THJ: Tensor | None = None,
) -> Tensor:
    """[T, H, V] in the dtype of q, differentiable.

    Args:
        blocks_THJ: int, which past blocks each query takes (-1: none), instead of the gate's choice. Lets
            results be compared where a rounded gate chooses differently. Dense documents need all of theirs too.
    """
    wide = torch.promote_types(q_THK.dtype, torch.float32)
    R = q_THK.shape[1] // k_SGK.shape[1]
    outs = []
    for doc in documents:
        rows, columns = slice(doc.q, doc.q + doc.queries), slice(doc.k, doc.k + doc.keys)
        q = q_THK[rows].to(wide)
        k = k_SGK[columns].to(wide).repeat_interleave(R, dim=1)
        v = v_SGV[columns].to(wide).repeat_interleave(R, dim=1)
        given = None if blocks_THJ is None else blocks_THJ[rows]
        mask_THS = attention_mask(q.detach(), k.detach(), doc.offset, block, topk, given)
        scores_THS = torch.einsum("thk,shk->ths", q, k) * scale
        weights_THS = scores_THS.masked_fill(~mask_THS, float("-inf")).softmax(-1)
        outs.append(torch.einsum("ths,shv->thv", weights_THS, v))
    if not outs:  # still a function of its inputs
        return q_THK.new_zeros(0, q_THK.shape[1], v_SGV.shape[-1]) + (q_THK.sum() + k_SGK.sum() + v_SGV.sum())
    return torch.cat(outs).to(q_THK.dtype)


def attention_mask(
    q_THK: Tensor, k_SHK: Tensor, offset: int, block: int, topk: int, blocks_THJ: Tensor | None = None
) -> Tensor:
    """bool [T, H, S] of one document, whose first query has position `offset`: True where a query attends."""
    (T, H, _), S = q_THK.shape, k_SHK.shape[0]
    positions_T = torch.arange(offset, offset + T, device=q_THK.device)
    positions_S = torch.arange(S, device=q_THK.device)
    if blocks_THJ is None:
        blocks_THJ = chosen_blocks(q_THK, k_SHK, offset, block, topk)
    N = -(-S // block)
    taken_THN = torch.zeros(T, H, N + 1, dtype=torch.bool, device=q_THK.device)
    taken_THN.scatter_(-1, blocks_THJ.long() % (N + 1), True)  # -1 is the last
    taken_THN.scatter_(-1, (positions_T // block).view(T, 1, 1).expand(T, H, 1), True)
    causal_TS = positions_S <= positions_T[:, None]
    return taken_THN[..., positions_S // block] & causal_TS[:, None]


def chosen_blocks(q_THK: Tensor, k_SHK: Tensor, offset: int, block: int, topk: int) -> Tensor:
    """int64 [T, H, J]: the past blocks with the highest scores, of equal ones the earlier; -1 where fewer compete."""
    T, H, _ = q_THK.shape
    complete = k_SHK.shape[0] // block
    own_T = torch.arange(offset, offset + T, device=q_THK.device) // block
    out_THJ = torch.full((T, H, topk - 1), -1, device=q_THK.device)
    if complete == 0:
        return out_THJ
    means_NHK = torch.stack([k_SHK[n * block : (n + 1) * block].mean(0) for n in range(complete)])
    scores_THN = torch.einsum("thk,nhk->thn", q_THK, means_NHK)
    future_TN = torch.arange(complete, device=q_THK.device) >= own_T[:, None]
    order_THN = (
        scores_THN.masked_fill(future_TN[:, None], float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    )
    best_THJ = order_THN[..., : topk - 1]
    out_THJ[..., : best_THJ.shape[-1]] = best_THJ.masked_fill(best_THJ >= own_T[:, None, None], -1)
    return out_THJ
