"""The implementation "torch": dense attention over current blocks, and over the queries that picked each past block.

| step     | calls of the dense attention                                         | results                        |
|----------|----------------------------------------------------------------------|--------------------------------|
| current  | all current blocks (and short documents) of one size in one call     | out and lse of every query     |
| routed   | for each KV head and past block: the queries that picked the block   | merged into those rows         |
| backward | the same calls, each with the merged out and lse                     | contributions to dq, dk and dv |

Each routed call contains a row at most once. Merging one call at a time therefore needs no memory that grows with
top_k, and the order of additions never depends on threads: two runs give the same bits. Sums are in fp32 or wider and
are rounded once. KV heads are never repeated.

Letters: T queries · S keys · H query heads · G KV heads · R = H/G · K query and key width · V value width ·
J = the places for past blocks · X = T*R, the rows (query, query head) of one document that share a KV head ·
B attentions in one call · D any width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .boundaries import Document, sparse_documents
from .dense_attention import attend, attend_backward
from .dense_calls import DenseCall, dense_calls
from .routing import select_blocks

#: Rows per tile of a routed call. The kernel's backward divides heads among threads, but not rows, so the rows are
#: passed as tiles that read the same keys. The number does not depend on the threads, so neither do the results.
_TILE_ROWS = 512


def check(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor) -> None:
    """Does nothing, since this implementation runs everywhere. See `Implementation.check`."""


def forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    documents: Sequence[Document],
    block_size: int,
    top_k: int,
    places: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `Implementation.forward`."""
    out_THV, lse_TH = _current_forward(q_THK, k_SGK, v_SGV, documents, block_size, top_k, scale)
    sparse = sparse_documents(documents, block_size, top_k)
    blocks_THJ = select_blocks(q_THK, k_SGK, sparse, block_size, places)
    for doc in sparse:
        _routed_forward(q_THK, k_SGK, v_SGV, out_THV, lse_TH, blocks_THJ, doc, block_size, scale)
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
    block_size: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `Implementation.backward`."""
    saved = grad_THV, q_THK, k_SGK, v_SGV, out_THV, lse_TH
    grads = _current_backward(*saved, documents, block_size, top_k, scale)
    for doc in sparse_documents(documents, block_size, top_k):
        _routed_backward(*saved, blocks_THJ, *grads, doc, block_size, scale)
    return grads


def _swap(x_BTHD: Tensor) -> Tensor:
    """Swaps tokens and heads: x_BTHD <-> x_BHTD."""
    return x_BTHD.transpose(1, 2)


def _current_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    documents: Sequence[Document],
    block_size: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns out_THV and lse_TH. `out` is in fp32 or wider if anything will be merged into it."""
    (T, H, _), wide = q_THK.shape, accumulation_dtype(q_THK.dtype)
    calls = dense_calls(documents, block_size, top_k)

    def run(call: DenseCall, causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = call.queries_of(q_THK), call.keys_of(k_SGK), call.keys_of(v_SGV)
        out, lse = attend(_swap(q), _swap(k), _swap(v), causal, scale)
        return _swap(out), _swap(lse)

    if len(calls.causal) == 1 and calls.causal[0].is_all(T, T):
        out, lse = run(calls.causal[0], True)
        out_THV, lse_TH = out.flatten(0, 1).contiguous(), lse.flatten(0, 1).contiguous()
        if calls.past or not all(doc.is_dense(block_size, top_k) for doc in documents):
            out_THV = out_THV.to(wide)
    else:
        out_THV, lse_TH = q_THK.new_empty(T, H, v_SGV.shape[-1], dtype=wide), q_THK.new_empty(T, H, dtype=wide)
        for call in calls.causal:
            out, lse = run(call, True)
            call.queries_of(out_THV).copy_(out)
            call.queries_of(lse_TH).copy_(lse)
    for call in calls.past:
        _merge_(call.queries_of(out_THV), call.queries_of(lse_TH), *run(call, False))
    return out_THV, lse_TH


def _merge_(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merges attention to more keys into out [..., V] and lse [...], in place."""
    out.lerp_(more.to(out.dtype), torch.sigmoid(more_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, more_lse))


def _current_backward(
    grad_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    documents: Sequence[Document],
    block_size: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of all q, k and v, in fp32 or wider if anything will be added to them."""
    T, S, wide = q_THK.shape[0], k_SGK.shape[0], accumulation_dtype(q_THK.dtype)
    calls = dense_calls(documents, block_size, top_k)

    def run(call: DenseCall, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, out, lse = (_swap(call.queries_of(x)) for x in (grad_THV, q_THK, out_THV, lse_TH))
        k, v = (_swap(call.keys_of(x)) for x in (k_SGK, v_SGV))
        dq, dk, dv = attend_backward(grad, q, k, v, out, lse, causal, scale)
        return _swap(dq), _swap(dk), _swap(dv)

    todo = [(call, True) for call in calls.causal] + [(call, False) for call in calls.past]
    if todo and todo[0][0].is_all(T, S):
        dq, dk, dv = (x.flatten(0, 1).contiguous() for x in run(*todo.pop(0)))
        if todo or not all(doc.is_dense(block_size, top_k) for doc in documents):
            dq, dk, dv = dq.to(wide), dk.to(wide), dv.to(wide)
    else:
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q_THK, k_SGK, v_SGV))
    for call, causal in todo:
        more = run(call, causal)
        for to, x in zip((call.queries_of(dq), call.keys_of(dk), call.keys_of(dv)), more, strict=True):
            to.add_(x)
    return dq, dk, dv


def _routed_forward(
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    blocks_THJ: Tensor,
    doc: Document,
    block_size: int,
    scale: float,
) -> None:
    """Merges the attention of one document's queries to the blocks that they picked into `out` and `lse`."""
    rows_of_doc = slice(doc.q, doc.q + doc.queries)
    for kv_head, heads in _query_heads(q_THK, k_SGK):
        q_XK, out_XV, lse_X = (_head_rows(x[rows_of_doc, heads]) for x in (q_THK, out_THV, lse_TH))
        for keys, rows in _picked_blocks(blocks_THJ[rows_of_doc, heads], doc, block_size):
            k, v = (_one_head(x[keys, kv_head], len(rows)) for x in (k_SGK, v_SGV))
            more, more_lse = attend(_gather(q_XK, rows), k, v, False, scale)
            out, lse = _gather(out_XV, rows), _gather(lse_X, rows)
            _merge_(out, lse, more, more_lse)
            out_XV.index_copy_(0, rows.flatten(), out.flatten(0, 2))
            lse_X.index_copy_(0, rows.flatten(), lse.flatten())
        for to, x in ((out_THV, out_XV), (lse_TH, lse_X)):
            to[rows_of_doc, heads].copy_(x[:-1].unflatten(0, (doc.queries, -1)))


def _routed_backward(
    grad_THV: Tensor,
    q_THK: Tensor,
    k_SGK: Tensor,
    v_SGV: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    blocks_THJ: Tensor,
    dq_THK: Tensor,
    dk_SGK: Tensor,
    dv_SGV: Tensor,
    doc: Document,
    block_size: int,
    scale: float,
) -> None:
    """Adds the contributions of the same calls to the gradients `dq`, `dk` and `dv`."""
    rows_of_doc = slice(doc.q, doc.q + doc.queries)
    for kv_head, heads in _query_heads(q_THK, k_SGK):
        of_rows = [_head_rows(x[rows_of_doc, heads]) for x in (grad_THV, q_THK, out_THV, lse_TH)]
        dq_XK = _head_rows(dq_THK[rows_of_doc, heads])
        for keys, rows in _picked_blocks(blocks_THJ[rows_of_doc, heads], doc, block_size):
            k, v = (_one_head(x[keys, kv_head], len(rows)) for x in (k_SGK, v_SGV))
            grad, q, out, lse = (_gather(x, rows) for x in of_rows)
            dq, dk, dv = attend_backward(grad, q, k, v, out, lse, False, scale)
            dq_XK.index_add_(0, rows.flatten(), dq.flatten(0, 2).to(dq_XK.dtype))
            for to, x in ((dk_SGK, dk), (dv_SGV, dv)):
                to[keys, kv_head].add_(x.sum((0, 1), dtype=to.dtype))
        dq_THK[rows_of_doc, heads].copy_(dq_XK[:-1].unflatten(0, (doc.queries, -1)))


def _query_heads(q_THK: Tensor, k_SGK: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields every KV head with the query heads that read it."""
    G = k_SGK.shape[1]
    R = q_THK.shape[1] // G
    for kv_head in range(G):
        yield kv_head, slice(kv_head * R, (kv_head + 1) * R)


def _picked_blocks(blocks_TRJ: Tensor, doc: Document, block_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yields (keys, rows) for every block that any row of one KV head picked, with the rows in rising order.

    The rows are int64 [tiles, rows of a tile]. They index X. The last tile is padded with the spare row, which follows
    the last row.
    """
    T, R, J = blocks_TRJ.shape
    picked, order = blocks_TRJ.reshape(-1).sort(stable=True)
    rows_of_places = order.div_(J, rounding_mode="floor")
    ends = torch.bincount(picked + 1).cumsum(0).tolist()  # places without a block come first
    for n, (start, end) in enumerate(itertools.pairwise(ends)):
        if end > start:
            tiles = max(1, (end - start) // _TILE_ROWS)
            rows = F.pad(rows_of_places[start:end], (0, (start - end) % tiles), value=T * R)
            yield slice(doc.k + n * block_size, doc.k + (n + 1) * block_size), rows.view(tiles, -1)


def _head_rows(x_TRD: Tensor) -> Tensor:
    """Copies the rows to [X + 1, D]. The spare last row is zero, so that it adds nothing to any gradient."""
    out = x_TRD.new_zeros(x_TRD.shape[0] * x_TRD.shape[1] + 1, *x_TRD.shape[2:])
    out[:-1].view(x_TRD.shape).copy_(x_TRD)
    return out


def _gather(x_XD: Tensor, rows: Tensor) -> Tensor:
    """Returns [tiles, 1 head, rows of a tile, D]."""
    return x_XD.index_select(0, rows.flatten()).unflatten(0, (rows.shape[0], 1, rows.shape[1]))


def _one_head(x_SD: Tensor, tiles: int) -> Tensor:
    """Returns a view [tiles, 1 head, S, D], the same keys for all tiles."""
    return x_SD.expand(tiles, 1, *x_SD.shape)
