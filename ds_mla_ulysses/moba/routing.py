"""The gate, which picks the past blocks that each query and head attends to.

The score of a query and a block is the product of the query, after RoPE and without `scale`, with the mean of the
block's keys. Only complete blocks before the query's current block compete. Scores are computed in fp32 or wider, and
in tiles of queries, so that a tensor [blocks, H, T] never exists.

If two blocks have equal scores, the earlier one wins, and exactly `top_k - 1` blocks are picked if that many compete.
Blocks with equal means have equal scores.

Letters: T queries (in `_select`, those of a document or of a tile) · S keys · H query heads · G KV heads · R = H/G ·
K query and key width · N complete blocks of a document · X = T*R, the rows (query, query head) that share a KV head ·
J = places for past blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .boundaries import Document

#: The number of scores in one tile of queries, over all heads and blocks.
_TILE_SCORES = 2**21
#: The fewest and the most queries in a tile.
_TILE_QUERIES = 16, 1024


def select_blocks(q_THK: Tensor, k_SGK: Tensor, documents: Sequence[Document], block_size: int, places: int) -> Tensor:
    """Returns int32 [T, H, J]: past blocks, numbered from the beginning of the document, best first, then -1.

    Args:
        q_THK: finite, in any float dtype.
        k_SGK: in the dtype of q. H is a multiple of G.
        documents: the documents whose queries pick blocks. All other queries get -1.
        places: J.
    """
    blocks_THJ = torch.full((*q_THK.shape[:2], places), -1, dtype=torch.int32, device=q_THK.device)
    for doc in documents if places else ():
        means_NGK = block_means(k_SGK[doc.k : doc.k + doc.keys], block_size)
        rows = slice(doc.q, doc.q + doc.queries)
        _select(q_THK[rows], means_NGK, doc.offset, block_size, blocks_THJ[rows])
    return blocks_THJ


def block_means(k_SGK: Tensor, block_size: int) -> Tensor:
    """Returns [N, G, K]: the means of the complete blocks of one document, in fp32 or wider."""
    N = k_SGK.shape[0] // block_size
    return k_SGK[: N * block_size].unflatten(0, (N, block_size)).mean(1, dtype=accumulation_dtype(k_SGK.dtype))


def _select(q_THK: Tensor, means_NGK: Tensor, offset: int, block_size: int, out_THJ: Tensor) -> None:
    """Writes the picked blocks of one document to `out`. The first query has position `offset`."""
    (T, H, _), (N, G, _) = q_THK.shape, means_NGK.shape
    if not N:
        return
    R = H // G
    means_GKN = means_NGK.permute(1, 2, 0).contiguous()
    twins_GN = _first_equal(means_NGK)
    low, high = _TILE_QUERIES
    tile = max(low, min(high, _TILE_SCORES // (H * N)))
    for start in range(0, T, tile):
        stop = min(T, start + tile)
        first, last = (offset + start) // block_size, min(N, (offset + stop - 1) // block_size)
        if not last:
            continue
        q_GXK = q_THK[start:stop].unflatten(1, (G, R)).movedim(1, 0).flatten(1, 2)
        scores_GXN = q_GXK.to(means_GKN.dtype) @ means_GKN[..., :last]
        if twins_GN is not None:
            scores_GXN = scores_GXN.gather(-1, twins_GN[:, None, :last].expand_as(scores_GXN))
        current_T = torch.arange(offset + start, offset + stop, device=q_THK.device) // block_size
        current_X = current_T.repeat_interleave(R)
        candidates = torch.arange(first, last, device=q_THK.device)
        scores_GXN[..., first:].masked_fill_(candidates >= current_X[:, None], float("-inf"))
        picked_GXJ = _best(scores_GXN, min(out_THJ.shape[-1], last))
        picked_GXJ = picked_GXJ.masked_fill(picked_GXJ >= current_X[:, None], -1)
        picked_THJ = picked_GXJ.unflatten(1, (stop - start, R)).movedim(0, 1).flatten(1, 2)
        out_THJ[start:stop, :, : picked_THJ.shape[-1]] = picked_THJ


def _first_equal(means_NGK: Tensor) -> Tensor | None:
    """Returns int64 [G, N], for each block the earliest block with the same mean, or None if all means differ.

    A matrix product may compute different bits for equal columns, which would leave ties to chance.
    """
    index_N = torch.arange(means_NGK.shape[0], device=means_NGK.device)
    found = []
    for means_NK in means_NGK.unbind(1):
        inverse_N = means_NK.unique(dim=0, return_inverse=True)[1]
        found.append(index_N.clone().scatter_reduce_(0, inverse_N, index_N, "amin", include_self=False)[inverse_N])
    twins_GN = torch.stack(found)
    return None if torch.equal(twins_GN, index_N.expand_as(twins_GN)) else twins_GN


def _best(scores_GXN: Tensor, count: int) -> Tensor:
    """Returns [G, X, count]: the indices of the highest scores. Of equal scores, the lower index comes first."""
    if count == scores_GXN.shape[-1]:
        return scores_GXN.sort(dim=-1, descending=True, stable=True).indices
    # torch.topk breaks ties arbitrarily. That matters only if the last picked score equals the first one not picked.
    values, indices = scores_GXN.topk(count + 1, dim=-1)
    tied_GX = (values[..., -1] == values[..., -2]) & (values[..., -1] > float("-inf"))
    indices = indices[..., :count]
    if tied_GX.any():
        ordered = scores_GXN[tied_GX].sort(dim=-1, descending=True, stable=True).indices
        indices = indices.contiguous().index_put_((tied_GX,), ordered[:, :count])
    return indices
