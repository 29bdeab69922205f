"""Sequence parallelism that gathers keys and values, while queries stay where they are.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all query heads · G all key/value heads ·
K query and key width · V value width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..layout.exchange import GatherTokens
from .base import SequenceAttention, by_token, check_grouped, check_output


class GatherKVAttention(SequenceAttention):
    """Every rank's queries, all heads, over the keys and values of the whole sequence: one all-gather in, none out.

    | direction | collectives                                                  | elements sent per token |
    |-----------|--------------------------------------------------------------|-------------------------|
    | forward   | all-gather (k, v)                                            | G(K+V)(ranks-1)         |
    | backward  | all-to-all (k, v: partial sums of every rank's queries)      | the same                |

    That is fewer than `UlyssesAttention` sends while ranks * G < H + G, and any number of ranks will do, however few
    the heads; but every rank holds the keys and values of all heads. What the ranks say of one token's key and value
    is summed in fp32 (or wider) and rounded once. A group of one communicates nothing.

    Args:
        local_attention: `local_attention(q, k, v, *args, first_query=r, **kwargs) -> out` in the layout that the call
            came in: q_BTHK, k_BSGK, v_BSGV -> out_BTHV. Query t has place r + t in the whole sequence. k and v are
            strided views of the receive buffer, contiguous in the last dimension.
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
        """Attention of this rank's tokens over the whole sequence; as `UlyssesAttention.forward`."""
        self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_dim_idx)
        first_query, group = self.group.rank * q.shape[1 - batch_dim_idx], self.group
        if group.size > 1:
            blocks_TBGD = [by_token(x, batch_dim_idx) for x in (k, v)]
            k, v = (
                by_token(x, batch_dim_idx) for x in GatherTokens.apply(group, batch_dim_idx == 0, None, *blocks_TBGD)
            )
        out = self.local_attn(q, k, v, *args, first_query=first_query, **kwargs)
        check_output(out, q, v)
        return out.contiguous()
