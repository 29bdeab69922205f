"""The implementation "flash": MoBA on a GPU by the flash attention that torch brings along.

| step    | calls of the varlen operator                                          | results                        |
|---------|-----------------------------------------------------------------------|--------------------------------|
| own     | all own blocks and dense documents of all heads in one causal call     | every query's out and lse      |
| routed  | one per key/value head: each block with the rows that picked it        | merged into those rows         |
| backward| the same calls, each with the merged out and lse                       | its part of dq, dk and dv      |

The operators are torch's own, `_flash_attention_forward` and `_flash_attention_backward`, whichever kernels torch
was told to use for them (`torch.nn.attention.activate_flash_attention_impl`): flash-attn need not be installed, and
results do not depend on whether it is. They give each call's results in q's dtype; merging and adding are in fp32,
in an order that depends on nothing but the arguments, and are rounded once. Key/value heads are never repeated.

Two runs give the same bits in forward. In backward the kernel adds up dq in any order, unless
`torch.use_deterministic_algorithms(True)` is set, which it obeys.

The host waits for the device once in forward and once in backward: for the sizes of the groups, where any document
is sparse. (The gate waits too: see `routing`.)

Letters: T queries · S keys · H query heads · G key/value heads · R = H/G · K query/key width · V value width ·
W the width that the operator sees · J = topk - 1 places for past blocks · D documents · N segments of a call, or
complete blocks of all sparse documents · X rows of one key/value head, (query, head of its group) · P pairs of such a
row and a block that it picked, by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from .grid import Document, sparse_documents
from .routing import select_blocks

_aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST = 256
#: The operator reads 16 bytes at a time: widths and strides are multiples of as many elements.
_ALIGNED = 8
#: A dimension of the kernel's grid counts segments.
_MOST_SEGMENTS = 65535


# The operator. These three, and `_DTYPES`, are all that knows of it.


def is_available(device: torch.device) -> bool:
    """Whether torch's varlen flash operators run there."""
    return (
        device.type == "cuda"
        and torch.version.hip is None  # lays log-sum-exp out otherwise
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
    """out_THW; lse_HT in fp32. Every segment has queries and keys; causal: its last query sees its last key."""
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
    """Gradients of q, k and v in their dtype. `out` and `lse` may be merged over several calls."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_THW.device)
    return _aten._flash_attention_backward(
        grad_THW, q_THW, k_SGW, v_SGW, out_THW, lse_HT, cu_q, cu_k, max_q, max_k, 0.0, causal,
        no_dropout, no_dropout, scale=scale,
    )  # fmt: skip


def check(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor) -> None:
    """As `operators` wants it of an implementation."""
    if q_THK.dtype not in _DTYPES:
        raise ValueError(f"implementation 'flash' runs in bf16 and fp16, got {q_THK.dtype}: choose 'torch'.")
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    if max(K, V) > _WIDEST:
        raise ValueError(
            f"implementation 'flash' takes heads up to {_WIDEST} wide, got q and k {K}, v {V}: choose 'torch'."
        )
    if not is_available(q_THK.device):
        raise ValueError(
            "implementation 'flash' needs an NVIDIA GPU of compute capability 8.0 or higher and a torch with flash "
            f"attention, got tensors on {q_THK.device}: choose 'torch'."
        )


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
    (T, H, _), V, wide = q_THK.shape, v_SGV.shape[-1], accumulation_dtype(q_THK.dtype)
    sparse = sparse_documents(documents, block, topk)
    blocks_THJ = select_blocks(q_THK, k_SGK, sparse, block, places)
    if not T:
        return q_THK.new_empty(0, H, V), q_THK.new_empty(0, H, dtype=wide), blocks_THJ
    q, k, v = _operands(q_THK, k_SGK, v_SGV)
    own = _own_segments(documents, block, topk, q.device)
    out, lse_HT = varlen_forward(q, own.of(k), own.of(v), *own.bounds, True, scale)
    out_THV, lse_TH = out[..., :V].to(wide if sparse else out.dtype).contiguous(), lse_HT.t().contiguous()
    for group in _groups(blocks_THJ, k.shape[1], sparse, block) if sparse else ():
        q_P1W, k_P1W, v_P1W = group.rows(q), group.keys(k), group.keys(v)
        more, more_lse = varlen_forward(q_P1W, k_P1W, v_P1W, *group.segments.bounds, False, scale)
        _merge_(out_THV[:, group.heads], lse_TH[:, group.heads], more[:, 0, :V], more_lse[0], group)
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
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    sparse = sparse_documents(documents, block, topk)
    wide = accumulation_dtype(q_THK.dtype) if sparse else q_THK.dtype
    dk_SGK, dv_SGV = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k_SGK, v_SGV))
    if not len(q_THK):
        return torch.zeros_like(q_THK), dk_SGK, dv_SGV
    grad, q, k, v, out = _operands(grad_THV, q_THK, k_SGK, v_SGV, out_THV)

    own = _own_segments(documents, block, topk, q.device)
    lse_HT = lse_TH.t().contiguous()
    dq, dk, dv = varlen_backward(grad, q, own.of(k), own.of(v), out, lse_HT, *own.bounds, True, scale)
    dq_THK = dq[..., :K].to(wide).contiguous()
    own.add_(dk_SGK, dk[..., :K])
    own.add_(dv_SGV, dv[..., :V])

    for group in _groups(blocks_THJ, k.shape[1], sparse, block) if sparse else ():
        of_rows = [group.rows(x) for x in (grad, q, out, lse_TH.unsqueeze(-1))]
        dq, dk, dv = varlen_backward(
            *of_rows[:2], group.keys(k), group.keys(v), of_rows[2], of_rows[3].view(1, -1),
            *group.segments.bounds, False, scale,
        )  # fmt: skip
        for place_X, taken_X in zip(group.place_XJ.unbind(1), group.taken_XJ.unbind(1), strict=True):
            dq_XK = dq[:, 0, :K].index_select(0, place_X).masked_fill_(~taken_X.unsqueeze(1), 0)
            dq_THK[:, group.heads] += group.by_token(dq_XK)
        group.segments.add_(dk_SGK[:, group.head], dk[:, 0, :K])
        group.segments.add_(dv_SGV[:, group.head], dv[:, 0, :V])
    return dq_THK, dk_SGK, dv_SGV


def _operands(*tensors: Tensor) -> list[Tensor]:
    """As the operator reads them: of one width, in which zeros change neither scores nor the columns that are kept."""
    widest = max(x.shape[-1] for x in tensors)
    W = -(-widest // _ALIGNED) * _ALIGNED
    padded = (x if x.shape[-1] == W else F.pad(x, (0, W - x.shape[-1])) for x in tensors)
    return [x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format) for x in padded]


def _is_aligned(x_THW: Tensor) -> bool:
    return x_THW.data_ptr() % 16 == 0 and all(stride % _ALIGNED == 0 for stride in x_THW.stride()[:-1])


@dataclass(frozen=True)
class _Segments:
    """Which queries see which keys in one call: boundaries, and where the keys are among all keys.

    `where` is a slice where the keys follow each other; else their indices, as the operator knows no gaps. (A segment
    without queries could cover a gap, but its keys would count in the grid of the kernel, and one query per segment
    has a path of its own under grouped heads, which wants one everywhere.)
    """

    bounds: tuple[Tensor, Tensor, int, int]
    where: slice | Tensor

    @staticmethod
    def build(queries_N: Tensor, starts_N: Tensor, keys_N: Tensor, device: torch.device) -> _Segments:
        """Of int64 tensors on the CPU: how many queries, the first key, how many keys; none of them empty."""
        if len(queries_N) > _MOST_SEGMENTS:
            raise ValueError(
                f"implementation 'flash' takes at most {_MOST_SEGMENTS} blocks and dense documents in a call, got "
                f"{len(queries_N)}: choose a larger moba_chunk_size, or 'torch'."
            )
        cu_q, cu_k = (F.pad(x.cumsum(0), (1, 0)) for x in (queries_N, keys_N))
        first, total = int(starts_N[0]), int(cu_k[-1])
        gaps_N = starts_N - cu_k[:-1]
        if bool((gaps_N == first).all()):
            where = slice(first, first + total)
        else:
            gaps_S = _put(gaps_N, device).repeat_interleave(_put(keys_N, device), output_size=total)
            where = torch.arange(total, device=device) + gaps_S
        cu_q, cu_k = (_put(x.int(), device) for x in (cu_q, cu_k))
        return _Segments((cu_q, cu_k, int(queries_N.max()), int(keys_N.max())), where)

    def of(self, x_SGD: Tensor) -> Tensor:
        """These keys of all; a view where they follow each other."""
        return x_SGD[self.where] if isinstance(self.where, slice) else x_SGD.index_select(0, self.where)

    def add_(self, to_SD: Tensor, x_SD: Tensor) -> None:
        """Adds what belongs to these keys."""
        if isinstance(self.where, slice):
            to_SD[self.where] += x_SD
        else:
            to_SD.index_add_(0, self.where, x_SD.to(to_SD.dtype))  # each key once: in any order the same


def _own_segments(documents: Sequence[Document], block: int, topk: int, device: torch.device) -> _Segments:
    """Own blocks and whole dense documents. Queries that begin inside a block see it from its start."""
    fields = [(d.k, d.queries, d.keys, d.keys if d.is_dense(block, topk) else block) for d in documents]
    k_D, queries_D, keys_D, step_D = torch.tensor(fields).unbind(1)
    offset_D = keys_D - queries_D
    first_D = offset_D // step_D
    count_D = (keys_D - 1) // step_D + 1 - first_D
    k_N, offset_N, keys_N, step_N = (x.repeat_interleave(count_D) for x in (k_D, offset_D, keys_D, step_D))
    start_N = (_within(count_D) + first_D.repeat_interleave(count_D)) * step_N
    stop_N = torch.minimum(start_N + step_N, keys_N)
    return _Segments.build(stop_N - torch.maximum(start_N, offset_N), k_N + start_N, stop_N - start_N, device)


def _put(x: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for what it has yet to do."""
    return x.to(device, non_blocking=True)


def _within(count_D: Tensor) -> Tensor:
    """0 .. count - 1 of each."""
    return torch.arange(int(count_D.sum())) - (count_D.cumsum(0) - count_D).repeat_interleave(count_D)


@dataclass(frozen=True)
class _Group:
    """One key/value head: the blocks that its rows picked, with those rows.

    Attributes:
        head: of keys and values.
        heads: query heads that read it.
        segments: its picked blocks; P pairs.
        row_P: int64, which row.
        place_XJ: int64, which pair; 0 where a row picked nothing.
        taken_XJ: where a row picked something.
    """

    head: int
    heads: slice
    segments: _Segments
    row_P: Tensor
    place_XJ: Tensor
    taken_XJ: Tensor

    def rows(self, x_THD: Tensor) -> Tensor:
        """[P, 1, D]"""
        return x_THD[:, self.heads].flatten(0, 1).index_select(0, self.row_P).unsqueeze(1)

    def keys(self, x_SGD: Tensor) -> Tensor:
        """[keys of the segments, 1, D]"""
        return self.segments.of(x_SGD[:, self.head : self.head + 1])

    def by_token(self, x_XD: Tensor) -> Tensor:
        """[T, R, D]"""
        return x_XD.unflatten(0, (-1, self.heads.stop - self.heads.start))


def _groups(blocks_THJ: Tensor, G: int, sparse: Sequence[Document], block: int) -> Iterator[_Group]:
    """Every key/value head; the last query of a sparse document always picks something."""
    (T, H, J), device = blocks_THJ.shape, blocks_THJ.device
    R = H // G
    if T * R * J >= 2**31:
        raise ValueError(
            f"implementation 'flash' counts pairs of a row and a block in int32, got {T} queries of {R} heads with "
            f"{J} past blocks each: choose 'torch', or give fewer queries at a time."
        )
    k_D, complete_D = torch.tensor([(doc.k, doc.keys // block) for doc in sparse]).unbind(1)
    starts_N = k_D.repeat_interleave(complete_D) + _within(complete_D) * block
    base_T11 = _first_blocks(sparse, complete_D, T, device).view(-1, 1, 1)
    edges = torch.arange(len(starts_N) + 1, dtype=torch.int32, device=device)

    orders_GP, ends_GN = [], []
    for blocks_TRJ in blocks_THJ.unflatten(1, (G, R)).unbind(1):
        # Blocks are numbered over all documents from here on. Places that hold none come first.
        numbered_P = torch.where(blocks_TRJ < 0, -1, blocks_TRJ + base_T11).flatten()
        picked_P, order_P = numbered_P.sort(stable=True)
        ends_GN.append(torch.searchsorted(picked_P, edges))
        orders_GP.append(order_P.int())
    for head, ends_N in enumerate(torch.stack(ends_GN).cpu()):
        rows_N = ends_N.diff()
        used_N = rows_N.nonzero().flatten()
        segments = _Segments.build(rows_N[used_N], starts_N[used_N], torch.full_like(used_N, block), device)
        order_P = orders_GP[head][int(ends_N[0]) :].long()
        place_XJ = torch.full((T * R * J,), -1, device=device)
        place_XJ = place_XJ.index_copy_(0, order_P, torch.arange(len(order_P), device=device)).view(-1, J)
        row_P = order_P.div(J, rounding_mode="floor")
        heads = slice(head * R, (head + 1) * R)
        yield _Group(head, heads, segments, row_P, place_XJ.clamp(min=0), place_XJ >= 0)


def _first_blocks(sparse: Sequence[Document], complete_D: Tensor, T: int, device: torch.device) -> Tensor:
    """int32 [T], the number of the first block of each query's document; anything where it is not sparse."""
    first_D = _put(F.pad((complete_D.cumsum(0) - complete_D).int(), (1, 0)), device)
    starts_D = _put(torch.tensor([doc.q for doc in sparse]), device)
    return first_D.index_select(0, torch.searchsorted(starts_D, torch.arange(T, device=device), right=True))


def _merge_(out_TRV: Tensor, lse_TR: Tensor, more_PV: Tensor, more_lse_P: Tensor, group: _Group) -> None:
    """Makes `out` and `lse` attention to what they were of and to the blocks that each row picked."""
    more_lse_XJ = more_lse_P[group.place_XJ].masked_fill_(~group.taken_XJ, float("-inf"))
    own_lse_X = lse_TR.flatten()
    lse_X = torch.cat([own_lse_X.unsqueeze(1), more_lse_XJ], 1).logsumexp(1)
    out_TRV *= group.by_token((own_lse_X - lse_X).exp().unsqueeze(1))
    for place_X, more_lse_X in zip(group.place_XJ.unbind(1), more_lse_XJ.unbind(1), strict=True):
        weight_X1 = (more_lse_X - lse_X).exp().unsqueeze(1)
        out_TRV += group.by_token(more_PV.index_select(0, place_X) * weight_X1)
    lse_TR.copy_(group.by_token(lse_X))
