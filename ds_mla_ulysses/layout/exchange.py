"""Tokens of all heads <-> own heads of all tokens, for several tensors in one wire buffer.

Before the exchange a rank holds blocks x_TBHD (its tokens, all heads), after it x_SBMD (all tokens,
its heads). One all-to-all carries all blocks of an exchange; every operand is copied once, straight
into the wire buffer, and what arrives is read where it lies. On the wire one token is
`[block 0: M*D0 | block 1: M*D1 | ...]`, and ranks and tokens are adjacent: [P, T, B, W] is [S, B, W].

| function        | takes            | sends to rank p                  | returns                   |
|-----------------|------------------|----------------------------------|---------------------------|
| tokens_to_heads | blocks x_TBHD    | own tokens, p's heads            | one buffer x_SBW          |
| heads_to_tokens | pieces x_SBMD    | p's tokens, own heads            | blocks x_TBHD             |
| GatherTokens    | blocks x_TBGD    | own tokens, all heads            | blocks x_SBGD             |

The first two are each other's adjoint: a head that several ranks own is sent to each of them, and on the way back
what they say of it is summed, in fp32 or wider, and rounded once. What a rank keeps for itself does not
go through the wire buffer but straight to where it is needed, wherever the buffers allow it.

The heads of every block are shared as `HeadPartition(H, P, query_heads)` says, so ranks can have
different numbers of them.

Letters: P ranks · T this rank's tokens · S = P*T · B batch · H all heads of a block · M own heads of it
· D width · W = sum of M*D over blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype, all_to_all, start_all_gather, start_all_to_all, wait
from ..comm.group import SequenceGroup
from .heads import HeadPartition
from .split import by_rank, in_order


def tokens_to_heads(blocks_TBHD: Sequence[Tensor], query_heads: int, group: SequenceGroup, direction: str) -> Tensor:
    """All blocks in one all-to-all; x_SBW, from which `own_heads` takes the blocks. Not differentiable.

    Args:
        blocks_TBHD: tensors of one dtype with the same T and B, any strides.
        query_heads: the query heads that the heads of all blocks follow.
        direction: "forward" or "backward", for the traffic count.
    """
    return _tokens_to_heads(list(blocks_TBHD), query_heads, group.size, group.rank, group.name, direction)


def heads_to_tokens(
    pieces_SBMD: Sequence[Tensor],
    heads: Sequence[int],
    query_heads: int,
    group: SequenceGroup,
    direction: str,
    batch_first: bool,
    pieces_per_block: Sequence[int] | None = None,
) -> list[Tensor]:
    """The way back: one all-to-all; blocks x_TBHD. Not differentiable.

    Args:
        pieces_SBMD: tensors of one dtype, any strides. Several pieces can form a block along D.
        heads: H of each block.
        query_heads: the query heads that the heads of all blocks follow.
        batch_first: whether a result is contiguous as [B, T, H, D] (then x_TBHD is a view of it) or
            as [T, B, H, D]: the caller's own layout, so that no further copy follows.
        pieces_per_block: how many consecutive pieces make each block; one each by default.
    """
    counts = [1] * len(pieces_SBMD) if pieces_per_block is None else list(pieces_per_block)
    out = _heads_to_tokens(
        list(pieces_SBMD), counts, list(heads), query_heads, group.size, group.rank, group.name, direction, batch_first
    )
    return [x.transpose(0, 1) for x in out] if batch_first else out


def own_heads(
    x_SBW: Tensor, heads: Sequence[int], widths: Sequence[int], query_heads: int, group: SequenceGroup
) -> list[Tensor]:
    """The blocks x_SBMD in what `tokens_to_heads` returned, as views."""
    counts = [HeadPartition(h, group.size, query_heads).count(group.rank) for h in heads]
    parts = x_SBW.split([m * d for m, d in zip(counts, widths, strict=True)], dim=-1)
    return [x.unflatten(-1, (m, d)) for x, m, d in zip(parts, counts, widths, strict=True)]


class TokensToHeads(torch.autograd.Function):
    """Blocks x_TBHD -> x_SBMD by one all-to-all. Backward: `heads_to_tokens` of all gradients, one all-to-all.

    `pending` is what `start_tokens_to_heads` gave of the same blocks, or None: then the exchange is made here.
    """

    @staticmethod
    def forward(ctx, query_heads: int, group: SequenceGroup, batch_first: bool, pending, *blocks_TBHD: Tensor):
        ctx.query_heads, ctx.group, ctx.batch_first = query_heads, group, batch_first
        ctx.heads = [x.shape[2] for x in blocks_TBHD]
        buffer = tokens_to_heads(blocks_TBHD, query_heads, group, "forward") if pending is None else wait(pending)
        return tuple(own_heads(buffer, ctx.heads, [x.shape[3] for x in blocks_TBHD], query_heads, group))

    @staticmethod
    def backward(ctx, *grads_SBMD: Tensor):
        grads = heads_to_tokens(grads_SBMD, ctx.heads, ctx.query_heads, ctx.group, "backward", ctx.batch_first)
        return None, None, None, None, *grads


class HeadsToTokens(torch.autograd.Function):
    """Query heads x_SBMD -> x_TBHD by one all-to-all. Backward: `tokens_to_heads` of the gradient, one all-to-all."""

    @staticmethod
    def forward(ctx, x_SBMD: Tensor, heads: int, group: SequenceGroup, batch_first: bool) -> Tensor:
        ctx.group, ctx.heads, ctx.width = group, heads, x_SBMD.shape[-1]
        return heads_to_tokens([x_SBMD], [heads], heads, group, "forward", batch_first)[0]

    @staticmethod
    def backward(ctx, grad_TBHD: Tensor):
        buffer = tokens_to_heads([grad_TBHD], ctx.heads, ctx.group, "backward")
        return own_heads(buffer, [ctx.heads], [ctx.width], ctx.heads, ctx.group)[0], None, None, None


class GatherTokens(torch.autograd.Function):
    """Blocks x_TBGD -> x_SBGD, all heads of all tokens in the order of the sequence, by one all-gather.

    Backward: each rank gets what the others' gradients say of its tokens by one all-to-all, the bytes of a
    reduce-scatter; they are summed in fp32 (or wider) and rounded once.

    `pending` is what `start_gather_tokens` gave of the same blocks, or None: then the gather is started here.
    """

    @staticmethod
    def forward(ctx, group: SequenceGroup, batch_first: bool, pending, *blocks_TBGD: Tensor):
        ctx.group, ctx.batch_first = group, batch_first
        buffer_SBW = wait(start_gather_tokens(blocks_TBGD, group) if pending is None else pending)
        buffer_SBW = in_order(buffer_SBW, group)
        shapes = [x.shape[2:] for x in blocks_TBGD]
        parts = buffer_SBW.split([shape.numel() for shape in shapes], dim=-1)
        return tuple(x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))

    @staticmethod
    def backward(ctx, *grads_SBGD: Tensor):
        group = ctx.group
        grads = [by_rank(x, group) for x in grads_SBGD]
        out = _return_tokens(grads, group.size, group.rank, group.name, ctx.batch_first)
        return None, None, None, *([x.transpose(0, 1) for x in out] if ctx.batch_first else out)


def start_gather_tokens(blocks_TBGD: Sequence[Tensor], group: SequenceGroup) -> Tensor:
    """Starts gathering blocks of one dtype side by side: *pending* [S, B, W], for `GatherTokens`."""
    return _start_gather_tokens([x.detach() for x in blocks_TBGD], group.size, group.name)


def start_gather_rows(rows: Sequence[Tensor], group: SequenceGroup, batch_first: bool) -> Tensor:
    """Starts gathering tensors without heads, [B, T, W] if batch_first, else [T, B, W]: *pending*, for `gather_rows`."""
    return start_gather_tokens(_as_blocks(rows, batch_first), group)


def gather_rows(
    rows: Sequence[Tensor], group: SequenceGroup, batch_first: bool, pending: Tensor | None = None
) -> list[Tensor]:
    """Tensors without heads of all tokens, in the layout that they came in, by one all-gather. As `GatherTokens`."""
    blocks_SB1W = GatherTokens.apply(group, batch_first, pending, *_as_blocks(rows, batch_first))
    return [x.squeeze(2).transpose(0, 1) if batch_first else x.squeeze(2) for x in blocks_SB1W]


def _as_blocks(rows: Sequence[Tensor], batch_first: bool) -> list[Tensor]:
    """[T, B, 1, W] each."""
    return [(x.transpose(0, 1) if batch_first else x).unsqueeze(2) for x in rows]


def start_tokens_to_heads(blocks_TBHD: Sequence[Tensor], query_heads: int, group: SequenceGroup) -> Tensor:
    """Starts the exchange of `tokens_to_heads`: *pending* [S, B, W], for `TokensToHeads`. What a rank keeps goes along."""
    blocks = [x.detach() for x in blocks_TBHD]
    return _start_tokens_to_heads(blocks, query_heads, group.size, group.rank, group.name)


# The operators. They take plain values, so that a compiled graph can hold them, and wait inside.


@torch.library.custom_op("ds_mla_ulysses::tokens_to_heads", mutates_args=())
def _tokens_to_heads(
    blocks: Sequence[Tensor], query_heads: int, size: int, rank: int, group: str, direction: str
) -> Tensor:
    T, B = blocks[0].shape[:2]
    widths = _widths_of_ranks(blocks, query_heads, size)
    sent, received = [T * B * w for w in widths], [T * B * widths[rank]] * size
    out = blocks[0].new_empty(size, T, B, widths[rank])
    arriving = _others(out, rank)
    if arriving is not None:
        sent[rank] = received[rank] = 0
    wire = blocks[0].new_empty(sum(sent))
    parts = list(wire.split(sent))
    if arriving is not None:
        parts[rank] = out[rank].view(-1)
    _write_parts(blocks, query_heads, parts)
    if size > 1:
        arriving = out if arriving is None else arriving
        all_to_all(arriving.view(-1), wire, received, sent, rank, group, direction)
    return out.view(T * size, B, widths[rank])


@torch.library.custom_op("ds_mla_ulysses::start_tokens_to_heads", mutates_args=())
def _start_tokens_to_heads(blocks: Sequence[Tensor], query_heads: int, size: int, rank: int, group: str) -> Tensor:
    T, B = blocks[0].shape[:2]
    widths = _widths_of_ranks(blocks, query_heads, size)
    sent, received = [T * B * w for w in widths], [T * B * widths[rank]] * size
    wire = blocks[0].new_empty(sum(sent))
    _write_parts(blocks, query_heads, wire.split(sent))
    return start_all_to_all(wire, received, sent, rank, group, "forward").view(T * size, B, widths[rank])


@_start_tokens_to_heads.register_fake
def _(blocks, query_heads, size, rank, group):
    T, B = blocks[0].shape[:2]
    return blocks[0].new_empty(T * size, B, _widths_of_ranks(blocks, query_heads, size)[rank])


def _widths_of_ranks(blocks: Sequence[Tensor], query_heads: int, size: int) -> list[int]:
    """What each rank gets of a token."""
    partitions = [HeadPartition(x.shape[2], size, query_heads) for x in blocks]
    return [sum(h.count(p) * x.shape[3] for h, x in zip(partitions, blocks, strict=True)) for p in range(size)]


def _write_parts(blocks: Sequence[Tensor], query_heads: int, parts: Sequence[Tensor]) -> None:
    """Writes each rank's heads of all blocks into its flat part of the wire."""
    (T, B), size = blocks[0].shape[:2], len(parts)
    partitions = [HeadPartition(x.shape[2], size, query_heads) for x in blocks]
    for p, part in enumerate(parts):
        pieces = [x[:, :, h.start(p) : h.stop(p)] for x, h in zip(blocks, partitions, strict=True)]
        _write_side_by_side(pieces, part.view(T, B, -1))


