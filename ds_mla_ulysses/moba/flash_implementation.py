"""The implementation "flash": MoBA on a GPU with the flash attention that comes with torch.

| step     | calls of the varlen operator                                           | results                        |
|----------|------------------------------------------------------------------------|--------------------------------|
| current  | all current blocks and dense documents of all heads in one causal call | out and lse of every query     |
| routed   | one call for each KV head: each block with the rows that picked it     | merged into those rows         |
| backward | the same calls, each with the merged out and lse                       | contributions to dq, dk and dv |

The operators are torch's own, `_flash_attention_forward` and `_flash_attention_backward`, with whichever kernels torch
was told to use for them (`torch.nn.attention.activate_flash_attention_impl`). flash-attn need not be installed, and
results do not depend on whether it is. Each call returns its results in q's dtype. They are merged and added in fp32,
in an order that depends on nothing but the arguments, and are rounded once. KV heads are never repeated.

Two runs give the same bits in forward. In backward, the kernel adds up dq in any order, unless
`torch.use_deterministic_algorithms(True)` is set.

The host waits for the device once in forward and once in backward, for the number of rows that picked each block, if
any document is sparse. The gate waits, too: see `routing`.

Letters: T queries · S keys · H query heads · G KV heads · R = H/G · K query and key width · V value width ·
W the width that the operator sees · J = the places for past blocks · U documents · C complete blocks of all sparse
documents · N segments of a call · X = T*R, the rows (query, query head) that share a KV head · P pairs of such a row
and a block that it picked, in the order of the blocks · D any width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesValueError
from .boundaries import Document, sparse_documents
from .routing import select_blocks

_aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256
#: The operator reads 16 bytes at a time, so widths and strides must be multiples of this many elements.
_ALIGNED = 8
#: Segments are a dimension of the kernel's launch grid, which is limited to this many.
_MOST_SEGMENTS = 65535


# Only the next three functions and `_DTYPES` depend on the operator.


def is_available(device: torch.device) -> bool:
    """Returns whether torch's varlen flash operators run on the device."""
    return (
        device.type == "cuda"
        and torch.version.hip is None  # its lse has another memory layout
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def varlen_forward(
    q_THW: Tensor,
    k_SGW: Tensor,
    v_SGW: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Returns out_THW, and lse_HT in fp32.

    Every segment must have queries and keys. If causal, the last query of a segment attends up to its last key.
    """
    out, lse, *_ = _aten._flash_attention_forward(
        q_THW, k_SGW, v_SGW, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
    )
    return out, lse


def varlen_backward(
    grad_THW: Tensor,
    q_THW: Tensor,
    k_SGW: Tensor,
    v_SGW: Tensor,
    out_THW: Tensor,
    lse_HT: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v in their dtype. `out` and `lse` may be merged over several calls."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_THW.device)
    return _aten._flash_attention_backward(
        grad_THW, q_THW, k_SGW, v_SGW, out_THW, lse_HT, cu_q, cu_k, max_q, max_k, 0.0, causal,
        no_dropout, no_dropout, scale=scale,
    )  # fmt: skip


def check(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor) -> None:
    """Implements `Implementation.check`."""
    if q_THK.dtype not in _DTYPES:
        raise UlyssesValueError(f"implementation 'flash' runs in bf16 and fp16, got {q_THK.dtype}: choose 'torch'.")
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    if max(K, V) > _WIDEST:
        raise UlyssesValueError(
            f"implementation 'flash' supports head widths up to {_WIDEST}, got q and k {K}, v {V}: choose 'torch'."
        )
    if not is_available(q_THK.device):
        raise UlyssesValueError(
            "implementation 'flash' needs an NVIDIA GPU of compute capability 8.0 or higher and a torch with flash "
            f"attention, got tensors on {q_THK.device}: choose 'torch'."
        )


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
    (T, H, _), V, wide = q_THK.shape, v_SGV.shape[-1], accumulation_dtype(q_THK.dtype)
    sparse = sparse_documents(documents, block_size, top_k)
    blocks_THJ = select_blocks(q_THK, k_SGK, sparse, block_size, places)
    if not T:
        return q_THK.new_empty(0, H, V), q_THK.new_empty(0, H, dtype=wide), blocks_THJ
    q, k, v = _operands(q_THK, k_SGK, v_SGV)
    current = _current_segments(documents, block_size, top_k, q.device)
    out, lse_HT = varlen_forward(q, current.of(k), current.of(v), *current.bounds, True, scale)
    out_THV, lse_TH = out[..., :V].to(wide if sparse else out.dtype).contiguous(), lse_HT.t().contiguous()
    for kv_head in _kv_heads(blocks_THJ, k.shape[1], sparse, block_size) if sparse else ():
        q_P1W, k_P1W, v_P1W = kv_head.rows(q), kv_head.keys(k), kv_head.keys(v)
        more, more_lse = varlen_forward(q_P1W, k_P1W, v_P1W, *kv_head.segments.bounds, False, scale)
        _merge_(out_THV[:, kv_head.query_heads], lse_TH[:, kv_head.query_heads], more[:, 0, :V], more_lse[0], kv_head)
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
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    sparse = sparse_documents(documents, block_size, top_k)
    wide = accumulation_dtype(q_THK.dtype) if sparse else q_THK.dtype
    dk_SGK, dv_SGV = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_SGK, v_SGV))
    if not len(q_THK):
        return torch.zeros_like(q_THK), dk_SGK, dv_SGV
    grad, q, k, v, out = _operands(grad_THV, q_THK, k_SGK, v_SGV, out_THV)

    current = _current_segments(documents, block_size, top_k, q.device)
    lse_HT = lse_TH.t().contiguous()
    dq, dk, dv = varlen_backward(grad, q, current.of(k), current.of(v), out, lse_HT, *current.bounds, True, scale)
    dq_THK = dq[..., :K].to(wide).contiguous()
    current.add_(dk_SGK, dk[..., :K])
    current.add_(dv_SGV, dv[..., :V])

    for kv_head in _kv_heads(blocks_THJ, k.shape[1], sparse, block_size) if sparse else ():
        grad_P1W, q_P1W, out_P1W, lse_P11 = (kv_head.rows(x) for x in (grad, q, out, lse_TH.unsqueeze(-1)))
        dq, dk, dv = varlen_backward(
            grad_P1W, q_P1W, kv_head.keys(k), kv_head.keys(v), out_P1W, lse_P11.view(1, -1),
            *kv_head.segments.bounds, False, scale,
        )  # fmt: skip
        for place_X, taken_X in zip(kv_head.place_XJ.unbind(1), kv_head.taken_XJ.unbind(1), strict=True):
            dq_XK = dq[:, 0, :K].index_select(0, place_X).masked_fill_(~taken_X.unsqueeze(1), 0)
            dq_THK[:, kv_head.query_heads] += kv_head.by_token(dq_XK)
        kv_head.segments.add_(dk_SGK[:, kv_head.index], dk[:, 0, :K])
        kv_head.segments.add_(dv_SGV[:, kv_head.index], dv[:, 0, :V])
    return dq_THK, dk_SGK, dv_SGV


def _operands(*tensors: Tensor) -> list[Tensor]:
    """Pads the tensors to one width, and copies those whose memory layout the operator cannot read.

    The padding is zeros, which change neither the scores nor the kept columns.
    """
    widest = max(x.shape[-1] for x in tensors)
    W = -(-widest // _ALIGNED) * _ALIGNED
    padded = (x if x.shape[-1] == W else F.pad(x, (0, W - x.shape[-1])) for x in tensors)
    return [x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in padded]


def _is_aligned(x_THW: Tensor) -> bool:
    return x_THW.data_ptr() % 16 == 0 and all(stride % _ALIGNED == 0 for stride in x_THW.stride()[:-1])


@dataclass(frozen=True)
class _Segments:
    """The segments of one call: in each, some queries attend to some keys.

    Attributes:
        bounds: the arguments cu_q, cu_k, max_q and max_k of the operator.
        where: the keys of the segments among all keys. It is a slice if they are consecutive. Otherwise it is their
            indices, since the operator does not support gaps between segments. (A segment without queries could
            cover a gap, but its keys would enlarge the kernel's launch grid. Besides, the kernel has a special path
            for grouped heads with one query in every segment.)
    """

    bounds: tuple[Tensor, Tensor, int, int]
    where: slice | Tensor

    @staticmethod
    def build(queries_N: Tensor, starts_N: Tensor, keys_N: Tensor, device: torch.device) -> _Segments:
        """Builds the segments from int64 tensors on the CPU.

        Args:
            queries_N: the number of queries, at least 1.
            starts_N: the index of the first key.
            keys_N: the number of keys, at least 1.
            device: the device of the result.
        """
        if len(queries_N) > _MOST_SEGMENTS:
            raise UlyssesValueError(
                f"implementation 'flash' supports at most {_MOST_SEGMENTS} blocks and dense documents in a call, got "
                f"{len(queries_N)}: choose a larger block_size, or 'torch'."
            )
        cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)) for x in (queries_N, keys_N))
        first, total = int(starts_N[0]), int(cu_k[-1])
        gaps_N = starts_N - cu_k[:-1]
        where: slice | Tensor
        if bool((gaps_N == first).all()):
            where = slice(first, first + total)
        else:
            gaps_S = _put(gaps_N, device).repeat_interleave(_put(keys_N, device), output_size=total)
            where = torch.arange(total, device=device) + gaps_S
        cu_q, cu_k = (_put(x.int(), device) for x in (cu_q, cu_k))
        return _Segments((cu_q, cu_k, int(queries_N.max()), int(keys_N.max())), where)

    def of(self, x_SGD: Tensor) -> Tensor:
        """Returns the keys of the segments: a view if they are consecutive."""
        return x_SGD[self.where] if isinstance(self.where, slice) else x_SGD.index_select(0, self.where)

    def add_(self, to_SD: Tensor, x_SD: Tensor) -> None:
        """Adds x, which belongs to the keys of the segments, to a tensor over all keys, in place."""
        if isinstance(self.where, slice):
            to_SD[self.where] += x_SD
        else:
            to_SD.index_add_(0, self.where, x_SD.to(to_SD.dtype))  # deterministic, since each key occurs once


def _current_segments(documents: Sequence[Document], block_size: int, top_k: int, device: torch.device) -> _Segments:
    """Returns the segments of current blocks and of whole dense documents.

    If the queries of a document begin inside a block, they attend to the block from its first key on.
    """
    fields = [(d.k, d.queries, d.keys, d.keys if d.is_dense(block_size, top_k) else block_size) for d in documents]
    k_U, queries_U, keys_U, step_U = torch.tensor(fields).unbind(1)
    offset_U = keys_U - queries_U
    first_U = offset_U // step_U
    count_U = (keys_U - 1) // step_U + 1 - first_U
    k_N, offset_N, keys_N, step_N = (x.repeat_interleave(count_U) for x in (k_U, offset_U, keys_U, step_U))
    start_N = (_within(count_U) + first_U.repeat_interleave(count_U)) * step_N
    stop_N = torch.minimum(start_N + step_N, keys_N)
    return _Segments.build(stop_N - torch.maximum(start_N, offset_N), k_N + start_N, stop_N - start_N, device)


def _put(x: Tensor, device: torch.device) -> Tensor:
    """Copies to the device without waiting for its pending work."""
    return x.to(device, non_blocking=True)


def _within(count_U: Tensor) -> Tensor:
    """Returns 0 .. count - 1 of each document, one after the other."""
    return torch.arange(int(count_U.sum())) - (count_U.cumsum(0) - count_U).repeat_interleave(count_U)


@dataclass(frozen=True)
class _KVHead:
    """One KV head: the blocks that its rows picked, with those rows.

    Attributes:
        index: the index of the KV head.
        query_heads: the query heads that read it.
        segments: the picked blocks as keys, and the P pairs as queries.
        row_P: int64, the row of each pair.
        place_XJ: int64, the pair of each row and place, or 0 if the place holds no block.
        taken_XJ: bool, whether the place holds a block.
    """

    index: int
    query_heads: slice
    segments: _Segments
    row_P: Tensor
    place_XJ: Tensor
    taken_XJ: Tensor

    def rows(self, x_THD: Tensor) -> Tensor:
        """Returns the rows of all pairs, [P, 1, D]."""
        return x_THD[:, self.query_heads].flatten(0, 1).index_select(0, self.row_P).unsqueeze(1)

    def keys(self, x_SGD: Tensor) -> Tensor:
        """Returns the keys of the segments, [keys, 1, D]."""
        return self.segments.of(x_SGD[:, self.index : self.index + 1])

    def by_token(self, x_XD: Tensor) -> Tensor:
        """Returns a view [T, R, D]."""
        return x_XD.unflatten(0, (-1, self.query_heads.stop - self.query_heads.start))


def _kv_heads(blocks_THJ: Tensor, G: int, sparse: Sequence[Document], block_size: int) -> Iterator[_KVHead]:
    """Yields every KV head. Each has a pair, since the last query of a sparse document always picks a block."""
    (T, H, J), device = blocks_THJ.shape, blocks_THJ.device
    R = H // G
    if T * R * J >= 2**31:
        raise UlyssesValueError(
            f"implementation 'flash' counts pairs of a row and a block in int32, got {T} queries of {R} heads with "
            f"{J} past blocks each: choose 'torch', or pass fewer queries at a time."
        )
    k_U, complete_U = torch.tensor([(doc.k, doc.keys // block_size) for doc in sparse]).unbind(1)
    starts_C = k_U.repeat_interleave(complete_U) + _within(complete_U) * block_size
    base_T11 = _first_blocks(sparse, complete_U, T, device).view(-1, 1, 1)
    edges = torch.arange(len(starts_C) + 1, dtype=torch.int32, device=device)

    orders, ends_GC = [], []
    for blocks_TRJ in blocks_THJ.unflatten(1, (G, R)).unbind(1):
        # From here on, blocks are numbered over all documents. Places without a block come first.
        picked, order = torch.where(blocks_TRJ < 0, -1, blocks_TRJ + base_T11).flatten().sort(stable=True)
        ends_GC.append(torch.searchsorted(picked, edges))
        orders.append(order.int())
    for head, ends_C in enumerate(torch.stack(ends_GC).cpu()):
        rows_C = ends_C.diff()
        used_N = rows_C.nonzero().flatten()
        segments = _Segments.build(rows_C[used_N], starts_C[used_N], torch.full_like(used_N, block_size), device)
        order_P = orders[head][int(ends_C[0]) :].long()
        place_XJ = torch.full((T * R * J,), -1, device=device)
        place_XJ = place_XJ.index_copy_(0, order_P, torch.arange(len(order_P), device=device)).view(-1, J)
        row_P = order_P.div(J, rounding_mode="floor")
        query_heads = slice(head * R, (head + 1) * R)
        yield _KVHead(head, query_heads, segments, row_P, place_XJ.clamp(min=0), place_XJ >= 0)


def _first_blocks(sparse: Sequence[Document], complete_U: Tensor, T: int, device: torch.device) -> Tensor:
    """Returns int32 [T]: the number of the first block of each query's document, or any number if it is not sparse."""
    first_U = _put(F.pad((complete_U.cumsum(0) - complete_U).int(), (1, 0)), device)
    starts_U = _put(torch.tensor([doc.q for doc in sparse]), device)
    return first_U.index_select(0, torch.searchsorted(starts_U, torch.arange(T, device=device), right=True))


def _merge_(out_TRV: Tensor, lse_TR: Tensor, more_PV: Tensor, more_lse_P: Tensor, kv_head: _KVHead) -> None:
    """Merges the attention to the picked blocks into `out` and `lse`, in place."""
    more_lse_XJ = more_lse_P[kv_head.place_XJ].masked_fill_(~kv_head.taken_XJ, float("-inf"))
    current_lse_X = lse_TR.flatten()
    lse_X = torch.cat([current_lse_X.unsqueeze(1), more_lse_XJ], 1).logsumexp(1)
    out_TRV *= kv_head.by_token((current_lse_X - lse_X).exp().unsqueeze(1))
    for place_X, more_lse_X in zip(kv_head.place_XJ.unbind(1), more_lse_XJ.unbind(1), strict=True):
        weight_X1 = (more_lse_X - lse_X).exp().unsqueeze(1)
        out_TRV += kv_head.by_token(more_PV.index_select(0, place_X) * weight_X1)
    lse_TR.copy_(kv_head.by_token(lse_X))
