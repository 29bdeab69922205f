"""DeepSpeed Ulysses for multi-head, grouped-query and multi-query attention.

Shape letters:
    B batch                             G all KV heads
    T tokens of this rank               J KV heads of this rank
    S tokens of the whole sequence      K query and key width
    H all query heads                   V value width
    M query heads of this rank          D width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.group import SequenceGroup
from ..layout.exchange import TokensToHeads, start_tokens_to_heads
from ..layout.heads import HeadChunks, HeadPartition, local_repeats
from .base import SequenceAttention, check_grouped, rows_of, tokens_first
from .chunks import attend_grouped_in_chunks, chunks_of


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

    With several head chunks, keys and values are exchanged once, and queries and output in chunks of each rank's heads,
    one chunk after the other. The bytes are the same:

    | direction | collectives, n = head_chunks                                   | elements sent per token |
    |-----------|----------------------------------------------------------------|-------------------------|
    | forward   | all-to-all (k, v), n all-to-alls (q), n all-to-alls (output)   | (H+C)(K+V)f             |
    | backward  | n all-to-alls (output), n all-to-alls (q), all-to-all (k, v)   | the same                |

    Each chunk's attention is computed again in backward, so that its output, its gradients and the buffers of its kernel
    exist for one chunk only. The chunks' gradients of a key or value are summed in fp32 (or wider) and rounded once. The
    queries of the next chunk travel while a chunk is computed.

    Args:
        local_attention: `local_attention(q, k, v, *args, **kwargs) -> out` on full-length tensors of the local heads, in
            the call's layout: q_BSMK, k_BSJK, v_BSJV -> out_BSMV (or S before B). M is a multiple of J, and query head m
            reads KV head m // (M/J). If the local heads cannot be grouped so evenly, k and v are repeated to one head
            per query head (J = M). Otherwise q, k and v are strided views of the receive buffer, contiguous in the last
            dimension. With several head chunks it is called for one chunk of the local heads after the other, and again
            in backward. If a chunk cannot be grouped evenly, it is called for parts that can, instead of repeating k and v.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
        head_chunks: the number of head chunks, at most the fewest query heads that a rank has.

    Source: arXiv 2602.21196 (UPipe) for head chunks.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        *,
        head_chunks: int = 1,
    ) -> None:
        super().__init__(local_attention, group, head_chunks)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        per_head: Mapping[str, Tensor] | None = None,
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
            per_head: more keyword arguments of `local_attention`, tensors with one row for each of the H query heads, such
                as attention sinks. A call gets the rows of its heads.

        All tensors have one dtype. T and B must be the same on all ranks of the group: checking that would cost one more
        collective.

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: shapes that do not fit each other, mixed dtypes, query heads that are not a multiple of the KV
                heads, fewer query heads than ranks, a rank with fewer query heads than head chunks.
        """
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_first)
        H, G, group = q.shape[2], k.shape[2], self.group
        if self.head_chunks > 1:
            return self._attend_in_chunks(q, k, v, batch_first, args, per_head, kwargs)
        kwargs |= rows_of(per_head, self.query_heads(H))
        repeats = local_repeats(G, group.size, H, group.rank)
        if group.size > 1:
            blocks_TBHD = [tokens_first(x, batch_first) for x in (q, k, v)]
            local_SBMD = TokensToHeads.apply(H, group, batch_first, None, *blocks_TBHD)
            q, k, v = [tokens_first(x, batch_first) for x in local_SBMD]
        if repeats is not None:
            k, v = _repeated(k, repeats), _repeated(v, repeats)
        return self._attend(q, k, v, H, batch_first, args, kwargs)

    def _attend_in_chunks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_first: bool,
        args: tuple[Any, ...],
        per_head: Mapping[str, Tensor] | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Exchanges keys and values once, and attends with one head chunk after the other."""
        H, G, group = q.shape[2], k.shape[2], self.group
        HeadPartition(G, group.size, H), HeadChunks(H, group.size, self.head_chunks)  # raise before anything is sent
        kv_TBGD = [tokens_first(x, batch_first) for x in (k, v)]
        pending = start_tokens_to_heads(kv_TBGD, H, group) if group.size > 1 else None
        chunks = chunks_of([q], group, self.head_chunks, batch_first)
        if pending is not None:
            kv_SBJD = TokensToHeads.apply(H, group, batch_first, pending, *kv_TBGD)
            k, v = (tokens_first(x, batch_first) for x in kv_SBJD)

        def attend(heads: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attend_locally(q, k, v, *args, **kwargs, **rows_of(per_head, heads))

        return attend_grouped_in_chunks(chunks, k, v, H // G, attend)


def _repeated(x_BSJD: Tensor, repeats: list[int]) -> Tensor:
    """Repeats KV heads to one head per query head.

    Backward: one `sum` adds the gradients of each head, so that they are rounded once.
    """
    heads = x_BSJD.split(1, dim=2)
    return torch.cat([x.expand(-1, -1, n, -1) for x, n in zip(heads, repeats, strict=True)], dim=2)
