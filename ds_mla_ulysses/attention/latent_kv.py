"""DeepSpeed Ulysses for Multi-head Latent Attention, with the KV latents gathered and expanded for the local heads.

Shape letters:
    B batch                             N key width without position
    T tokens of this rank               R width of the shared RoPE key
    S tokens of the whole sequence      K = N + R, query and key width
    H all query heads                   V value width
    M query heads of this rank          P = N + V, packed key and value of one head
    L latent width
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..errors import UlyssesValueError
from ..layout.exchange import TokensToHeads, start_tokens_to_heads
from ..layout.gather import gather_rows, start_gather_rows
from .base import tokens_first
from .expansion import Expand
from .mla import PendingKey
from .mla_base import MLAHeadExchange


class LatentKVMLAAttention(MLAHeadExchange):
    """DeepSpeed's `DistributedAttention` for MLA: queries travel by heads, KV latents and RoPE key are gathered.

    Each rank expands the latents of all tokens into keys and values of its local heads. This is as much work as
    expanding its own tokens for all heads.

    | direction | collectives                                                          | elements sent per token |
    |-----------|----------------------------------------------------------------------|-------------------------|
    | forward   | all-gather (latent, key), all-to-all (q), all-to-all (output)        | H(K+V)f + (L+R)(ranks-1)|
    | backward  | all-to-all (output), all-to-all (q), all-to-all (latent, key: partial sums) | the same         |

    Here f = (ranks-1)/ranks if H is divisible by the number of ranks. Otherwise the first H % ranks ranks have one head
    more than the others. The result and the gradients are those of `local_attention` on the whole sequence with all
    heads. A group of one rank communicates nothing.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the local heads, in
            the call's layout: q_BSMK, k_BSMK, v_BSMV -> out_BSMV (or S before B). q is a strided view of the receive
            buffer, contiguous in the last dimension.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
        nope_dim, rope_dim, value_dim: N, R and V.
        head_chunks: the number of chunks of local heads that are exchanged, expanded and attended with one after the
            other, as in `UlyssesMLAAttention`.
    """

    def forward(
        self,
        q: Tensor,
        latent: Tensor,
        k_shared: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        expand: Expand,
        **kwargs: Any,
    ) -> Tensor:
        """Computes attention of this rank's tokens over the whole sequence.

        Args:
            q: q_BTHK with RoPE applied, ordered [nope | rope] (batch_dim_idx 0), or q_TBHK (1).
            latent: latent_BTL (or latent_TBL).
            k_shared: k_BTR (or k_TBR) with RoPE applied.
            batch_dim_idx: 0 for [B, T, H, .], 1 for [T, B, H, .].
            rotary_pos_emb: exists for DeepSpeed's signature only and must be None.
            expand: `expand(latent_BSL, heads) -> kv_BSMP` computes keys and values of a slice of the heads for all
                tokens (latent_SBL -> kv_SBMP with batch_dim_idx 1), per head [key without position: N | value: V]. Its
                parameters get the gradient of those heads: the SUM over the ranks is the gradient of a single process.
            *args, **kwargs: passed on to `local_attention`.

        All tensors have one dtype. T and B must be the same on all ranks of the group: checking that would cost one more
        collective (`parallelize` checks it once per forward).

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit the widths, mixed dtypes, fewer heads than ranks.
        """
        if isinstance(k_shared, PendingKey):
            raise UlyssesValueError(
                "LatentKVMLAAttention gathers the shared key together with the latents: pass the key as a tensor, not "
                "the result of gather_shared_key."
            )
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, latent=latent, k_shared=k_shared)
        self.latents.check(q, latent, k_shared, batch_first)
        heads = self.query_heads(q.shape[2])
        if self.head_chunks > 1:
            return self._attend_in_chunks([q], [latent, k_shared], None, expand, batch_first, args, kwargs)
        local = self._exchange(q, latent, k_shared, batch_first, heads, expand)
        return self._attend(*local, q.shape[2], batch_first, args, kwargs)

    def _exchange(
        self, q: Tensor, latent: Tensor, k_shared: Tensor, batch_first: bool, heads: slice, expand: Expand
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of the local heads, in the call's layout."""
        H, group = q.shape[2], self.group
        if group.size == 1:
            return q, *self.latents.expand(latent, k_shared, batch_first, heads, expand)
        q_TBHK = tokens_first(q, batch_first)
        # The latents leave first, and are expanded while the queries travel.
        pending = start_gather_rows([latent, k_shared], group, batch_first)
        pending_q = start_tokens_to_heads([q_TBHK], H, group)
        latent, k_shared = gather_rows([latent, k_shared], group, batch_first, pending)
        k, v = self.latents.expand(latent, k_shared, batch_first, heads, expand)
        (q_SBMK,) = TokensToHeads.apply(H, group, batch_first, pending_q, q_TBHK)
        return tokens_first(q_SBMK, batch_first), k, v