def _others(x_PTBW: Tensor, rank: int) -> Tensor | None:
    """The parts of all other ranks where they are contiguous: seen from the first and the last rank."""
    return x_PTBW[1:] if rank == 0 else x_PTBW[:-1] if rank == len(x_PTBW) - 1 else None


@_tokens_to_heads.register_fake
def _(blocks, query_heads, size, rank, group, direction):
    T, B = blocks[0].shape[:2]
    return blocks[0].new_empty(T * size, B, _widths_of_ranks(blocks, query_heads, size)[rank])


@torch.library.custom_op("ds_mla_ulysses::heads_to_tokens", mutates_args=())
def _heads_to_tokens(
    pieces: Sequence[Tensor],
    pieces_per_block: Sequence[int],
    heads: Sequence[int],
    query_heads: int,
    size: int,
    rank: int,
    group: str,
    direction: str,
    batch_first: bool,
) -> list[Tensor]:
    S, B = pieces[0].shape[:2]
    T = S // size
    partitions = [HeadPartition(h, size, query_heads) for h in heads]
    block_widths = _block_widths(pieces, pieces_per_block)
    widths = [sum(h.count(p) * d for h, d in zip(partitions, block_widths, strict=True)) for p in range(size)]

    part = T * B * widths[rank]
    sent, received = [part] * size, [T * B * w for w in widths]
    blocks = _grouped([x.unflatten(0, (size, T)) for x in pieces], pieces_per_block)  # [P, T, B, M, D] each
    whole = pieces[0].view(size, T, B, widths[rank]) if len(pieces) == 1 and pieces[0].is_contiguous() else None
    wire = None if whole is None else _others(whole, rank)
    own_travels = whole is not None and wire is None
    if own_travels:
        wire = whole
    else:
        sent[rank] = received[rank] = 0
    if wire is None:
        wire = pieces[0].new_empty(size - 1, T, B, widths[rank])
        for of_wire, of_pieces in ((slice(rank), slice(rank)), (slice(rank, None), slice(rank + 1, None))):
            offset = 0
            for block, h, d in zip(blocks, partitions, block_widths, strict=True):
                to = wire[of_wire, ..., offset : offset + h.count(rank) * d].unflatten(-1, (h.count(rank), d))
                _join([x[of_pieces] for x in block], to)
                offset += h.count(rank) * d

    arrived = pieces[0].new_empty(sum(received))
    if size > 1:
        all_to_all(arrived, wire.view(-1), received, sent, rank, group, direction)
    out = _empty_blocks(pieces[0], T, B, heads, block_widths, batch_first)
    wide = accumulation_dtype(out[0].dtype)
    sums = [
        torch.empty_like(x, dtype=wide) if h.overlaps and x.dtype != wide else x
        for x, h in zip(out, partitions, strict=True)
    ]
    for p, part in enumerate(arrived.split(received)):
        offset = 0
        for i, (h, d) in enumerate(zip(partitions, block_widths, strict=True)):
            n = h.count(p)
            to = (sums[i].transpose(0, 1) if batch_first else sums[i])[:, :, h.start(p) : h.stop(p)]
            if p == rank and not own_travels:
                _join([x[rank] for x in blocks[i]], to, h.shared(p))
            else:
                came = part.view(T, B, widths[p])[..., offset : offset + n * d].unflatten(-1, (n, d))
                _join([came], to, h.shared(p))
            offset += n * d
    for x, total in zip(out, sums, strict=True):
        if total is not x:
            x.copy_(total)
    return out


