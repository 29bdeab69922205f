"""The implementation "triton": MoBA on Hopper GPUs. Tests run it elsewhere, in Triton's interpreter.

| step     | kernels                                                      | memory that grows with top_k          |
|----------|--------------------------------------------------------------|---------------------------------------|
| gate     | `pool`, `gate`                                               | the picked blocks, but no scores      |
| forward  | `routed_forward`, `current_forward`                          | partial out, at most `_PART_BYTES`    |
| backward | `row_products`, `routed_query`, `current_query`, `key_value` | partial dq, at most `_PART_BYTES`     |

Documents are divided into *segments*, consecutive keys with the queries that attend to them causally: a block of a
document with the queries inside it, or a whole document if it is dense. A *pair* is a (query, query head) with one of
the blocks that it picked. Pairs are sorted by KV head and block outside the kernels; nothing is read back from the
device. A partial result belongs to one pair, and its address follows from the number of the pair. The program that
computes a row sums the row's partial results in order of their places. There are no atomics, and two runs give the
same bits.

If the partial results of all pairs would take more than `_PART_BYTES`, the work is done in *portions*: the same problem
for some of the KV heads, or for some of the queries. dk and dv are then summed in fp32, portion by portion.

KV heads are never repeated: the rows of a tile are queries times the query heads that share a KV head.

Letters: T queries · S keys · H query heads · G KV heads · R = H/G · K query and key width · V value width ·
J = the places for past blocks · U documents · N segments · P pairs of a portion, including those without a block ·
D any width.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import UlyssesValueError
from .boundaries import Document, sparse_documents
from .routing import select_blocks

#: The memory for the partial results of a portion. At a width of 128 it holds four million pairs, enough work for any
#: GPU.
_PART_BYTES = 2**31
#: More places do not fit into the registers of the gate kernel. Then `routing` picks the blocks, by the same rules.
_GATE_PLACES = 64
#: The limits of the smallest tiles: the bytes of a key and its value, padded to powers of two, and the width of a key.
_ROW_BYTES, _KEY_WIDTH = 4608, 1024
_INT32 = 2**31


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def check(q_THK: Tensor, k_SGK: Tensor, v_SGV: Tensor) -> None:
    """Implements `Implementation.check`."""
    (T, H, K), (S, G, _), V = q_THK.shape, k_SGK.shape, v_SGV.shape[-1]
    device, dtype, instead = q_THK.device, q_THK.dtype, "choose 'torch'."
    if dtype == torch.float64:
        raise UlyssesValueError(
            f"implementation 'triton' sums in fp32 and supports fp32, bf16 and fp16, got {dtype}: {instead}"
        )
    if _row_bytes(q_THK, v_SGV) > _ROW_BYTES or K > _KEY_WIDTH:
        raise UlyssesValueError(
            f"implementation 'triton' does not support heads of widths {K} and {V} in {dtype}: {instead}"
        )
    if T * (H // G) >= _INT32 - 1024 or S >= _INT32 - 1024:
        raise UlyssesValueError(
            "implementation 'triton' counts tokens, times the query heads of a KV head, in 32 bits, got "
            f"q {tuple(q_THK.shape)}, k {tuple(k_SGK.shape)}: {instead}"
        )
    if importlib.util.find_spec("triton") is None:
        raise UlyssesValueError(f"implementation 'triton' needs the package triton, which is not installed: {instead}")
    interpreted = _kernels().INTERPRETED
    if device.type != "cuda" and not (interpreted and device.type == "cpu"):
        raise UlyssesValueError(
            "implementation 'triton' runs on CUDA devices, or slowly on a CPU if TRITON_INTERPRET=1 is set before the "
            f"first call, got tensors on {device}: {instead}"
        )
    if interpreted and dtype == torch.bfloat16:
        raise UlyssesValueError(
            f"Triton's interpreter (TRITON_INTERPRET=1) is wrong in bf16: use fp32 or fp16, or {instead}"
        )


def _on_its_device(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes the device of the first argument current, because Triton launches kernels on the current device."""

    @functools.wraps(function)
    def guarded(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return guarded


@_on_its_device
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
    kernels, (T, H, _), V = _kernels(), q_THK.shape, v_SGV.shape[-1]
    out_THV, lse_TH = q_THK.new_empty(T, H, V), q_THK.new_empty(T, H, dtype=torch.float32)
    segments = _Segments.of(documents, block_size, top_k)
    blocks_THJ = _select(kernels, q_THK, k_SGK, documents, segments, block_size, top_k, places)
    widths, sizes = _widths(q_THK, v_SGV), _forward_sizes(q_THK, v_SGV)
    for portion in segments.portions(q_THK, k_SGK, places, V):
        q, out, lse, blocks = (portion.rows(x) for x in (q_THK, out_THV, lse_TH, blocks_THJ))
        k, v = (x[:, portion.heads] for x in (k_SGK, v_SGV))
        cpu_table = portion.table(segments)
        table = _int32(cpu_table, q.device)
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        J = places if portion.routed else 0
        constants = {"R": portion.R, "J": J, **widths, "ROWS": sizes.rows, "STEP": sizes.keys, **sizes.options}
        part_PV, part_lse_P = _parts(q, J, V), _parts(q, J)
        if J:
            order = _Order.of(blocks, segments, portion)
            tiles = order.tiles(sizes.rows)
            kernels.routed_forward[(len(tiles),)](
                q, k, v, part_PV, part_lse_P, table, tiles, order.starts, order.pairs, *strides, scale,
                q.shape[1], len(cpu_table), **constants,
            )  # fmt: skip
        tiles = _query_tiles(cpu_table, portion.R, sizes.rows, q.device)
        if len(tiles):
            kernels.current_forward[(len(tiles), k.shape[1])](
                q, k, v, blocks, part_PV, part_lse_P, out, lse, table, tiles, *strides, scale, q.shape[1], H,
                **constants,
            )  # fmt: skip
    return out_THV, lse_TH, blocks_THJ


@_on_its_device
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
    kernels, (T, H, K), places = _kernels(), q_THK.shape, blocks_THJ.shape[-1]
    segments = _Segments.of(documents, block_size, top_k)
    widths, sizes = _widths(q_THK, v_SGV), _backward_sizes(q_THK, v_SGV)
    portions = list(segments.portions(q_THK, k_SGK, places, K))
    add = len({portion.tokens.start for portion in portions}) > 1  # whether dk and dv sum over portions
    dq_THK = q_THK.new_empty(T, H, K)
    # Keys of documents without queries are in no segment, so their gradients must be set to zero here.
    dk_SGK, dv_SGV = (
        torch.zeros(x.shape, dtype=torch.float32 if add else x.dtype, device=x.device) for x in (k_SGK, v_SGV)
    )
    delta_TH = _row_products(kernels, grad_THV, out_THV, widths)
    for portion in portions:
        rows = grad_THV, q_THK, lse_TH, delta_TH, blocks_THJ, dq_THK
        grad, q, lse, delta, blocks, dq = (portion.rows(x) for x in rows)
        k, v, dk, dv = (x[:, portion.heads] for x in (k_SGK, v_SGV, dk_SGK, dv_SGV))
        cpu_table = portion.table(segments)
        table = _int32(cpu_table, q.device)
        heads, N, G = q.shape[1], len(cpu_table), k.shape[1]
        strides = *grad.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        J = places if portion.routed else 0
        constants = {"R": portion.R, "J": J, **widths, **sizes.options}
        tile = {"ROWS": sizes.rows, "STEP": sizes.keys}
        part_PK, starts, pairs = _parts(q, J, K), table, table  # the kernels do not read the last two without pairs
        if J:
            order = _Order.of(blocks, segments, portion)
            tiles, starts, pairs = order.tiles(sizes.rows), order.starts, order.pairs
            kernels.routed_query[(len(tiles),)](
                grad, q, k, v, lse, delta, part_PK, table, tiles, starts, pairs, *strides, scale, heads, H, N,
                **constants, **tile,
            )  # fmt: skip
        tiles = _query_tiles(cpu_table, portion.R, sizes.rows, q.device)
        if len(tiles):
            kernels.current_query[(len(tiles), G)](
                grad, q, k, v, lse, delta, blocks, part_PK, dq, table, tiles, *strides, scale, heads, H,
                **constants, **tile,
            )  # fmt: skip
        tiles = _tiles(cpu_table[:, 4], sizes.keys, q.device)
        if len(tiles):
            kernels.key_value[(len(tiles), G)](
                grad, q, k, v, lse, delta, dk, dv, table, tiles, starts, pairs, *strides, scale, heads, H, N,
                **constants, KEYS=sizes.keys, STEP=sizes.rows, ADD=add,
            )  # fmt: skip
    return dq_THK, dk_SGK, dv_SGV


def _kernels() -> ModuleType:
    # The import is delayed, because the first import decides whether the kernels are interpreted.
    return importlib.import_module(".triton_kernels", __package__)


# Sizes of tiles. They depend on widths and dtype only, and not on timings, so that results are reproducible.


@dataclass(frozen=True)
class _Sizes:
    """The number of rows and keys of a tile, and the launch options."""

    rows: int
    keys: int
    options: dict[str, int]


def _forward_sizes(q_THK: Tensor, v_SGV: Tensor) -> _Sizes:
    """Returns the sizes for forward.

    A program holds its rows of q and of the output, and `num_stages` tiles of keys and values, in the 227 KiB of shared
    memory that Hopper has.
    """
    size = _row_bytes(q_THK, v_SGV)
    if size <= 640:  # 16 bits, 192 + 128
        return _Sizes(128, 64, {"num_warps": 8, "num_stages": 3})
    if size <= 1024:  # 16 bits, 256 + 256; 32 bits, 128 + 128
        return _Sizes(64, 64, {"num_warps": 8, "num_stages": 2})
    if size <= 1280:  # 32 bits, 192 + 128
        return _Sizes(64, 32, {"num_warps": 4, "num_stages": 2})
    if size <= 2560:  # 16 bits, 576 + 512
        return _Sizes(32, 32, {"num_warps": 8, "num_stages": 2})
    return _Sizes(16, 16, {"num_warps": 4, "num_stages": 1})


def _backward_sizes(q_THK: Tensor, v_SGV: Tensor) -> _Sizes:
    """Returns the sizes for backward.

    Rows come with their gradient, and `key_value` holds dk and dv in registers.
    """
    size = _row_bytes(q_THK, v_SGV)
    if size <= 640:
        return _Sizes(64, 64, {"num_warps": 8, "num_stages": 2})
    if size <= 1024:
        return _Sizes(64, 32, {"num_warps": 8, "num_stages": 2})
    if size <= 1280:
        return _Sizes(32, 32, {"num_warps": 4, "num_stages": 2})
    if size <= 2560:
        return _Sizes(32, 32, {"num_warps": 8, "num_stages": 1})
    return _Sizes(16, 16, {"num_warps": 4, "num_stages": 1})


def _row_bytes(q_THK: Tensor, v_SGV: Tensor) -> int:
    """Returns the bytes of a key and its value, padded to powers of two."""
    widths = _widths(q_THK, v_SGV)
    return (widths["K0"] + widths["K1"] + widths["V0"]) * q_THK.element_size()


def _widths(q_THK: Tensor, v_SGV: Tensor) -> dict[str, int]:
    """Returns the padded widths: K0 + K1 >= K and V0 >= V.

    All are powers of two and at least 16, the minimum of `tl.dot`, or K1 = 0.
    """
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    K0, K1 = _power(K), 0
    if K < K0 and _power(K - K0 // 2) < K0 // 2:
        K0, K1 = K0 // 2, _power(K - K0 // 2)
    return {"K": K, "K0": K0, "K1": K1, "V": V, "V0": _power(V)}


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


# The division of the work, on the CPU and without a loop over blocks.


@dataclass(frozen=True)
class _Segments:
    """The segments of all documents, in order.

    Attributes:
        table: int64 [N, 5], for each segment: the first query, the number of queries, the number of keys before the
            key at the first query's position, the first key, the number of keys.
        first_U: int64, the first segment of each document.
        queries_U: int64, the number of queries of each document.
        routed: whether any query may pick a block.
    """

    table: Tensor
    first_U: Tensor
    queries_U: Tensor
    routed: bool

    @classmethod
    def of(cls, documents: Sequence[Document], block_size: int, top_k: int) -> _Segments:
        rows = [(doc.q, doc.k, doc.queries, doc.keys) for doc in documents]
        q_U, k_U, queries_U, keys_U = torch.tensor(rows, dtype=torch.int64).view(-1, 4).unbind(1)
        size_U = torch.where(keys_U <= top_k * block_size, keys_U, block_size)  # keys of a segment
        count_U = (keys_U + size_U - 1) // size_U
        first_U = count_U.cumsum(0) - count_U
        doc_N = torch.repeat_interleave(count_U)
        size_N = size_U[doc_N]
        begin_N = (torch.arange(len(doc_N)) - first_U[doc_N]) * size_N
        end_N = torch.minimum(begin_N + size_N, keys_U[doc_N])
        offset_N = (keys_U - queries_U)[doc_N]
        first_query_N = torch.maximum(begin_N, offset_N)  # its position in the document
        columns = (
            q_U[doc_N] + first_query_N - offset_N,
            (end_N - first_query_N).clamp(min=0),
            first_query_N - begin_N,
            k_U[doc_N] + begin_N,
            end_N - begin_N,
        )
        routed = bool(sparse_documents(documents, block_size, top_k))
        return cls(torch.stack(columns, 1), first_U, queries_U, routed)

    def portions(self, q_THK: Tensor, k_SGK: Tensor, places: int, width: int) -> Iterator[_Portion]:
        """Yields portions of KV heads or, if the pairs of one KV head do not fit into `_PART_BYTES`, of queries."""
        (T, H, _), G = q_THK.shape, k_SGK.shape[1]
        R, routed = H // G, self.routed and places > 0
        heads, tokens = G, max(1, T)
        if routed and T:
            pairs = min(_PART_BYTES // (4 * width), _INT32 - 1)
            heads = max(1, min(G, pairs // (T * R * places)))
            tokens = max(1, min(T, pairs // (heads * R * places)))
        for g in range(0, G, heads):
            for t in range(0, T, tokens):
                yield _Portion(slice(t, min(T, t + tokens)), slice(g, min(G, g + heads)), R, routed)


@dataclass(frozen=True)
class _Portion:
    """A portion of the work: some queries (`tokens`) and some KV heads (`heads`)."""

    tokens: slice
    heads: slice
    R: int
    routed: bool

    def rows(self, x_THD: Tensor) -> Tensor:
        """Returns a view of the portion's queries and of the query heads that read its KV heads."""
        return x_THD[self.tokens, self.heads.start * self.R : self.heads.stop * self.R]

    def table(self, segments: _Segments) -> Tensor:
        """Returns the table of all segments with only the queries of the portion, counted from its first query."""
        q_N, queries_N, past_N, k_N, keys_N = segments.table.unbind(1)
        begin_N = q_N.clamp(min=self.tokens.start)
        end_N = (q_N + queries_N).clamp(max=self.tokens.stop)
        columns = begin_N - self.tokens.start, (end_N - begin_N).clamp(min=0), past_N + begin_N - q_N, k_N, keys_N
        return torch.stack(columns, 1)


def _query_tiles(table: Tensor, R: int, rows: int, device: torch.device) -> Tensor:
    """Returns tiles of queries, the last first: in a long document they see the most keys and should start early."""
    return _tiles(table[:, 1] * R, rows, device).flip(0)


def _tiles(counts_N: Tensor, size: int, device: torch.device) -> Tensor:
    """Divides `count` items of each segment into tiles of `size` items.

    Returns:
        int32 [tiles, 2] on the device: the segment, and the first item of the tile.
    """
    tiles_N = (counts_N + size - 1) // size
    segment = torch.repeat_interleave(tiles_N)
    first = (torch.arange(len(segment)) - (tiles_N.cumsum(0) - tiles_N)[segment]) * size
    return _int32(torch.stack((segment, first), 1), device)


def _int32(x: Tensor, device: torch.device) -> Tensor:
    # CUDA has read memory that is not pinned when the call returns, so the source may be freed.
    return x.int().to(device, non_blocking=True)


@dataclass(frozen=True)
class _Order:
    """The pairs of a portion, sorted by KV head and segment. All pairs of one KV head and segment are a *bucket*.

    Attributes:
        pairs: int64 [P] on the device, the sorted pairs. Pairs without a block come last.
        starts: int64 [buckets + 1] on the device, the index of the first pair of each bucket.
    """

    pairs: Tensor
    starts: Tensor

    @classmethod
    def of(cls, blocks_THJ: Tensor, segments: _Segments, portion: _Portion) -> _Order:
        device, N = blocks_THJ.device, len(segments.table)
        heads = portion.heads.stop - portion.heads.start
        buckets = heads * N
        assert buckets < _INT32, "the segments of a portion are counted in 32 bits"
        first_U, queries_U = _int32(segments.first_U, device), _int32(segments.queries_U, device)
        all_queries = int(segments.queries_U.sum())
        first_T = first_U.repeat_interleave(queries_U, output_size=all_queries)[portion.tokens]
        blocks_TGRJ = blocks_THJ.unflatten(1, (heads, portion.R))
        first_G = torch.arange(0, buckets, N, device=device, dtype=torch.int32)
        bucket_TGRJ = blocks_TGRJ + (first_T[:, None] + first_G)[:, :, None, None]
        bucket_TGRJ.masked_fill_(blocks_TGRJ < 0, buckets)
        bucket_P, pairs = bucket_TGRJ.flatten().sort(stable=True)
        starts = torch.searchsorted(bucket_P, torch.arange(buckets + 1, device=device, dtype=torch.int32))
        return cls(pairs, starts)

    def tiles(self, size: int) -> Tensor:
        """Divides the pairs of each bucket into tiles of `size` pairs.

        Returns:
            int32 [tiles, 2]: the bucket, and the index of the tile's first pair. There are more tiles than needed,
            since their exact number is known on the device only. Surplus tiles have a bucket beyond the last one.
        """
        buckets, P = len(self.starts) - 1, len(self.pairs)
        tiles = (self.starts.diff() + size - 1) // size
        ends = tiles.cumsum(0)
        i = torch.arange(P // size + min(buckets, P), device=ends.device)
        bucket = torch.searchsorted(ends, i, right=True)
        inside = bucket.clamp(max=buckets - 1)
        first = self.starts[inside] + (i - (ends - tiles)[inside]) * size
        return torch.stack((bucket, first), 1).int()


def _parts(q_THK: Tensor, J: int, *width: int) -> Tensor:
    """Allocates partial results in fp32, [P, width]. Only pairs with a block write theirs."""
    return q_THK.new_empty(q_THK.shape[0] * q_THK.shape[1] * J, *width, dtype=torch.float32)


def _row_products(kernels: ModuleType, grad_THV: Tensor, out_THV: Tensor, widths: dict[str, int]) -> Tensor:
    """Returns delta_TH in fp32: the product of each row of the output with its gradient."""
    T, H, _ = grad_THV.shape
    delta_TH, rows = grad_THV.new_empty(T, H, dtype=torch.float32), 64
    if T:
        kernels.row_products[(-(-T * H // rows),)](
            grad_THV, out_THV, delta_TH, *grad_THV.stride()[:2], H, T * H, V=widths["V"], V0=widths["V0"], ROWS=rows
        )
    return delta_TH


def _select(
    kernels: ModuleType,
    q_THK: Tensor,
    k_SGK: Tensor,
    documents: Sequence[Document],
    segments: _Segments,
    block_size: int,
    top_k: int,
    places: int,
) -> Tensor:
    """Returns the same as `select_blocks`, up to the rounding of scores."""
    sparse = sparse_documents(documents, block_size, top_k)
    if not sparse or not places or places > _GATE_PLACES:
        return select_blocks(q_THK, k_SGK, sparse, block_size, places)
    (T, H, K), G, device = q_THK.shape, k_SGK.shape[1], q_THK.device
    blocks_THJ = torch.full((T, H, places), -1, dtype=torch.int32, device=device)
    means_NGK = torch.empty(len(segments.table), G, K, dtype=torch.float32, device=device)
    table = _int32(segments.table, device)
    is_sparse = torch.tensor([not doc.is_dense(block_size, top_k) for doc in documents])
    firsts = segments.first_U[is_sparse]
    # Only the last block of a document may be incomplete.
    complete = torch.tensor([doc.keys // block_size for doc in sparse])
    members = torch.arange(int(complete.sum()))
    members += (firsts - (complete.cumsum(0) - complete)).repeat_interleave(complete)
    widths = _widths(q_THK, q_THK)
    kernels.pool[(len(members), G)](
        k_SGK, means_NGK, table, _int32(members, device), *k_SGK.stride()[:2], G, block_size,
        K=K, WIDTH=_power(K), STEP=max(16, min(_power(block_size), 8192 // _power(K))),
    )  # fmt: skip
    rows = torch.tensor([(doc.q, doc.queries, doc.offset, doc.k, doc.keys) for doc in sparse])
    size, step = (64, 64) if K <= 192 else (64, 32) if K <= 256 else (16, 16)
    tiles = _query_tiles(rows, H // G, size, device)
    kernels.gate[(len(tiles), G)](
        q_THK, means_NGK, blocks_THJ, _int32(rows, device), _int32(firsts, device), tiles,
        *q_THK.stride()[:2], G, block_size, R=H // G, J=places, J0=1 << (places - 1).bit_length(),
        K=K, K0=widths["K0"], K1=widths["K1"], ROWS=size, STEP=step,
    )  # fmt: skip
    return blocks_THJ
