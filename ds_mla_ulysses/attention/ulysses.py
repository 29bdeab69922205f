"""DeepSpeed Ulysses for multi-head, grouped-query and multi-query attention.

Shape letters:
    B batch                             G all KV heads
    T tokens of this rank               J KV heads of this rank
    S tokens of the whole sequence      K query and key width
    H all query heads                   V value width
    M query heads of this rank          D width of a head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout.exchange import TokensToHeads
from ..layout.heads import local_repeats
from .base import SequenceAttention, check_grouped, tokens_first


class UlyssesAttention(SequenceAttention):
    """DeepSpeed's `DistributedAttention` for MHA, GQA and MQA: one packed all-to-all in, one all-to-all out.

    Query heads are distributed over the ranks as evenly as possible, and each rank gets the KV heads that its query
    heads read. Neither number has to be divisible by the number of ranks, and there can be fewer KV heads than ranks.

    | direction | collectives                                      | elements sent per token |
    |-----------|--------------------------------------------------|-------------------------|
    | forward   | all-to-all (q, k, v), all-to-all (output)        | (H+C)(K+V)f             |
    | backward  | all-to-all (output), all-to-all (q, k, v)        | the same                |

    Here f = (ranks-1)/ranks if H is divisible by the number of ranks. C is the number of KV heads, each counted once for
    every rank that gets it: the larger one of G and the number of ranks. The result and the gradients are those of
    `local_attention` on the whole sequence with all heads. If several ranks have the same KV head, their gradients of it
    are summed in fp32 (or wider) and rounded once. A group of one rank communicates nothing.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the local heads, in
            the call's layout: q_BSMK, k_BSJK, v_BSJV -> out_BSMV (or S before B). M is a multiple of J, and query head m
            reads KV head m // (M/J). If the local heads cannot be grouped so evenly, k and v are repeated to one head
            per query head (J = M). Otherwise q, k and v are strided views of the receive buffer, contiguous in the last
            dimension.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Computes attention of this rank's tokens over the whole sequence.

        Args:
            q: q_BTHK with RoPE applied (batch_dim_idx 0), or q_TBHK (1).
            k: k_BTGK with RoPE applied (or k_TBGK); query head h reads KV head h // (H/G).
            v: v_BTGV (or v_TBGV).
            batch_dim_idx: 0 for [B, T, H, .], 1 for [T, B, H, .].
            rotary_pos_emb: exists for DeepSpeed's signature only and must be None.
            *args, **kwargs: passed on to `local_attention`.

        All tensors have one dtype. T and B must be the same on all ranks of the group: checking that would cost one more
        collective.

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit each other, mixed dtypes, query heads that are not a multiple of the KV
                heads, fewer query heads than ranks.
        """
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_first)
        H, group = q.shape[2], self.group
        repeats = local_repeats(k.shape[2], group.size, H, group.rank)
        if group.size > 1:
            blocks_TBHD = [tokens_first(x, batch_first) for x in (q, k, v)]
            local_SBMD = TokensToHeads.apply(H, group, batch_first, None, *blocks_TBHD)
            q, k, v = [tokens_first(x, batch_first) for x in local_SBMD]
        if repeats is not None:
            k, v = _repeated(k, repeats), _repeated(v, repeats)
        return self._attend(q, k, v, H, batch_first, args, kwargs)


def _repeated(x_BSJD: Tensor, repeats: list[int]) -> Tensor:
    """Repeats KV heads to one head per query head.

    Backward: one `sum` adds the gradients of each head, so that they are rounded once.
    """
    heads = x_BSJD.split(1, dim=2)
    return torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(heads, repeats, strict=True)], dim=2)
