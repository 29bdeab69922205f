"""The implementation "torch": dense kernels over own blocks and over the queries that each past block got.

| step    | calls of the dense kernel                                        | results                        |
|---------|------------------------------------------------------------------|--------------------------------|
| own     | all own blocks (and short documents) of one size in one call     | every query's out and lse      |
| routed  | per key/value head and past block: the queries that picked it    | merged into those rows         |
| backward| the same calls, each with the merged out and lse                 | its part of dq, dk and dv      |

A group of routed queries holds each row once, so merging a group at a time needs no memory that grows with
topk, and nothing is added in an order that threads decide: two runs give the same bits. Sums are in fp32 or
wider and are rounded once. Key/value heads are never repeated.

Letters: T queries · S keys · H query heads · G key/value heads · R = H/G · K query/key width · V value width ·
J = topk - 1 places for past blocks · X rows of one key/value head, (query, head of its group).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .grid import Document, plan, sparse_documents
from .kernels import attend, attend_backward
from .routing import select_blocks

#: Rows per tile of a group. The kernel's backward shares heads between threads but not rows, so a group is passed
#: as tiles that read the same keys. The number is the same whatever the threads: so are the results.
_TILE_ROWS = 512


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """It runs everywhere."""


def forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    documents: Sequence[Document],
    block: int,
    topk: int,
    places: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `operators` wants it of an implementation."""
    out_THV, lse_TH = _own_forward(q_THK, k_SGK, v_SGV, documents, block, topk, scale)
    sparse = sparse_documents(documents, block, topk)
    blocks_THJ = select_blocks(q_THK, k_SGK, sparse, block, places)
    for doc in sparse:
        _routed_forward(q_THK, k_SGK, v_SGV, out_THV, lse_TH, blocks_THJ, doc, block, scale)
    return out_THV, lse_TH, blocks_THJ


