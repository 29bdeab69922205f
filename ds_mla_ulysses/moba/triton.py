"""The implementation "triton": for Hopper GPUs; elsewhere in triton's interpreter, to be tested.

| step     | kernels                                                  | memory that grows with topk              |
|----------|----------------------------------------------------------|------------------------------------------|
| gate     | `pool`, `gate`                                           | the picked blocks; no scores             |
| forward  | `routed_forward`, `own_forward`                          | parts of out, at most `_PART_BYTES`      |
| backward | `row_products`, `routed_query`, `own_query`, `key_value` | parts of dq, the same                    |

Documents become *groups*, consecutive keys and the queries that see them causally: a block of a document with the
queries in it, or a whole document where that is dense. The (query, head) pairs that picked a block are sorted by
(key/value head, block), which is all that happens outside the kernels; nothing is read back from the device. A part
of a result belongs to one pair and lies where the pair's number says; the row's own program sums them in order of
place. So there are no atomics, and two runs give the same bits.

Where parts of all pairs would take more than `_PART_BYTES`, the work is done in *chunks*: the same problem with some
of the key/value heads or queries. dk and dv are then added up in fp32, chunk after chunk.

Key/value heads are never repeated: the rows of a tile are queries times the heads that share one.

Letters: T queries · S keys · H query heads · G key/value heads · R = H/G · K query/key width · V value width ·
J = topk - 1 places for past blocks · N groups · P pairs of a chunk.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from .grid import Document, sparse_documents
from .routing import select_blocks

#: Memory for the parts of a chunk. At a width of 128, four million pairs, which is work enough for any GPU.
_PART_BYTES = 2**31
#: More places do not fit into the registers of the gate: `routing` picks, with the same rules.
_GATE_PLACES = 64
#: What the smallest tiles have room for: bytes of a key with its value, filled up to powers of two, and width of a key.
_ROW_BYTES, _KEY_WIDTH = 4608, 1024
_INT32 = 2**31


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """As `operators` wants it of an implementation."""
    instead = "choose 'torch'."
    if q.dtype == torch.float64:
        raise ValueError(f"implementation 'triton' sums in fp32 and takes fp32, bf16 or fp16, got {q.dtype}: {instead}")
    if _row_bytes(q, v) > _ROW_BYTES or q.shape[-1] > _KEY_WIDTH:
        raise ValueError(
            f"implementation 'triton' has no room for heads of widths {q.shape[-1]} and {v.shape[-1]} in {q.dtype}: "
            f"{instead}"
        )
    if q.shape[0] * (q.shape[1] // k.shape[1]) >= _INT32 - 1024 or k.shape[0] >= _INT32 - 1024:
        raise ValueError(
            f"implementation 'triton' counts tokens, times the query heads of a key/value head, in 32 bits, "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}: {instead}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError(f"implementation 'triton' needs the package triton, which is not installed: {instead}")
    interpreted = _kernels().INTERPRETED
    if q.device.type != "cuda" and not (interpreted and q.device.type == "cpu"):
        raise ValueError(
            f"implementation 'triton' runs on CUDA devices, or, slowly, on a CPU where TRITON_INTERPRET=1 is set before "
            f"the first call, got tensors on {q.device}: {instead}"
        )
    if interpreted and q.dtype == torch.bfloat16:
        raise ValueError(f"triton's interpreter (TRITON_INTERPRET=1) is wrong in bf16: take fp32 or fp16, or {instead}")


def _on_its_device(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Triton launches on the current device, whatever device the tensors are on."""

    @functools.wraps(function)
    def guarded(first: Tensor, *args):
        with torch.cuda.device_of(first):
            return function(first, *args)

    return guarded


