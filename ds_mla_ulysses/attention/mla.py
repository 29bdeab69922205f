"""DeepSpeed Ulysses for Multi-head Latent Attention.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all heads · M this rank's heads
· N non-positional key width · R shared rope key width · K = N+R · V value width · P = N+V (compact KV
of a head) · F = K+P (what a head sends) · L latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import gather_start, sum_over_ranks
from ..comm.group import SequenceGroup
from ..layout.exchange import (
    HeadsToTokens,
    TokensToHeads,
    gather_rows,
    heads_to_tokens,
    join_shared_key,
    own_heads,
    return_shared_key_grad,
    start_gather_rows,
    start_tokens_to_heads,
    tokens_to_heads,
)
from ..layout.heads import HeadPartition
from .base import SequenceAttention, by_token
from .chunks import ForChunks, HeadChunks, check_count, recomputed
from .latents import Expand, Latents


@dataclass(frozen=True)
class PendingKey:
    """The shared rope key on its way to all ranks, as `UlyssesMLAAttention.gather_shared_key` returns it.

    Opaque: only the attention that started it may take it, since reading it would not wait.
    """

    own_TBR: Tensor
    gathered_SBR: Tensor
    batch_dim_idx: int


class UlyssesMLAAttention(SequenceAttention):
    """DeepSpeed's `DistributedAttention` for MLA: one packed exchange in, one gather, one exchange out.

    Packed: every head's query (K wide) and compact key-value (P wide) travel in one all-to-all; the rope key,
    which all heads share, is gathered once by an asynchronous all-gather that starts before anything
    else; K is written on the receiving side, for the own heads only.

    | direction | collectives                                                          | elements sent per token |
    |-----------|----------------------------------------------------------------------|-------------------------|
    | forward   | all-gather (key), all-to-all (q, kv), all-to-all (output)            | H(K+P+V)f + R(ranks-1)  |
    | backward  | all-to-all (output), all-to-all (key, partial sums), all-to-all (q, kv) | the same             |

    With latents (`expand`): only queries travel by heads; the KV latent and the rope key are gathered together, and
    each rank expands its own heads of all tokens, which is as much work as all heads of its own tokens.

    | direction | collectives                                                          | elements sent per token |
    |-----------|----------------------------------------------------------------------|-------------------------|
    | forward   | all-gather (latent, key), all-to-all (q), all-to-all (output)        | H(K+V)f + (L+R)(ranks-1)|
    | backward  | all-to-all (output), all-to-all (q), all-to-all (latent, key: partial sums) | the same         |

    with f = (ranks-1)/ranks where the ranks divide H; the first H % ranks own one head more than the others.
    The result and the gradients are those of `local_attention` on the whole sequence with all heads. A group
    of one communicates nothing.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the
            own heads, in the layout that the call came in: q_BSMK, k_BSMK, v_BSMV -> out_BSMV. q and v
            are strided views of the receive buffer, contiguous in the last dimension.
        group: the sequence group, a torch ProcessGroup or a SequenceGroup.
        nope_dim, rope_dim, value_dim: N, R and V.
        head_chunks: parts of the own heads that are exchanged, expanded and attend one after the other, the next part's
            exchange in flight while one computes. Keys and values of a part are made once more in backward, so that
            those of all own heads never exist at once. The collectives by heads are so many times as many.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        *,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        head_chunks: int = 1,
    ) -> None:
        super().__init__(local_attention, group)
        check_count(head_chunks)
        self.latents, self.head_chunks = Latents(nope_dim, rope_dim, value_dim), head_chunks

    def gather_shared_key(self, k_shared: Tensor, batch_dim_idx: int = 0) -> PendingKey:
        """Starts the all-gather of the shared key and returns at once.

        `forward` starts it itself when it is given a tensor. Call this first to let the gather run
        under work that `forward` waits for, such as the projection that makes kv.
        """
        k_TBR = by_token(k_shared, batch_dim_idx)
        own = k_TBR.detach()  # the gradient takes its own way back, in the backward of the exchange
        gathered = gather_start(own, self.group.size, self.group.name) if self.group.size > 1 else own
        return PendingKey(k_TBR, gathered, batch_dim_idx)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        k_shared: Tensor | PendingKey,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        expand: Expand | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of this rank's tokens over the whole sequence.

        Args:
            q: q_BTHK with rope applied, ordered [nope | rope] (batch_dim_idx 0), or q_TBHK (1).
            kv: kv_BTHP (or kv_TBHP), per head [key without position: N | value: V]; with `expand` latent_BTL.
            k_shared: k_BTR (or k_TBR) with rope applied, or, without `expand`, what `gather_shared_key` returned.
            batch_dim_idx: 0 for [B, T, H, .], 1 for [T, B, H, .].
            rotary_pos_emb: takes the place it has in DeepSpeed's class; must be None.
            expand: `expand(latent_BSL, heads) -> kv_BSMP` makes keys and values of those heads, a slice, of all tokens
                (latent_SBL -> kv_SBMP with batch_dim_idx 1). Its parameters get the gradient of those heads: the SUM
                over the ranks is that of one process.
            *args, **kwargs: handed on to `local_attention`.

        All tensors have one dtype. T and B must be the same on all ranks of the group: a difference
        cannot be noticed here without a further collective (`parallelize` checks it once per forward).

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit the widths, mixed dtypes, fewer heads than ranks.
        """
        if expand is not None:
            if isinstance(k_shared, PendingKey):
                raise ValueError(
                    "with expand the shared key is gathered together with the latents: give it as a tensor, not to "
                    "gather_shared_key first."
                )
            self._check_call(batch_dim_idx, rotary_pos_emb, q=q, latent=kv, k_shared=k_shared)
            self.latents.check(q, kv, k_shared, batch_dim_idx)
            HeadPartition(q.shape[2], self.group.size)
            if self.head_chunks > 1:
                return self._in_chunks(q, kv, k_shared, batch_dim_idx, expand, args, kwargs)
            own = self._from_latents(q, kv, k_shared, batch_dim_idx, expand)
            return self._attend(*own, q.shape[2], batch_dim_idx, args, kwargs)
        pending = k_shared if isinstance(k_shared, PendingKey) else None
        if pending is not None:
            if pending.batch_dim_idx != batch_dim_idx:
                raise ValueError(
                    f"k_shared was gathered with batch_dim_idx={pending.batch_dim_idx}, not {batch_dim_idx}."
                )
            k_shared = by_token(pending.own_TBR, batch_dim_idx)
        self._check(q, kv, k_shared, batch_dim_idx, rotary_pos_emb)
        if self.head_chunks > 1:
            return self._in_chunks(q, kv, k_shared, batch_dim_idx, None, args, kwargs, pending)
        if pending is None:
            pending = self.gather_shared_key(k_shared, batch_dim_idx)
        q_SBMK, k_SBMK, v_SBMV = _PackedExchange.apply(
            by_token(q, batch_dim_idx),
            by_token(kv, batch_dim_idx),
            pending.own_TBR,
            pending.gathered_SBR,
            self.latents.nope_dim,
            self.group,
            batch_dim_idx == 0,
        )
        own = (by_token(x, batch_dim_idx) for x in (q_SBMK, k_SBMK, v_SBMV))
        return self._attend(*own, q.shape[2], batch_dim_idx, args, kwargs)

    def _from_latents(
        self, q: Tensor, latent: Tensor, k_shared: Tensor, batch_dim_idx: int, expand: Expand
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the own heads, in the layout of the call."""
        H, group, batch_first = q.shape[2], self.group, batch_dim_idx == 0
        if group.size > 1:
            q_TBHK = by_token(q, batch_dim_idx)
            # The latents leave first, and are expanded while the queries travel.
            pending = start_gather_rows([latent, k_shared], group, batch_first)
            pending_q = start_tokens_to_heads([q_TBHK], H, group)
            latent, k_shared = gather_rows([latent, k_shared], group, batch_first, pending)
        k, v = self.latents.expand(latent, k_shared, batch_dim_idx, self.query_heads(H), expand)
        if group.size > 1:
            (q_SBMK,) = TokensToHeads.apply(H, group, batch_first, pending_q, q_TBHK)
            q = by_token(q_SBMK, batch_dim_idx)
        return q, k, v

    def _in_chunks(
        self,
        q: Tensor,
        kv: Tensor,
        k_shared: Tensor,
        batch_dim_idx: int,
        expand: Expand | None,
        args: tuple,
        kwargs: dict[str, Any],
        pending_key: PendingKey | None = None,
    ) -> Tensor:
        """Part after part of the own heads: exchange, expansion, attention and the output's way back."""
        group, batch_first = self.group, batch_dim_idx == 0
        chunks = HeadChunks(q.shape[2], group.size, self.head_chunks)
        n, sizes, alone = chunks.count, chunks.sizes, group.size == 1
        # Split, not sliced: each slice's backward would write a gradient of all heads.
        travelling = [by_token(x, batch_dim_idx).split(sizes, 2) for x in ((q,) if expand else (q, kv))]

        def start(chunk: int) -> tuple[list[Tensor], Tensor | None]:
            """This part of every rank's heads, and its exchange under way."""
            blocks_TBHD = [torch.cat(parts[chunk::n], 2) for parts in travelling]
            return blocks_TBHD, None if alone else start_tokens_to_heads(blocks_TBHD, sum(sizes[chunk::n]), group)

        gathered = [kv, k_shared] if expand else [k_shared]
        if not alone:
            # The key alone may be on its way already.
            pending = (
                start_gather_rows(gathered, group, batch_first) if pending_key is None else pending_key.gathered_SBR
            )
        under_way = start(0)
        if not alone:
            gathered = gather_rows(gathered, group, batch_first, pending)
        # Of each part: what keys and values are made of (with latents; else it arrives with the queries) and the key.
        shared_by_chunks = zip(*(ForChunks.apply(n, x) for x in gathered), strict=True)
        outs = []
        for c, (heads, shared) in enumerate(zip(chunks.of_rank(group.rank), shared_by_chunks, strict=True)):
            own, arriving = under_way
            if c + 1 < n:
                under_way = start(c + 1)
            if not alone:
                own = TokensToHeads.apply(sum(sizes[c::n]), group, batch_first, arriving, *own)

            def attend(q: Tensor, latent_or_kv: Tensor, key: Tensor, heads: slice = heads) -> Tensor:
                made = expand or (lambda kv, _: kv)
                k, v = self.latents.expand(latent_or_kv, key, batch_dim_idx, heads, made)
                return self.attend_locally(q, k, v, *args, **kwargs)

            out = recomputed(attend, *(by_token(x, batch_dim_idx) for x in own), *shared)
            out_SBMV = by_token(out, batch_dim_idx)
            out_TBHV = out_SBMV if alone else HeadsToTokens.apply(out_SBMV, sum(sizes[c::n]), group, batch_first)
            outs.append(out_TBHV.split(sizes[c::n], 2))
        in_order = [part for of_rank in zip(*outs, strict=True) for part in of_rank]
        return by_token(torch.cat(in_order, 2), batch_dim_idx).contiguous()

    def _check(self, q: Tensor, kv: Tensor, k_shared: Tensor, batch_dim_idx: int, rotary: Any) -> None:
        self._check_call(batch_dim_idx, rotary, q=q, kv=kv, k_shared=k_shared)
        N, R, V = self.latents.nope_dim, self.latents.rope_dim, self.latents.value_dim
        rows, names = ("[B, T" if batch_dim_idx == 0 else "[T, B"), [("q", q, N + R), ("kv", kv, N + V)]
        for name, x, width in names:
            if x.ndim != 4 or x.shape[-1] != width or x.shape[:3] != q.shape[:3]:
                raise ValueError(
                    f"{name} must be {rows}, H, {width}] with the rows and heads of q (nope {N}, rope {R}, value {V}); "
                    f"got {name} {tuple(x.shape)}, q {tuple(q.shape)}."
                )
        self.latents.check_shared(q, k_shared, batch_dim_idx)
        HeadPartition(q.shape[2], self.group.size)


