"""The gate: which past blocks each query and head attends to beside its own.

The score of (query, block) is the product of the query, after rope and unscaled, with the mean of the
block's keys. Only complete blocks before the query's own compete. Everything is in fp32 or wider, and
in tiles of queries: a [blocks, H, T] tensor never exists.

Ties: the earlier block wins, and exactly `topk - 1` are picked wherever that many compete. Blocks of equal
means have equal scores.

Letters: T queries · S keys · H query heads · G key/value heads · R = H/G · K width · N complete blocks of
a document · J = topk - 1 places for past blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .grid import Document

#: Scores of one tile of queries, all heads and blocks.
_TILE_SCORES = 2**21
_TILE_QUERIES = 16, 1024


def select_blocks(q_THK: Tensor, k_SGK: Tensor, documents: Sequence[Document], block: int, places: int) -> Tensor:
    """int32 [T, H, J]: past blocks, counted from the document's first, best first; then -1.

    Args:
        q_THK: any float dtype; finite.
        k_SGK: H is a multiple of G.
        documents: others are left at -1.
        places: J.
    """
    blocks_THJ = torch.full((*q_THK.shape[:2], places), -1, dtype=torch.int32, device=q_THK.device)
    for doc in documents if places else ():
        means_NGK = block_means(k_SGK[doc.k : doc.k + doc.keys], block)
        rows = slice(doc.q, doc.q + doc.queries)
        _select(q_THK[rows], means_NGK, doc.offset, block, blocks_THJ[rows])
    return blocks_THJ


def block_means(k_SGK: Tensor, block: int) -> Tensor:
    """[N, G, K], means of the complete blocks of one document, in fp32 or wider."""
    N = k_SGK.shape[0] // block
    return k_SGK[: N * block].unflatten(0, (N, block)).mean(1, dtype=accumulation_dtype(k_SGK.dtype))


def _select(q_THK: Tensor, means_NGK: Tensor, offset: int, block: int, out_THJ: Tensor) -> None:
    """Of one document, whose first query has position `offset`."""
    (T, H, _), (N, G, _) = q_THK.shape, means_NGK.shape
    if not N:
        return
    means_GKN = means_NGK.permute(1, 2, 0).contiguous()
    twins_GN = _first_equal(means_NGK)
    low, high = _TILE_QUERIES
    tile = max(low, min(high, _TILE_SCORES // (H * N)))
    for start in range(0, T, tile):
        stop = min(T, start + tile)
        first, last = (offset + start) // block, min(N, (offset + stop - 1) // block)
        if not last:
            continue
        # The heads of a group score against one key/value head: rows are (query, head of the group).
        q_GXK = q_THK[start:stop].unflatten(1, (G, H // G)).movedim(1, 0).flatten(1, 2)
        scores_GXN = q_GXK.to(means_GKN.dtype) @ means_GKN[..., :last]
        if twins_GN is not None:
            scores_GXN = scores_GXN.gather(-1, twins_GN[:, None, :last].expand_as(scores_GXN))
        own_T = torch.arange(offset + start, offset + stop, device=q_THK.device) // block
        own_X = own_T.repeat_interleave(H // G)
        candidates = torch.arange(first, last, device=q_THK.device)
        scores_GXN[..., first:].masked_fill_(candidates >= own_X[:, None], float("-inf"))
        picked_GXJ = _best(scores_GXN, min(out_THJ.shape[-1], last))
        picked_GXJ = picked_GXJ.masked_fill(picked_GXJ >= own_X[:, None], -1)
        picked_THJ = picked_GXJ.unflatten(1, (stop - start, H // G)).movedim(0, 1).flatten(1, 2)
        out_THJ[start:stop, :, : picked_THJ.shape[-1]] = picked_THJ


def _first_equal(means_NGK: Tensor) -> Tensor | None:
    """int64 [G, N], the earliest block with the same mean; None where all differ.

    A product need not compute equal columns to equal bits, and the tie rule would be left to chance.
    """
    own_N = torch.arange(means_NGK.shape[0], device=means_NGK.device)
    found = []
    for means_NK in means_NGK.unbind(1):
        inverse_N = means_NK.unique(dim=0, return_inverse=True)[1]
        found.append(own_N.clone().scatter_reduce_(0, inverse_N, own_N, "amin", include_self=False)[inverse_N])
    twins_GN = torch.stack(found)
    return None if torch.equal(twins_GN, own_N.expand_as(twins_GN)) else twins_GN


def _best(scores_GXN: Tensor, count: int) -> Tensor:
    """Indices [G, X, count] of the highest scores, the lower index first among equals."""
    if count == scores_GXN.shape[-1]:
        return scores_GXN.sort(dim=-1, descending=True, stable=True).indices
    # topk breaks ties as it likes. They matter only where the last that is picked equals the first that is not.
    values, indices = scores_GXN.topk(count + 1, dim=-1)
    tied_GX = (values[..., -1] == values[..., -2]) & (values[..., -1] > float("-inf"))
    indices = indices[..., :count]
    if tied_GX.any():
        ordered = scores_GXN[tied_GX].sort(dim=-1, descending=True, stable=True).indices
        indices = indices.contiguous().index_put_((tied_GX,), ordered[:, :count])
    return indices