def _grouped(pieces: Sequence[Tensor], pieces_per_block: Sequence[int]) -> list[list[Tensor]]:
    remaining = iter(pieces)
    return [[next(remaining) for _ in range(n)] for n in pieces_per_block]


def _join(pieces: Sequence[Tensor], to: Tensor, shared: int = 0) -> None:
    """Writes pieces side by side along the last dimension; adds to the first `shared` heads, already written."""
    for part, piece in zip(to.split([x.shape[-1] for x in pieces], dim=-1), pieces, strict=True):
        if shared:
            part[..., :shared, :].add_(piece[..., :shared, :])
        if shared < part.shape[-2]:
            part[..., shared:, :].copy_(piece[..., shared:, :])


@_heads_to_tokens.register_fake
def _(pieces, pieces_per_block, heads, query_heads, size, rank, group, direction, batch_first):
    S, B = pieces[0].shape[:2]
    return _empty_blocks(pieces[0], S // size, B, heads, _block_widths(pieces, pieces_per_block), batch_first)


def _block_widths(pieces: Sequence[Tensor], pieces_per_block: Sequence[int]) -> list[int]:
    return [sum(x.shape[-1] for x in block) for block in _grouped(pieces, pieces_per_block)]


def _empty_blocks(like: Tensor, T: int, B: int, heads: Sequence[int], widths: Sequence[int], batch_first: bool):
    rows = (B, T) if batch_first else (T, B)
    return [like.new_empty(*rows, h, d) for h, d in zip(heads, widths, strict=True)]


@torch.library.custom_op("ds_mla_ulysses::start_gather_tokens", mutates_args=())
def _start_gather_tokens(blocks: Sequence[Tensor], size: int, group: str) -> Tensor:
    T, B = blocks[0].shape[:2]
    wire_TBW = blocks[0].new_empty(T, B, sum(x.shape[2] * x.shape[3] for x in blocks))
    _write_side_by_side(blocks, wire_TBW)
    return start_all_gather(wire_TBW, size, group, "forward")


@_start_gather_tokens.register_fake
def _(blocks, size, group):
    T, B = blocks[0].shape[:2]
    return blocks[0].new_empty(T * size, B, sum(x.shape[2] * x.shape[3] for x in blocks))


def _write_side_by_side(blocks: Sequence[Tensor], wire: Tensor) -> None:
    """Blocks [..., G, D] into [..., sum of G*D]."""
    for part, x in zip(wire.split([x.shape[-2] * x.shape[-1] for x in blocks], dim=-1), blocks, strict=True):
        part.unflatten(-1, x.shape[-2:]).copy_(x)


@torch.library.custom_op("ds_mla_ulysses::return_tokens", mutates_args=())
def _return_tokens(grads: Sequence[Tensor], size: int, rank: int, group: str, batch_first: bool) -> list[Tensor]:
    T, B = grads[0].shape[0] // size, grads[0].shape[1]
    parts_PTBGD = [x.unflatten(0, (size, T)) for x in grads]
    wire = grads[0].new_empty(size - 1, T, B, sum(x.shape[2] * x.shape[3] for x in grads))
    _write_side_by_side([x[:rank] for x in parts_PTBGD], wire[:rank])
    _write_side_by_side([x[rank + 1 :] for x in parts_PTBGD], wire[rank:])
    arrived, sent = torch.empty_like(wire), [wire[0].numel() if p != rank else 0 for p in range(size)]
    all_to_all(arrived.view(-1), wire.view(-1), sent, sent, rank, group, "backward")
    out = _empty_blocks(grads[0], T, B, [x.shape[2] for x in grads], [x.shape[3] for x in grads], batch_first)
    widths = [x.shape[2] * x.shape[3] for x in grads]
    for to, own, came in zip(out, parts_PTBGD, arrived.split(widths, dim=-1), strict=True):
        total = came.sum(0, dtype=accumulation_dtype(own.dtype)).unflatten(-1, own.shape[-2:]).add_(own[rank])
        (to.transpose(0, 1) if batch_first else to).copy_(total)
    return out


@_return_tokens.register_fake
def _(grads, size, rank, group, batch_first):
    T, B = grads[0].shape[0] // size, grads[0].shape[1]
    return _empty_blocks(grads[0], T, B, [x.shape[2] for x in grads], [x.shape[3] for x in grads], batch_first)


@torch.library.custom_op("ds_mla_ulysses::join_shared_key", mutates_args=())
def join_shared_key(k_nope_SBMN: Tensor, pending_SBR: Tensor, batch_first: bool) -> Tensor:
    """Waits for the shared key and writes K = [nope | shared] for the own heads, once.

    Returns [B, S, M, N+R] if batch_first, else [S, B, M, N+R], contiguous.
    """
    shared_SBR = wait(pending_SBR)
    key = _empty_key(k_nope_SBMN, pending_SBR, batch_first)
    k_SBMK, N = (key.transpose(0, 1) if batch_first else key), k_nope_SBMN.shape[-1]
    k_SBMK[..., :N].copy_(k_nope_SBMN)
    k_SBMK[..., N:].copy_(shared_SBR.unsqueeze(2).expand(-1, -1, k_nope_SBMN.shape[2], -1))
    return key


def _empty_key(k_nope_SBMN: Tensor, shared_SBR: Tensor, batch_first: bool) -> Tensor:
    S, B, M, N = k_nope_SBMN.shape
    rows = (B, S) if batch_first else (S, B)
    return k_nope_SBMN.new_empty(*rows, M, N + shared_SBR.shape[-1])


@join_shared_key.register_fake
def _(k_nope_SBMN, pending_SBR, batch_first):
    return _empty_key(k_nope_SBMN, pending_SBR, batch_first)


@torch.library.custom_op("ds_mla_ulysses::return_shared_key_grad", mutates_args=())
def return_shared_key_grad(grad_SBMR: Tensor, size: int, rank: int, group: str) -> Tensor:
    """Starts sending each rank what the own heads' gradient says of its tokens: *pending* [P*T, B, R].

    The own heads are summed in fp32 (or wider) and rounded once for the wire.
    """
    dtype = grad_SBMR.dtype
    grad_SBR = grad_SBMR.sum(2, dtype=accumulation_dtype(dtype)).to(dtype).contiguous()
    if size == 1:
        return grad_SBR
    parts = [grad_SBR.numel() // size] * size
    return start_all_to_all(grad_SBR.view(-1), parts, parts, rank, group, "backward").view(grad_SBR.shape)


@return_shared_key_grad.register_fake
def _(grad_SBMR, size, rank, group):
    S, B, _, R = grad_SBMR.shape
    return grad_SBMR.new_empty(S, B, R)