class _PackedExchange(torch.autograd.Function):
    """q_TBHK, kv_TBHP, k_TBR (and its gather, pending) -> q_SBMK, k_SBMK, v_SBMV.

    Forward: one all-to-all; q and v are views of what arrived, K is written once.
    Backward: the key's partial sums leave first, asynchronously, in an all-to-all: each rank sums its
    own heads in fp32 and rounds once. Then one all-to-all brings the gradients of q and kv back, each
    copied once into the wire. Last, the partial sums of all ranks are summed in fp32 and rounded once:
    the gather's adjoint, a reduce-scatter with the same bytes and fewer roundings.
    """

    @staticmethod
    def forward(ctx, q_TBHK, kv_TBHP, k_TBR, pending_SBR, nope_dim: int, group: SequenceGroup, batch_first: bool):
        ctx.group, ctx.batch_first, ctx.nope_dim = group, batch_first, nope_dim
        ctx.heads = H = q_TBHK.shape[2]
        if group.size == 1:
            q_SBMK, kv_SBMP = q_TBHK.view_as(q_TBHK), kv_TBHP
        else:
            buffer_SBW = tokens_to_heads([q_TBHK, kv_TBHP], H, group, "forward")
            q_SBMK, kv_SBMP = own_heads(buffer_SBW, [H, H], [q_TBHK.shape[3], kv_TBHP.shape[3]], H, group)
        key = join_shared_key(kv_SBMP[..., :nope_dim], pending_SBR, batch_first)
        return q_SBMK, key.transpose(0, 1) if batch_first else key, kv_SBMP[..., nope_dim:]

    @staticmethod
    def backward(ctx, dq_SBMK, dk_SBMK, dv_SBMV):
        N, group = ctx.nope_dim, ctx.group
        dq_TBHK = dkv_TBHP = pending_SBR = None
        if ctx.needs_input_grad[2]:
            pending_SBR = return_shared_key_grad(dk_SBMK[..., N:], group.size, group.rank, group.name)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dq_TBHK, dkv_TBHP = heads_to_tokens(
                [dq_SBMK, dk_SBMK[..., :N], dv_SBMV],
                [ctx.heads, ctx.heads],
                ctx.heads,
                group,
                "backward",
                ctx.batch_first,
                pieces_per_block=[1, 2],
            )
        dk_TBR = None if pending_SBR is None else sum_over_ranks(pending_SBR, group.size)
        return dq_TBHK, dkv_TBHP, dk_TBR, None, None, None, None
