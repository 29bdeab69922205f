"""The public functions of MoBA, for flattened documents and for batches.

Each query attends causally to its current block, and to the `top_k - 1` complete past blocks of its document with
the highest scores. The score of a block is the product of the query, as passed (after RoPE, without `scale`), with
the mean of the block's keys. Scores are computed in fp32 or wider, and each query head scores the keys of its own KV
head. If two blocks have equal scores, the earlier one wins. The choice of blocks carries no gradient. If `top_k`
blocks cover a document, its attention is dense causal attention.

Letters: B batch · T queries · S keys · H query heads · G KV heads (H is a multiple of G) · K query and key width ·
V value width · J = top_k - 1 · D any width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..comm.kept import attend_once
from ..errors import UlyssesTypeError, UlyssesValueError
from . import flash_implementation, operators
from .boundaries import read_documents, seen_by_queries
from .config import check_count, check_implementation
from .dense_attention import has_flash
from .reference import reference_attention
from .routing import select_blocks

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def choose_implementation(
    name: str = "auto", device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> str:
    """Returns the implementation that will run: `name` itself, or the one that "auto" stands for.

    "auto" stands for "flash" if the dtype is bf16 or fp16 and torch has flash attention for the device (a GPU), and
    for "torch" otherwise. "torch" calls torch's flash operator on a CPU, and plain matmuls on other devices.

    Raises:
        TypeError: the name is not a string.
        ValueError: the name is unknown.
    """
    check_implementation(name)
    if name != "auto":
        return name
    narrow = dtype in (torch.bfloat16, torch.float16)
    return "flash" if narrow and flash_implementation.is_available(torch.device(device)) else "torch"


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
    """Computes MoBA over documents that follow one another in flattened tokens.

    The positional arguments are those of Moonshot's function of the same name; everywhere else `moba_chunk_size` is
    called `block_size`, and `moba_topk` is called `top_k`.

    "torch" and "triton" return the same bits for the same arguments. "flash" does so in forward, and in backward
    under `torch.use_deterministic_algorithms(True)`.

    Args:
        q: [T, H, K], fp64, fp32, bf16 or fp16.
        k: [S, G, K], in the dtype of q.
        v: [S, G, V], in the dtype of q.
        cu_seqlens: int32 or int64 [documents + 1], rising from 0 to S: the boundaries of the documents, which may be
            empty. None means one document. A tensor on a device costs a synchronization.
        max_seqlen: an upper bound of the documents' lengths, which may save memory. None means S.
        moba_chunk_size: tokens per block.
        moba_topk: blocks that each query and head attends to, including the current block.
        cu_seqlens_q: the boundaries of the queries, if only the last queries of each document are passed (in decoding
            and incremental prefill). None means one query per key, or, without cu_seqlens, the last T of S.
        scale: multiplies the scores in the softmax. None means K ** -0.5.
        implementation: "auto" or one of `IMPLEMENTATIONS`: see `choose_implementation`.

    Returns:
        [T, H, V], contiguous.

    Backward: the gradients of q, k and v are summed in fp32 or wider and rounded once.

    Source: arXiv 2502.13189.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the inputs do not fit together, or the implementation is unknown or cannot run here.
    """
    check_count("moba_chunk_size", moba_chunk_size)
    check_count("moba_topk", moba_topk)
    return _attend(q, k, v, cu_seqlens, max_seqlen, moba_chunk_size, moba_topk, cu_seqlens_q, scale, implementation)


def moba_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    block_size: int,
    top_k: int,
    *,
    cu_seqlens: Tensor | None = None,
    first_query: int | None = None,
    scale: float | None = None,
    implementation: str = "torch",
) -> Tensor:
    """Computes MoBA over a batch of whole rows, for all of their queries or for a run of them.

    Views of [B, heads, S, width] can be passed as they are: they are copied only if B > 1.

    Args:
        q_BTHK, k_BSGK, v_BSGV: fp64, fp32, bf16 or fp16, all in one dtype.
        block_size: tokens per block.
        top_k: blocks that each query and head attends to, including the current block.
        cu_seqlens: int32 or int64 [documents + 1], the boundaries of the documents among all B*S keys, one row after
            the other. None means one document per row.
        first_query: the position of the first query in its row. None means that the queries are the last T of S.
        scale, implementation: as in `moba_attn_varlen`.

    Returns:
        [B, T, H, V].

    Backward: as `moba_attn_varlen`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the inputs do not fit together, or the implementation is unknown or cannot run here.
    """
    check_count("block_size", block_size)
    check_count("top_k", top_k)
    for name, x in (("q", q_BTHK), ("k", k_BSGK), ("v", v_BSGV)):
        _check_is_tensor(name, x)
        if x.ndim != 4 or x.shape[0] != q_BTHK.shape[0]:
            raise UlyssesValueError(f"{name} must be [batch, tokens, heads, width] of one batch, got {tuple(x.shape)}.")
    (B, T), S = q_BTHK.shape[:2], k_BSGK.shape[1]
    first = S - T if first_query is None else first_query
    if T > S:
        raise UlyssesValueError(f"each row has {T} queries but {S} keys: pass all keys up to the last query.")
    if not 0 <= first <= S - T:
        raise UlyssesValueError(f"queries {first}..{first + T} are not among {S} keys: see first_query.")
    if cu_seqlens is None and B == 1:
        flat = q_BTHK[0], k_BSGK[0, : first + T], v_BSGV[0, : first + T]
        return _attend(*flat, None, None, block_size, top_k, None, scale, implementation).unsqueeze(0)
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
        k_SGK, v_SGV = (_join(x, rows) for x in (k_BSGK, v_BSGV))
    out = _attend(q_THK, k_SGK, v_SGV, cu_k, None, block_size, top_k, cu_q, scale, implementation)
    return out.unflatten(0, (B, T))


def _join(x_BSGD: Tensor, rows: list[slice]) -> Tensor:
    """Joins one slice of each row, one row after the other."""
    parts = [x_SGD[part] for x_SGD, part in zip(x_BSGD, rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@torch.no_grad()
def moba_select(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    block_size: int,
    top_k: int,
    *,
    cu_seqlens_q: Tensor | None = None,
) -> Tensor:
    """Returns the past blocks that each query attends to in addition to its current block.

    "triton" sums scores in another order, so it may pick another block if two scores differ by rounding only.

    Args:
        q, k, cu_seqlens, cu_seqlens_q: as in `moba_attn_varlen`.
        block_size: tokens per block.
        top_k: blocks that each query and head attends to, including the current block.

    Returns:
        int32 [T, H, J], rising. Blocks are numbered from the beginning of the document. If a query has fewer than J
        past blocks, -1 fills the rest.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the inputs do not fit together.
    """
    check_count("block_size", block_size)
    check_count("top_k", top_k)
    _check_tensors(q, k, k)
    cu_q, cu_k = _boundaries(q.shape[0], k.shape[0], cu_seqlens, cu_seqlens_q)
    documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0])
    with torch.autocast(q.device.type, enabled=False):
        blocks_THJ = select_blocks(q, k, documents, block_size, top_k - 1)
    none = torch.iinfo(torch.int32).max
    ordered_THJ = blocks_THJ.masked_fill(blocks_THJ < 0, none).sort(-1).values
    return ordered_THJ.masked_fill(ordered_THJ == none, -1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    block_size: int,
    top_k: int,
    cu_seqlens_q: Tensor | None,
    scale: float | None,
    implementation: str,
) -> Tensor:
    """Computes `moba_attn_varlen` for a block_size and top_k that are checked already."""
    _check_tensors(q, k, v)
    implementation = choose_implementation(implementation, q.device, q.dtype)
    cu_q, cu_k = _boundaries(q.shape[0], k.shape[0], cu_seqlens, cu_seqlens_q)
    longest = k.shape[0] if max_seqlen is None else int(max_seqlen)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if implementation == "reference":
        documents = read_documents(cu_q, cu_k, q.shape[0], k.shape[0], longest)
        return attend_once(reference_attention, q, k, v, documents, block_size, top_k, scale)
    is_dense = cu_seqlens is None and q.shape[0] == k.shape[0] <= block_size * top_k
    if implementation == "torch" and is_dense and not has_flash(q.device):
        return attend_once(_dense, q[None], k[None], v[None], scale)[0]
    # Without a document that needs the gate, no memory is kept for picked blocks.
    places = 0 if top_k * block_size >= min(longest, k.shape[0]) else top_k - 1
    return operators.MoBAAttention.apply(q, k, v, cu_q, cu_k, longest, block_size, top_k, places, scale, implementation)


def _check_is_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise UlyssesTypeError(f"{name} must be a tensor, got {type(x).__name__}.")


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_is_tensor(name, x)
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not (
        q.ndim == k.ndim == v.ndim == 3
        and k.shape[:2] == v.shape[:2]
        and q.shape[-1] == k.shape[-1]
        and min(q.shape[1:]) > 0
        and min(v.shape[1:]) > 0
    ):
        batched = ": flatten a batch into tokens" if max(q.ndim, k.ndim, v.ndim) == 4 else ""
        raise UlyssesValueError(f"q must be [T, H, K], k [S, G, K] and v [S, G, V], {shapes}{batched}.")
    if q.shape[1] % k.shape[1]:
        raise UlyssesValueError(f"the number of query heads must be a multiple of the number of KV heads, {shapes}.")
    if q.dtype not in _DTYPES or not q.dtype == k.dtype == v.dtype:
        raise UlyssesValueError(
            f"q, k and v must have one dtype, fp64, fp32, bf16 or fp16, got q {q.dtype}, k {k.dtype}, v {v.dtype}."
        )
    if not q.device == k.device == v.device:
        raise UlyssesValueError(f"q, k and v must be on one device, got q {q.device}, k {k.device}, v {v.device}.")


def _boundaries(T: int, S: int, cu_k: Tensor | None, cu_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns copies of both cu_seqlens on the CPU, because callers may change theirs in place before backward."""
    for name, cu in (("cu_seqlens", cu_k), ("cu_seqlens_q", cu_q)):
        if cu is not None:
            _check_boundaries(name, cu)
    if cu_k is None:
        if cu_q is not None:
            raise UlyssesValueError(
                "cu_seqlens_q was given without cu_seqlens: pass both, or neither for one document."
            )
        return torch.tensor([0, T]), torch.tensor([0, S])
    if cu_q is None:
        if T != S:
            raise UlyssesValueError(
                f"got {T} queries and {S} keys: pass cu_seqlens_q, the boundaries of the documents' last queries."
            )
        cu_q = cu_k
    return cu_q.to("cpu", torch.int64, copy=True), cu_k.to("cpu", torch.int64, copy=True)


def _check_boundaries(name: str, cu: Any) -> None:
    if not isinstance(cu, Tensor):
        raise UlyssesTypeError(f"{name} must be an int32 or int64 tensor [documents + 1], got {type(cu).__name__}.")
    if cu.ndim != 1 or cu.dtype not in (torch.int32, torch.int64):
        raise UlyssesValueError(
            f"{name} must be an int32 or int64 tensor [documents + 1], got {cu.dtype} {tuple(cu.shape)}."
        )


def _dense(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, scale: float) -> Tensor:
    """Computes plain causal attention, out_BSHV."""
    # With unequal widths, SDPA would compute all scores at once: pad to one width.
    V, width = v_BSGV.shape[-1], max(q_BSHK.shape[-1], v_BSGV.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])).transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGV))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)[..., :V].contiguous()
