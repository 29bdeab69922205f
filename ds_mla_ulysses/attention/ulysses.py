"""DeepSpeed Ulysses for multi-head, grouped-query and multi-query attention.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all query heads · M this rank's query
heads · G all key/value heads · J this rank's key/value heads · K query and key width · V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layout.exchange import TokensToHeads
from ..layout.heads import HeadPartition
from .base import SequenceAttention, check_grouped, tokens_first


class UlyssesAttention(SequenceAttention):
    """DeepSpeed's `DistributedAttention` for MHA, GQA and MQA: one packed exchange in, one exchange out.

    Query heads are shared as evenly as possible, and each rank gets the key/value heads that its query heads
    read, so neither number has to be a multiple of the ranks; there can be fewer key/value heads than ranks.

    | direction | collectives                                      | elements sent per token |
    |-----------|--------------------------------------------------|-------------------------|
    | forward   | all-to-all (q, k, v), all-to-all (output)        | (H+C)(K+V)f             |
    | backward  | all-to-all (output), all-to-all (q, k, v)        | the same                |

    with f = (ranks-1)/ranks where the ranks divide H, and C the key/value heads, each counted once for every
    rank that gets it: G or, where that is more, the ranks. The result and the gradients are those of
    `local_attention` on the whole sequence with all heads; what several ranks say of one key/value head is
    summed in fp32 (or wider) and rounded once. A group of one communicates nothing.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the own
            heads, in the layout that the call came in: q_BSMK, k_BSJK, v_BSJV -> out_BSMV. M is a multiple of
            J, and query head m reads key/value head m // (M/J): where the own heads are not grouped so evenly,
            k and v come repeated, one head per query head (J = M). Otherwise q, k and v are strided views of
            the receive buffer, contiguous in the last dimension.
        group: the sequence group, a torch ProcessGroup or a SequenceGroup.
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
        """Attention of this rank's tokens over the whole sequence.

        Args:
            q: q_BTHK with rope applied (batch_dim_idx 0), or q_TBHK (1).
            k: k_BTGK with rope applied (or k_TBGK); query head h reads key/value head h // (H/G).
            v: v_BTGV (or v_TBGV).
            batch_dim_idx: 0 for [B, T, H, .], 1 for [T, B, H, .].
            rotary_pos_emb: takes the place it has in DeepSpeed's class; must be None.
            *args, **kwargs: handed on to `local_attention`.

        All tensors have one dtype. T and B must be the same on all ranks of the group: a difference cannot
        be noticed here without a further collective.

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit each other, mixed dtypes, query heads that are no multiple of
                the key/value heads, fewer query heads than ranks.
        """
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_first)
        H, group = q.shape[2], self.group
        repeats = HeadPartition(k.shape[2], group.size, H).repeats(group.rank)
        if group.size > 1:
            blocks_TBHD = [tokens_first(x, batch_first) for x in (q, k, v)]
            own_SBMD = TokensToHeads.apply(H, group, batch_first, None, *blocks_TBHD)
            q, k, v = (tokens_first(x, batch_first) for x in own_SBMD)
        if repeats is not None:
            k, v = _repeated(k, repeats), _repeated(v, repeats)
        return self._attend(q, k, v, H, batch_first, args, kwargs)


def _repeated(x_BSJD: Tensor, repeats: list[int]) -> Tensor:
    """One head per query head. Backward: their gradients are summed by one `sum`, so rounded once."""
    heads = x_BSJD.split(1, dim=2)
    return torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(heads, repeats, strict=True)], dim=2)
