"""MoBA for documents in one row of tokens and for plain batches.

Every query attends to its own block, causally, and beside it to the `moba_topk - 1` complete past blocks of
its document with the highest scores: the product of the query, as it comes in (after rope, unscaled), with the
mean of the block's keys, which is computed in fp32 or wider. A query head scores the keys that it reads. Of
equal scores the earlier block wins. No gradient goes through the choice. Where `moba_topk` blocks cover a
document, this is dense causal attention.

Letters: T queries · S keys · B batch · H query heads · G key/value heads, H a multiple of G · K query/key
width · V value width · J = moba_topk - 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import flash, operators
from .config import check_blocks, check_implementation
from .grid import read_documents, seen_by_queries
from .kernels import has_flash
from .reference import reference_attention
from .routing import select_blocks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def choose_implementation(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> str:
    """The implementation that runs: `name` itself, or what "auto" stands for on the device.

    "auto" is "flash" in bf16 and fp16 where torch has flash attention for the device, a GPU, and "torch" everywhere
    else: on a CPU that is dense calls of torch's flash operator, on other devices plain matmuls.

    Raises:
        ValueError: an unknown name.
    """
    check_implementation(name)
    if name != "auto":
        return name
    narrow = dtype in (torch.bfloat16, torch.float16)
    return "flash" if narrow and flash.is_available(torch.device(device)) else "torch"


def moba_attn_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    moba_chunk_size: int,
    moba_topk: int,
    *,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    implementation: str = "torch",
) -> Tensor:
    """MoBA over documents that lie one after the other. The positional arguments are those of Moonshot's function.

    "torch" and "triton" give the same bits whenever they are called with the same values; "flash" does so in backward
    under `torch.use_deterministic_algorithms(True)`.

    Args:
        q: [T, H, K], fp64, fp32, bf16 or fp16.
        k: [S, G, K], the dtype of q.
        v: [S, G, V], the dtype of q.
        cu_seqlens: int32 or int64 [documents + 1], from 0 to S: where documents begin and end. Documents may
            be empty. None: one document. A tensor on a device costs a synchronisation.
        max_seqlen: an upper bound of the documents' lengths, which may spare memory; None: S.
        moba_chunk_size: tokens per block.
        moba_topk: blocks per query and head, its own one counted.
        cu_seqlens_q: the same for the queries, where they are only the last ones of each document (decoding,
            prefill in chunks). None: one query per key, or, without cu_seqlens, the last T of S.
        scale: of the scores in the softmax; None: K ** -0.5.
        implementation: "auto" or one of `IMPLEMENTATIONS`; see `choose_implementation`.

    Returns:
        [T, H, V], contiguous.

    Backward: gradients of q, k and v, in fp32 or wider until they are rounded once.

    Source: arXiv 2502.13189.

    Raises:
        ValueError: inputs that do not fit, an unknown implementation.
    """
    check_blocks(moba_chunk_size, moba_topk)
    implementation = choose_implementation(implementation, q.device, q.dtype)
    _check_tensors(q, k, v)
    cu_q, cu_k = _boundaries(q.shape[0], k.shape[0], cu_seqlens, cu_seqlens_q)
    longest = k.shape[0] if max_seqlen is None else int(max_seqlen)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if implementation == "reference":
        documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0], longest)
        return reference_attention(q, k, v, documents, moba_chunk_size, moba_topk, scale)
    is_dense = cu_seqlens is None and q.shape[0] == k.shape[0] <= moba_chunk_size * moba_topk
    if implementation == "torch" and is_dense and not has_flash(q.device):
        return _dense(q[None], k[None], v[None], scale)[0]
    # No document that needs the gate: no places for what it would pick.
    places = 0 if moba_topk * moba_chunk_size >= min(longest, k.shape[0]) else moba_topk - 1
    return operators.MoBAAttention.apply(
        q, k, v, cu_q, cu_k, longest, moba_chunk_size, moba_topk, places, scale, implementation
    )


def moba_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    moba_chunk_size: int,
    moba_topk: int,
    *,
    cu_seqlens: Tensor | None = None,
    first_query: int | None = None,
    scale: float | None = None,
    implementation: str = "torch",
) -> Tensor:
    """MoBA over a batch of whole rows, of which the queries may be a part: [B, T, H, V].

    Otherwise as `moba_attn_varlen`. Give it views of [B, heads, S, width] as they are: it copies them only
    where B > 1.

    Args:
        cu_seqlens: int32 or int64 [documents + 1], boundaries of documents among all B*S keys, one row after the
            other. None: each row is a document.
        first_query: the place of the first query among the keys of its row. None: the queries are the last T of S.
    """
    for name, x in (("q", q_BTHK), ("k", k_BSGK), ("v", v_BSGV)):
        if x.ndim != 4 or x.shape[0] != q_BTHK.shape[0]:
            raise ValueError(f"{name} must be [batch, tokens, heads, width] of one batch, got {tuple(x.shape)}.")
    (B, T), S = q_BTHK.shape[:2], k_BSGK.shape[1]
    first = S - T if first_query is None else first_query
    if T > S:
        raise ValueError(f"each row has {T} queries but {S} keys: give all keys so far.")
    if not 0 <= first <= S - T:
        raise ValueError(f"queries {first}..{first + T} are not among {S} keys: see first_query.")
    settings = {"scale": scale, "implementation": implementation}
    if cu_seqlens is None and B == 1:
        flat = q_BTHK[0], k_BSGK[0, : first + T], v_BSGV[0, : first + T]
        return moba_attn_varlen(*flat, None, None, moba_chunk_size, moba_topk, **settings).unsqueeze(0)
    if cu_seqlens is None:
        cu_k = torch.arange(B + 1) * S
    else:
        _check_boundaries("cu_seqlens", cu_seqlens)
        cu_k = cu_seqlens
    q_THK, cu_q = q_BTHK.flatten(0, 1), None
    if T == S:
        k_SGK, v_SGV = k_BSGK.flatten(0, 1), v_BSGV.flatten(0, 1)
    else:
        rows, cu_q, cu_k = seen_by_queries(cu_k.tolist(), B, T, S, first)
        k_SGK, v_SGV = (_rows(x, rows) for x in (k_BSGK, v_BSGV))
    out = moba_attn_varlen(q_THK, k_SGK, v_SGV, cu_k, None, moba_chunk_size, moba_topk, cu_seqlens_q=cu_q, **settings)
    return out.unflatten(0, (B, T))


def _rows(x_BSGD: Tensor, rows: list[slice]) -> Tensor:
    """Some tokens of each row, one row after the other."""
    parts = [x_SGD[part] for x_SGD, part in zip(x_BSGD, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def moba_select(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    moba_chunk_size: int,
    moba_topk: int,
    *,
    cu_seqlens_q: Tensor | None = None,
) -> Tensor:
    """The past blocks that each query takes beside its own: int32 [T, H, J], rising, then -1 where fewer.

    Blocks are counted from the document's first. Arguments and errors as those of `moba_attn_varlen`. Where scores are
    equal but for rounding, "triton", which multiplies in another order, may choose otherwise.
    """
    check_blocks(moba_chunk_size, moba_topk)
    _check_tensors(q, k, k)
    cu_q, cu_k = _boundaries(q.shape[0], k.shape[0], cu_seqlens, cu_seqlens_q)
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0])
    with torch.autocast(q.device.type, enabled=False):
        blocks_THJ = select_blocks(q, k, documents, moba_chunk_size, moba_topk - 1)
    none = torch.iinfo(torch.int32).max
    ordered_THJ = blocks_THJ.masked_fill(blocks_THJ < 0, none).sort(-1).values
    return ordered_THJ.masked_fill(ordered_THJ == none, -1)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (
        q.ndim == k.ndim == v.ndim == 3
        and k.shape[:2] == v.shape[:2]
        and q.shape[-1] == k.shape[-1]
        and min(q.shape[1:]) > 0
        and min(v.shape[1:]) > 0
    ):
        batched = ": flatten a batch into tokens" if max(q.ndim, k.ndim, v.ndim) == 4 else ""
        raise ValueError(f"q must be [T, H, K], k [S, G, K] and v [S, G, V], {shapes}{batched}.")
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"query heads must be a multiple of key/value heads, {shapes}.")
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must be of one dtype, fp64, fp32, bf16 or fp16, got q {q.dtype}, k {k.dtype}, v {v.dtype}."
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}.")


def _boundaries(T: int, S: int, cu_k: Tensor | None, cu_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both cu_seqlens on the CPU, as copies: a caller may change his in place before backward."""
    for name, cu in (("cu_seqlens", cu_k), ("cu_seqlens_q", cu_q)):
        if cu is not None:
            _check_boundaries(name, cu)
    if cu_k is None:
        if cu_q is not None:
            raise ValueError("cu_seqlens_q was given without cu_seqlens: give both, or neither for one document.")
        return torch.tensor([0, T]), torch.tensor([0, S])
    if cu_q is None:
        if T != S:
            raise ValueError(f"got {T} queries and {S} keys: say with cu_seqlens_q which documents the queries end.")
        cu_q = cu_k
    return tuple(cu.to("cpu", torch.int64, copy=True) for cu in (cu_q, cu_k))


def _check_boundaries(name: str, cu: object) -> None:
    if not isinstance(cu, Tensor) or cu.ndim != 1 or cu.dtype not in (torch.int32, torch.int64):
        got = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, Tensor) else type(cu).__name__
        raise ValueError(f"{name} must be an int32 or int64 tensor [documents + 1], got {got}.")


def _dense(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    """[B, S, H, V], plain causal attention."""
    # Of unequal widths, SDPA would make all scores at once.
    V, width = v_BSGV.shape[-1], max(q_BSHK.shape[-1], v_BSGV.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGV))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[..., :V].contiguous()
