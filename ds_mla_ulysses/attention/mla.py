"""DeepSpeed Ulysses for Multi-head Latent Attention, with packed keys and values.

Shape letters:
    B batch                             N key width without position
    T tokens of this rank               R width of the shared RoPE key
    S tokens of the whole sequence      K = N + R, query and key width
    H all query heads                   V value width
    M query heads of this rank          P = N + V, packed key and value of one head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import gather_start, sum_over_ranks
from ..comm.group import SequenceGroup
from ..comm.kept import ARRIVING, kept
from ..errors import UlyssesValueError
from ..layout.exchange import heads_to_tokens, local_heads, tokens_to_heads
from ..layout.shared_key import join_shared_key, return_shared_key_grad
from .base import tokens_first
from .mla_base import MLAHeadExchange


@dataclass(frozen=True)
class PendingKey:
    """The shared RoPE key on its way to all ranks, as `UlyssesMLAAttention.gather_shared_key` returns it.

    It is opaque: only the attention that started the gather may read it, because reading does not wait.
    """

    local_TBR: Tensor
    gathered_SBR: Tensor
    batch_first: bool


class UlyssesMLAAttention(MLAHeadExchange):
    """DeepSpeed's `DistributedAttention` for MLA: one packed all-to-all in, one all-gather, one all-to-all out.

    Every head's query (K wide) and packed key-value (P wide) travel in one all-to-all. The RoPE key, which all heads
    share, is gathered once by an asynchronous all-gather that starts before anything else. The whole keys are written on
    the receiving side, for the local heads only.

    | direction | collectives                                                          | elements sent per token |
    |-----------|----------------------------------------------------------------------|-------------------------|
    | forward   | all-gather (key), all-to-all (q, kv), all-to-all (output)            | H(K+P+V)f + R(ranks-1)  |
    | backward  | all-to-all (output), all-to-all (key, partial sums), all-to-all (q, kv) | the same             |

    Here f = (ranks-1)/ranks if H is divisible by the number of ranks. Otherwise the first H % ranks ranks have one head
    more than the others. The result and the gradients are those of `local_attention` on the whole sequence with all
    heads. A group of one rank communicates nothing. `LatentKVMLAAttention` is the class for latents.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the local heads, in
            the call's layout: q_BSMK, k_BSMK, v_BSMV -> out_BSMV (or S before B). q and v are strided views of the
            receive buffer, contiguous in the last dimension.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
        nope_dim, rope_dim, value_dim: N, R and V.
        head_chunks: the number of chunks of local heads that are exchanged and attended with one after the other, with
            the next chunk's exchange in flight while a chunk computes. Keys of a chunk are recomputed in backward, so
            that those of all local heads never exist at once. The number of all-to-alls is multiplied by head_chunks.
    """

    def gather_shared_key(self, k_shared: Tensor, batch_dim_idx: int = 0) -> PendingKey:
        """Starts the all-gather of the shared RoPE key and returns at once.

        `forward` starts it itself if it gets a tensor. Call this first to overlap the gather with work that `forward`
        depends on, such as the projection that computes kv.
        """
        return self._gather_shared_key(k_shared, batch_dim_idx == 0)

    def _gather_shared_key(self, k_shared: Tensor, batch_first: bool) -> PendingKey:
        k_TBR = tokens_first(k_shared, batch_first)
        local = k_TBR.detach()  # the backward of the exchange returns the gradient
        if self.group.size == 1:
            return PendingKey(k_TBR, local, batch_first)
        gathered = kept(lambda: gather_start(local, self.group.size, self.group.name), ARRIVING)
        return PendingKey(k_TBR, gathered, batch_first)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        k_shared: Tensor | PendingKey,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Computes attention of this rank's tokens over the whole sequence.

        Args:
            q: q_BTHK with RoPE applied, ordered [nope | rope] (batch_dim_idx 0), or q_TBHK (1).
            kv: kv_BTHP (or kv_TBHP), per head [key without position: N | value: V].
            k_shared: k_BTR (or k_TBR) with RoPE applied, or the result of `gather_shared_key`.
            batch_dim_idx: 0 for [B, T, H, .], 1 for [T, B, H, .].
            rotary_pos_emb: exists for DeepSpeed's signature only and must be None.
            *args, **kwargs: passed on to `local_attention`.

        All tensors have one dtype. T and B must be the same on all ranks of the group: checking that would cost one more
        collective (`parallelize` checks it once per forward).

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit the widths, mixed dtypes, fewer heads than ranks.
        """
        if isinstance(k_shared, PendingKey):
            pending, key = k_shared, tokens_first(k_shared.local_TBR, k_shared.batch_first)
        else:
            pending, key = None, k_shared
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, kv=kv, k_shared=key)
        if pending is not None and pending.batch_first != batch_first:
            raise UlyssesValueError(
                f"k_shared was gathered with batch_dim_idx={1 - pending.batch_first:d}, not {batch_dim_idx}."
            )
        self.latents.check_packed(q, kv, key, batch_first)
        H, group = q.shape[2], self.group
        self.query_heads(H)  # raises ValueError if there are fewer heads than ranks
        if self.head_chunks > 1:
            gathered_SBR = None if pending is None else pending.gathered_SBR
            return self._attend_in_chunks([q, kv], [key], gathered_SBR, _as_it_is, batch_first, args, kwargs)
        if pending is None:
            pending = self._gather_shared_key(key, batch_first)
        q_SBMK, k_SBMK, v_SBMV = _PackedExchange.apply(
            tokens_first(q, batch_first),
            tokens_first(kv, batch_first),
            pending.local_TBR,
            pending.gathered_SBR,
            self.latents.nope_dim,
            group,
            batch_first,
        )
        q, k, v = [tokens_first(x, batch_first) for x in (q_SBMK, k_SBMK, v_SBMV)]
        return self._attend(q, k, v, H, batch_first, args, kwargs)