def backward(
    grad_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    blocks_THJ: Tensor,
    documents: Sequence[Document],
    block: int,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `operators` wants it of an implementation."""
    saved = grad_THV, q_THK, k_SGK, v_SGV, out_THV, lse_TH
    grads = _own_backward(*saved, documents, block, topk, scale)
    for doc in sparse_documents(documents, block, topk):
        _routed_backward(*saved, blocks_THJ, *grads, doc, block, scale)
    return grads


def _heads_first(x_BQHD: Tensor) -> Tensor:
    return x_BQHD.transpose(1, 2)


def _own_forward(q_THK, k_SGK, v_SGV, documents, block, topk, scale) -> tuple[Tensor, Tensor]:
    """out_THV, in fp32 or wider if anything is still to be merged into it; lse_TH."""
    (T, H, _), wide = q_THK.shape, accumulation_dtype(q_THK.dtype)
    pieces = plan(documents, block, topk)

    def call(piece, causal):
        q, k, v = piece.rows(q_THK), piece.columns(k_SGK), piece.columns(v_SGV)
        return map(_heads_first, attend(*map(_heads_first, (q, k, v)), causal, scale))

    if len(pieces.causal) == 1 and pieces.causal[0].is_all(T, T):
        out, lse = call(pieces.causal[0], True)
        out_THV, lse_TH = out.flatten(0, 1).contiguous(), lse.flatten(0, 1).contiguous()
        if pieces.past or not all(doc.is_dense(block, topk) for doc in documents):
            out_THV = out_THV.to(wide)
    else:
        out_THV, lse_TH = q_THK.new_empty(T, H, v_SGV.shape[-1], dtype=wide), q_THK.new_empty(T, H, dtype=wide)
        for piece in pieces.causal:
            for x, result in zip((out_THV, lse_TH), call(piece, True), strict=True):
                piece.rows(x).copy_(result)
    for piece in pieces.past:
        _merge_(piece.rows(out_THV), piece.rows(lse_TH), *call(piece, False))
    return out_THV, lse_TH


def _merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Makes out [..., V] and lse [...], attention to some keys, attention to those and more."""
    out.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def _own_backward(
    grad_THV, q_THK, k_SGK, v_SGV, out_THV, lse_TH, documents, block, topk, scale
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of all q, k and v, in fp32 or wider if anything is still to be added."""
    T, S, wide = q_THK.shape[0], k_SGK.shape[0], accumulation_dtype(q_THK.dtype)
    pieces = plan(documents, block, topk)

    def call(piece, causal):
        grad, q, out, lse = (_heads_first(piece.rows(x)) for x in (grad_THV, q_THK, out_THV, lse_TH))
        k, v = (_heads_first(piece.columns(x)) for x in (k_SGK, v_SGV))
        return map(_heads_first, attend_backward(grad, q, k, v, out, lse, causal, scale))

    calls = [(piece, True) for piece in pieces.causal] + [(piece, False) for piece in pieces.past]
    if calls and calls[0][0].is_all(T, S):
        dq, dk, dv = (x.flatten(0, 1).contiguous() for x in call(*calls.pop(0)))
        if calls or not all(doc.is_dense(block, topk) for doc in documents):
            dq, dk, dv = dq.to(wide), dk.to(wide), dv.to(wide)
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_THK, k_SGK, v_SGV))
    for piece, causal in calls:
        more = call(piece, causal)
        for to, x in zip((piece.rows(dq), piece.columns(dk), piece.columns(dv)), more, strict=True):
            to.add_(x)
    return dq, dk, dv


def _routed_forward(q_THK, k_SGK, v_SGV, out_THV, lse_TH, blocks_THJ, doc: Document, block, scale) -> None:
    """Merges what the queries of one document see of the blocks that they picked into `out` and `lse`."""
    mine = slice(doc.q, doc.q + doc.queries)
    for head, heads in _query_heads(q_THK, k_SGK):
        q_XK, out_XV, lse_X = (_head_rows(x[mine, heads]) for x in (q_THK, out_THV, lse_TH))
        for keys, rows in _groups(blocks_THJ[mine, heads], doc, block):
            k, v = (_one_head(x[keys, head], len(rows)) for x in (k_SGK, v_SGV))
            more, more_lse = attend(_gather(q_XK, rows), k, v, False, scale)
            out, lse = _gather(out_XV, rows), _gather(lse_X, rows)
            _merge_(out, lse, more, more_lse)
            out_XV.index_copy_(0, rows.flatten(), out.flatten(0, 2))
            lse_X.index_copy_(0, rows.flatten(), lse.flatten())
        for to, x in ((out_THV, out_XV), (lse_TH, lse_X)):
            to[mine, heads].copy_(x[:-1].unflatten(0, (doc.queries, -1)))


def _routed_backward(
    grad_THV, q_THK, k_SGK, v_SGV, out_THV, lse_TH, blocks_THJ, dq_THK, dk_SGK, dv_SGV, doc: Document, block, scale
) -> None:
    """Adds the part of the same calls to the gradients `dq`, `dk` and `dv`."""
    mine = slice(doc.q, doc.q + doc.queries)
    for head, heads in _query_heads(q_THK, k_SGK):
        of_rows = [_head_rows(x[mine, heads]) for x in (grad_THV, q_THK, out_THV, lse_TH)]
        dq_XK = _head_rows(dq_THK[mine, heads])
        for keys, rows in _groups(blocks_THJ[mine, heads], doc, block):
            k, v = (_one_head(x[keys, head], len(rows)) for x in (k_SGK, v_SGV))
            grad, q, out, lse = (_gather(x, rows) for x in of_rows)
            dq, dk, dv = attend_backward(grad, q, k, v, out, lse, False, scale)
            dq_XK.index_add_(0, rows.flatten(), dq.flatten(0, 2).to(dq_XK.dtype))
            for to, x in ((dk_SGK, dk), (dv_SGV, dv)):
                to[keys, head].add_(x.sum((0, 1), dtype=to.dtype))
        dq_THK[mine, heads].copy_(dq_XK[:-1].unflatten(0, (doc.queries, -1)))


def _query_heads(q_THK: Tensor, k_SGK: Tensor) -> Iterator[tuple[int, slice]]:
    """Every key/value head with the query heads that read it."""
    G = k_SGK.shape[1]
    R = q_THK.shape[1] // G
    for head in range(G):
        yield head, slice(head * R, (head + 1) * R)


def _groups(blocks_THJ: Tensor, doc: Document, block: int) -> Iterator[tuple[slice, Tensor]]:
    """The keys of every block that any row of one key/value head picked, with those rows X in order, in tiles.

    Tiles are [tiles, rows of a tile]; the last is filled up with the spare row, one past the last.
    """
    T, R, J = blocks_THJ.shape
    picked, order = blocks_THJ.reshape(-1).sort(stable=True)
    rows_X = order.div_(J, rounding_mode="floor")
    ends = torch.bincount(picked + 1).cumsum(0).tolist()  # places that hold no block come first
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            tiles = max(1, (end - start) // _TILE_ROWS)
            rows = F.pad(rows_X[start:end], (0, (start - end) % tiles), value=T * R)
            yield slice(doc.k + n * block, doc.k + (n + 1) * block), rows.view(tiles, -1)


def _head_rows(x_TRD: Tensor) -> Tensor:
    """[X + 1, D], a copy, and a spare row of zeros: as a query without gradient it adds nothing to any gradient."""
    out = x_TRD.new_zeros(x_TRD.shape[0] * x_TRD.shape[1] + 1, *x_TRD.shape[2:])
    out[:-1].view(x_TRD.shape).copy_(x_TRD)
    return out


def _gather(x_XD: Tensor, rows: Tensor) -> Tensor:
    """[tiles, 1 head, rows of a tile, D]"""
    return x_XD.index_select(0, rows.flatten()).unflatten(0, (rows.shape[0], 1, rows.shape[1]))


def _one_head(x_SD: Tensor, tiles: int) -> Tensor:
    """[tiles, 1 head, S, D], the same keys for all tiles."""
    return x_SD.expand(tiles, 1, *x_SD.shape)