@_on_its_device
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
    kernels, (T, H, _), V = _kernels(), q_THK.shape, v_SGV.shape[-1]
    out_THV, lse_TH = q_THK.new_empty(T, H, V), q_THK.new_empty(T, H, dtype=torch.float32)
    plan = _Plan.of(documents, block, topk)
    blocks_THJ = _select(kernels, q_THK, k_SGK, documents, plan, block, topk, places)
    widths, sizes = _widths(q_THK, v_SGV), _forward_sizes(q_THK, v_SGV)
    for chunk in plan.chunks(q_THK, k_SGK, places, V):
        q, out, lse, blocks = (chunk.rows(x) for x in (q_THK, out_THV, lse_TH, blocks_THJ))
        k, v = (x[:, chunk.heads] for x in (k_SGK, v_SGV))
        groups = chunk.groups(plan)
        table = _table(groups, q.device)
        strides = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        J = places if chunk.routed else 0
        constants = {"R": chunk.R, "J": J, **widths, "ROWS": sizes.rows, "STEP": sizes.keys, **sizes.options}
        part_PV, part_lse_P = _parts(q, J, V), _parts(q, J)
        if J:
            order = _Order.of(blocks, plan, chunk)
            tiles = order.tiles(sizes.rows)
            kernels.routed_forward[(len(tiles),)](
                q, k, v, part_PV, part_lse_P, table, tiles, order.starts, order.pairs, *strides, scale,
                q.shape[1], len(groups), **constants,
            )  # fmt: skip
        tiles = _own_tiles(groups, chunk.R, sizes.rows, q.device)
        if len(tiles):
            kernels.own_forward[(len(tiles), k.shape[1])](
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
    block: int,
    topk: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `operators` wants it of an implementation."""
    kernels, (T, H, K), places = _kernels(), q_THK.shape, blocks_THJ.shape[-1]
    plan = _Plan.of(documents, block, topk)
    widths, sizes = _widths(q_THK, v_SGV), _backward_sizes(q_THK, v_SGV)
    chunks = list(plan.chunks(q_THK, k_SGK, places, K))
    several = len({chunk.tokens.start for chunk in chunks}) > 1
    dq_THK = q_THK.new_empty(T, H, K)
    # Keys of documents without queries are in no group.
    dk_SGK, dv_SGV = (
        torch.zeros(x.shape, dtype=torch.float32 if several else x.dtype, device=x.device) for x in (k_SGK, v_SGV)
    )
    delta_TH = _row_products(kernels, grad_THV, out_THV, widths)
    for chunk in chunks:
        rows = grad_THV, q_THK, lse_TH, delta_TH, blocks_THJ, dq_THK
        grad, q, lse, delta, blocks, dq = (chunk.rows(x) for x in rows)
        k, v, dk, dv = (x[:, chunk.heads] for x in (k_SGK, v_SGV, dk_SGK, dv_SGV))
        groups = chunk.groups(plan)
        table = _table(groups, q.device)
        heads, N, G = q.shape[1], len(groups), k.shape[1]
        strides = *grad.stride()[:2], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]
        J = places if chunk.routed else 0
        constants = {"R": chunk.R, "J": J, **widths, **sizes.options}
        tile = {"ROWS": sizes.rows, "STEP": sizes.keys}
        part_PK, starts, pairs = _parts(q, J, K), table, table  # without pairs they are not read
        if J:
            order = _Order.of(blocks, plan, chunk)
            tiles, starts, pairs = order.tiles(sizes.rows), order.starts, order.pairs
            kernels.routed_query[(len(tiles),)](
                grad, q, k, v, lse, delta, part_PK, table, tiles, starts, pairs, *strides, scale, heads, H, N,
                **constants, **tile,
            )  # fmt: skip
        tiles = _own_tiles(groups, chunk.R, sizes.rows, q.device)
        if len(tiles):
            kernels.own_query[(len(tiles), G)](
                grad, q, k, v, lse, delta, blocks, part_PK, dq, table, tiles, *strides, scale, heads, H,
                **constants, **tile,
            )  # fmt: skip
        tiles = _tiles(groups[:, 4], sizes.keys, q.device)
        if len(tiles):
            kernels.key_value[(len(tiles), G)](
                grad, q, k, v, lse, delta, dk, dv, table, tiles, starts, pairs, *strides, scale, heads, H, N,
                **constants, KEYS=sizes.keys, STEP=sizes.rows, ADD=several,
            )  # fmt: skip
    return dq_THK, dk_SGK, dv_SGV


def _kernels() -> ModuleType:
    # By name each time: whether they are interpreted is decided when the module is first imported.
    return importlib.import_module(".triton_kernels", __package__)


# Sizes. Chosen once for all inputs of some widths and dtype, so that results do not depend on timings.


@dataclass(frozen=True)
class _Sizes:
    """Rows and keys of a tile, and options of the launch."""

    rows: int
    keys: int
    options: dict[str, int]


def _forward_sizes(q_THK: Tensor, v_SGV: Tensor) -> _Sizes:
    """A program holds its rows of q and their sum, and `num_stages` tiles of keys and values: 227 KiB on Hopper."""
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
    """As above. Here rows come with their gradient, and `key_value` sums over both widths, in registers."""
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
    """Of a key with its value, filled up."""
    widths = _widths(q_THK, v_SGV)
    return (widths["K0"] + widths["K1"] + widths["V0"]) * q_THK.element_size()


def _widths(q_THK: Tensor, v_SGV: Tensor) -> dict[str, int]:
    """K0 + K1 hold K, and V0 holds V: powers of two from 16 on, the least that `tl.dot` takes, or K1 = 0."""
    K, V = q_THK.shape[-1], v_SGV.shape[-1]
    K0, K1 = _power(K), 0
    if K < K0 and _power(K - K0 // 2) < K0 // 2:
        K0, K1 = K0 // 2, _power(K - K0 // 2)
    return {"K": K, "K0": K0, "K1": K1, "V": V, "V0": _power(V)}


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


# The plan, on the CPU and without a loop over blocks.


@dataclass(frozen=True)
class _Plan:
    """Groups of all documents, in their order.

    Attributes:
        groups: int64 [N, 5]: first query, queries, keys before the one at the first query, first key, keys.
        first: int64 [documents], the first group of each.
        queries: int64 [documents].
        routed: whether any query may pick a block.
    """

    groups: Tensor
    first: Tensor
    queries: Tensor
    routed: bool

    @classmethod
    def of(cls, documents: Sequence[Document], block: int, topk: int) -> _Plan:
        rows = [(doc.q, doc.k, doc.queries, doc.keys) for doc in documents]
        q, k, queries, keys = torch.tensor(rows, dtype=torch.int64).view(-1, 4).unbind(1)
        size = torch.where(keys <= topk * block, keys, block)  # keys of a group
        count = (keys + size - 1) // size
        first = count.cumsum(0) - count
        doc = torch.repeat_interleave(count)
        begin = (torch.arange(len(doc)) - first[doc]) * size[doc]
        end = torch.minimum(begin + size[doc], keys[doc])
        offset = (keys - queries)[doc]
        own = torch.maximum(begin, offset)  # position of the first query
        groups = q[doc] + own - offset, (end - own).clamp(min=0), own - begin, k[doc] + begin, end - begin
        return cls(torch.stack(groups, 1), first, queries, bool(sparse_documents(documents, block, topk)))

    def chunks(self, q_THK: Tensor, k_SGK: Tensor, places: int, width: int) -> Iterator[_Chunk]:
        """Of heads if those of one key/value head fit into the memory, and else of queries."""
        (T, H, _), G = q_THK.shape, k_SGK.shape[1]
        R, routed = H // G, self.routed and places > 0
        heads, tokens = G, max(1, T)
        if routed and T:
            pairs = min(_PART_BYTES // (4 * width), _INT32 - 1)
            heads = max(1, min(G, pairs // (T * R * places)))
            tokens = max(1, min(T, pairs // (heads * R * places)))
        for g in range(0, G, heads):
            for t in range(0, T, tokens):
                yield _Chunk(slice(t, min(T, t + tokens)), slice(g, min(G, g + heads)), R, routed)


@dataclass(frozen=True)
class _Chunk:
    """Some queries and key/value heads."""

    tokens: slice
    heads: slice
    R: int
    routed: bool

    def rows(self, x_THD: Tensor) -> Tensor:
        return x_THD[self.tokens, self.heads.start * self.R : self.heads.stop * self.R]

    def groups(self, plan: _Plan) -> Tensor:
        """The plan's groups, with those of their queries that are in the chunk, counted from its first."""
        q, queries, past, k, keys = plan.groups.unbind(1)
        begin = q.clamp(min=self.tokens.start)
        end = (q + queries).clamp(max=self.tokens.stop)
        return torch.stack((begin - self.tokens.start, (end - begin).clamp(min=0), past + begin - q, k, keys), 1)


def _own_tiles(groups: Tensor, R: int, rows: int, device: torch.device) -> Tensor:
    """Of queries. In a long document the last see most keys, and should not be what is left to wait for."""
    return _tiles(groups[:, 1] * R, rows, device).flip(0)


def _tiles(counts_N: Tensor, size: int, device: torch.device) -> Tensor:
    """int32 [tiles, 2] on the device, (group, first of its `count`), where a tile takes `size`."""
    tiles_N = (counts_N + size - 1) // size
    group = torch.repeat_interleave(tiles_N)
    first = (torch.arange(len(group)) - (tiles_N.cumsum(0) - tiles_N)[group]) * size
    return _table(torch.stack((group, first), 1), device)


def _table(x: Tensor, device: torch.device) -> Tensor:
    # From memory that is not pinned, CUDA has read the values when the call returns.
    return x.int().to(device, non_blocking=True)


@dataclass(frozen=True)
class _Order:
    """The pairs of a chunk by (key/value head, group): their *bucket*. Everything is on the device.

    Attributes:
        pairs: int64 [P], pairs in order; those that hold no block come last.
        starts: int64 [buckets + 1], the first pair of each bucket.
    """

    pairs: Tensor
    starts: Tensor

    @classmethod
    def of(cls, blocks_THJ: Tensor, plan: _Plan, chunk: _Chunk) -> _Order:
        device, N = blocks_THJ.device, len(plan.groups)
        heads = chunk.heads.stop - chunk.heads.start
        buckets = heads * N
        assert buckets < _INT32, "groups of a chunk are counted in 32 bits"
        first, queries = _table(plan.first, device), _table(plan.queries, device)
        first_T = first.repeat_interleave(queries, output_size=int(plan.queries.sum()))[chunk.tokens]
        blocks_TGRJ = blocks_THJ.unflatten(1, (heads, chunk.R))
        first_G = torch.arange(0, buckets, N, device=device, dtype=torch.int32)
        bucket_TGRJ = blocks_TGRJ + (first_T[:, None] + first_G)[:, :, None, None]
        bucket_TGRJ.masked_fill_(blocks_TGRJ < 0, buckets)
        sorted_P, pairs = bucket_TGRJ.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_P, torch.arange(buckets + 1, device=device, dtype=torch.int32))
        return cls(pairs, starts)

    def tiles(self, size: int) -> Tensor:
        """int32 [tiles, 2], (bucket, first of its pairs); more than are needed, which have no bucket."""
        buckets, P = len(self.starts) - 1, len(self.pairs)
        tiles = (self.starts.diff() + size - 1) // size
        ends = tiles.cumsum(0)
        i = torch.arange(P // size + min(buckets, P), device=ends.device)
        bucket = torch.searchsorted(ends, i, right=True)
        inside = bucket.clamp(max=buckets - 1)
        first = self.starts[inside] + (i - (ends - tiles)[inside]) * size
        return torch.stack((bucket, first), 1).int()


def _parts(q_THK: Tensor, J: int, *width: int) -> Tensor:
    """fp32 [P, width], to be written by the pairs that hold a block."""
    return q_THK.new_empty(q_THK.shape[0] * q_THK.shape[1] * J, *width, dtype=torch.float32)


def _row_products(kernels: ModuleType, grad_THV: Tensor, out_THV: Tensor, widths: dict[str, int]) -> Tensor:
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
    plan: _Plan,
    block: int,
    topk: int,
    places: int,
) -> Tensor:
    """What `select_blocks` returns, up to the rounding of scores."""
    sparse = sparse_documents(documents, block, topk)
    if not sparse or not places or places > _GATE_PLACES:
        return select_blocks(q_THK, k_SGK, sparse, block, places)
    (T, H, K), G, device = q_THK.shape, k_SGK.shape[1], q_THK.device
    blocks_THJ = torch.full((T, H, places), -1, dtype=torch.int32, device=device)
    means_NGK = torch.empty(len(plan.groups), G, K, dtype=torch.float32, device=device)
    groups = _table(plan.groups, device)
    is_sparse = torch.tensor([not doc.is_dense(block, topk) for doc in documents])
    firsts = plan.first[is_sparse]
    # Blocks are complete but for the last ones of documents.
    blocks = torch.tensor([doc.keys // block for doc in sparse])
    members = torch.arange(int(blocks.sum())) + (firsts - (blocks.cumsum(0) - blocks)).repeat_interleave(blocks)
    widths = _widths(q_THK, q_THK)
    kernels.pool[(len(members), G)](
        k_SGK, means_NGK, groups, _table(members, device), *k_SGK.stride()[:2], G, block,
        K=K, WIDTH=_power(K), STEP=max(16, min(_power(block), 8192 // _power(K))),
    )  # fmt: skip
    rows = torch.tensor([(doc.q, doc.queries, doc.offset, doc.k, doc.keys) for doc in sparse])
    size, step = (64, 64) if K <= 192 else (64, 32) if K <= 256 else (16, 16)
    tiles = _own_tiles(rows, H // G, size, device)
    kernels.gate[(len(tiles), G)](
        q_THK, means_NGK, blocks_THJ, _table(rows, device), _table(firsts, device), tiles,
        *q_THK.stride()[:2], G, block, R=H // G, J=places, J0=1 << (places - 1).bit_length(),
        K=K, K0=widths["K0"], K1=widths["K1"], ROWS=size, STEP=step,
    )  # fmt: skip
    return blocks_THJ