def _as_it_is(kv: Tensor, heads: slice) -> Tensor:
    """The `expand` of a packed exchange: kv of those heads has just arrived."""
    return kv


class _PackedExchange(torch.autograd.Function):
    """q_TBHK, kv_TBHP and k_TBR with its pending gather -> q_SBMK, k_SBMK, v_SBMV.

    Forward: one all-to-all. q and v are views of the receive buffer, K is written once.

    Backward: the partial sums of the key's gradient leave first, asynchronously, in an all-to-all: each rank sums its
    local heads in fp32 and rounds once. Then one all-to-all returns the gradients of q and kv, each copied once into the
    wire. Last, the partial sums of all ranks are summed in fp32 and rounded once. This is the adjoint of the gather, a
    reduce-scatter, with the same bytes and fewer roundings.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_TBHK: Tensor,
        kv_TBHP: Tensor,
        k_TBR: Tensor,
        pending_SBR: Tensor,
        nope_dim: int,
        group: SequenceGroup,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group, ctx.batch_first, ctx.nope_dim = group, batch_first, nope_dim
        ctx.heads = H = q_TBHK.shape[2]
        if group.size == 1:
            q_SBMK, kv_SBMP = q_TBHK.view_as(q_TBHK), kv_TBHP
        else:
            x_SBW = tokens_to_heads([q_TBHK, kv_TBHP], H, group, "forward")
            q_SBMK, kv_SBMP = local_heads(x_SBW, [H, H], [q_TBHK.shape[3], kv_TBHP.shape[3]], H, group)
        key = join_shared_key(kv_SBMP[..., :nope_dim], pending_SBR, batch_first)
        return q_SBMK, key.transpose(0, 1) if batch_first else key, kv_SBMP[..., nope_dim:]

    @staticmethod
    def backward(ctx: Any, dq_SBMK: Tensor, dk_SBMK: Tensor, dv_SBMV: Tensor) -> tuple[Tensor | None, ...]:
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
