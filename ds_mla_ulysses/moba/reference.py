"""The reference implementation: one boolean mask per document, and a softmax in fp32 or wider. It suits small inputs.

It shares no code with the fast implementations, not even the gate.

Letters: T queries · S keys · H query heads · G KV heads · R = H/G · K query and key width · V value width ·
C complete blocks of a document · N all blocks of a document, including an incomplete last one · J = top_k - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .boundaries import Document


def reference_attention(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    documents: Sequence[Document],
    block_size: int,
    top_k: int,
    scale: float,
    blocks_THJ: Tensor | None = None,
) -> Tensor:
    """Computes MoBA differentiably, out_THV in the dtype of q.

    Args:
        blocks_THJ: int, the past blocks that each query attends to (-1 for no block). They replace the choice of the
            gate, so that results can be compared although rounding made another gate choose differently. Dense
            documents need all of their past blocks, too.
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
        mask_THS = attention_mask(q.detach(), k.detach(), doc.offset, block_size, top_k, given)
        scores_THS = torch.einsum("thk,shk->ths", q, k) * scale
        weights_THS = scores_THS.masked_fill(~mask_THS, float("-inf")).softmax(-1)
        outs.append(torch.einsum("ths,shv->thv", weights_THS, v))
    if not outs:  # the result still has to depend on the inputs, for autograd
        return q_THK.new_zeros(0, q_THK.shape[1], v_SGV.shape[-1]) + (q_THK.sum() + k_SGK.sum() + v_SGV.sum())
    return torch.cat(outs).to(q_THK.dtype)


def attention_mask(
    q_THK: Tensor, k_SHK: Tensor, offset: int, block_size: int, top_k: int, blocks_THJ: Tensor | None = None
) -> Tensor:
    """Returns bool [T, H, S] for one document, True where a query attends to a key.

    Args:
        offset: the position of the first query in the document.
        blocks_THJ: as in `reference_attention`.
    """
    (T, H, _), S = q_THK.shape, k_SHK.shape[0]
    positions_T = torch.arange(offset, offset + T, device=q_THK.device)
    positions_S = torch.arange(S, device=q_THK.device)
    if blocks_THJ is None:
        blocks_THJ = chosen_blocks(q_THK, k_SHK, offset, block_size, top_k)
    N = -(-S // block_size)
    # There is one column more than blocks, which receives the -1.
    taken = torch.zeros(T, H, N + 1, dtype=torch.bool, device=q_THK.device)
    taken.scatter_(-1, blocks_THJ.long() % (N + 1), True)
    taken.scatter_(-1, (positions_T // block_size).view(T, 1, 1).expand(T, H, 1), True)
    causal_TS = positions_S <= positions_T[:, None]
    return taken[..., positions_S // block_size] & causal_TS[:, None]


def chosen_blocks(q_THK: Tensor, k_SHK: Tensor, offset: int, block_size: int, top_k: int) -> Tensor:
    """Returns int64 [T, H, J]: the past blocks with the highest scores, best first, then -1.

    If two blocks have equal scores, the earlier one wins.
    """
    T, H, _ = q_THK.shape
    C = k_SHK.shape[0] // block_size
    current_T = torch.arange(offset, offset + T, device=q_THK.device) // block_size
    out_THJ = torch.full((T, H, top_k - 1), -1, device=q_THK.device)
    if C == 0:
        return out_THJ
    means_CHK = torch.stack([k_SHK[n * block_size : (n + 1) * block_size].mean(0) for n in range(C)])
    scores_THC = torch.einsum("thk,chk->thc", q_THK, means_CHK)
    future_TC = torch.arange(C, device=q_THK.device) >= current_T[:, None]
    order_THC = (
        scores_THC.masked_fill(future_TC[:, None], float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    )
    best_THJ = order_THC[..., : top_k - 1]
    out_THJ[..., : best_THJ.shape[-1]] = best_THJ.masked_fill(best_THJ >= current_T[:, None, None], -1)
    return out_THJ
