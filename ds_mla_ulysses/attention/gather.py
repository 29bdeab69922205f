"""Sequence parallelism that gathers keys and values, while queries stay on their rank.

Shape letters:
    B batch                             K query and key width (MLA: K = N + R)
    T tokens of this rank               V value width
    S tokens of the whole sequence      N key width without position
    H all query heads                   R width of the shared RoPE key
    G all KV heads                      L latent width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..comm.group import SPLITS, SequenceGroup
from ..layout.gather import GatherTokens, gather_rows
from ..layout.heads import HeadPartition, chunks_of_rank
from ..layout.split import local_runs
from .base import SequenceAttention, check_grouped, rows_of, tokens_first
from .chunks import LocalChunks, attend_grouped_in_chunks
from .expansion import Expand, Latents


class GatherKVAttention(SequenceAttention):
    """The local queries, all heads, attend over the keys and values of the whole sequence: one all-gather in, none out.

    | direction | collectives                                                  | elements sent per token |
    |-----------|--------------------------------------------------------------|-------------------------|
    | forward   | all-gather (k, v)                                            | G(K+V)(ranks-1)         |
    | backward  | all-to-all (k, v: partial sums of every rank's queries)      | the same                |

    This is less than `UlyssesAttention` sends if ranks * G < H + G, and the number of ranks is not limited by the number
    of heads. The price is that every rank holds the keys and values of all heads. The ranks' gradients of a token's key
    and value are summed in fp32 (or wider) and rounded once. A group of one rank communicates nothing.

    With the split "contiguous", the last rank's queries see the most keys and the first rank's the fewest. With
    "head_tail", causal attention is the same work on all ranks.

    With several head chunks, the queries attend in chunks of their heads, one after the other, and again in backward. The
    collectives are the same. The chunks' gradients of a key or value are summed in fp32 (or wider) and rounded once.

    Args:
        local_attention: `local_attention(q, k, v, *args, first_query=r, **kwargs) -> out` in the call's layout: q_BTHK,
            k_BSGK, v_BSGV -> out_BTHV (or T and S before B). Query t has position r + t in the whole sequence. k and v
            are strided views, contiguous in the last dimension. With "head_tail" it is called once for each of the two
            runs of consecutive tokens that the rank has.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
        head_chunks: the number of chunks of query heads, at most H.
    """

    splits = SPLITS

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        *,
        head_chunks: int = 1,
    ) -> None:
        super().__init__(local_attention, group, head_chunks)

    def query_heads(self, heads: int) -> slice:
        """Returns all heads, because every rank attends with all of them."""
        return slice(0, heads)

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
        """Computes attention of this rank's tokens over the whole sequence, as `UlyssesAttention.forward` does.

        Raises:
            ValueError: shapes that do not fit each other, mixed dtypes, query heads that are not a multiple of the KV
                heads, a number of tokens that the split does not divide, fewer query heads than head chunks.
        """
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_first)
        H, G = q.shape[2], k.shape[2]
        HeadPartition(G, 1, H)  # raises unless H is a multiple of G
        heads = chunks_of_rank(H, 1, self.head_chunks, 0)
        if self.group.size > 1:
            blocks_TBGD = [tokens_first(x, batch_first) for x in (k, v)]
            blocks_SBGD = GatherTokens.apply(self.group, batch_first, None, *blocks_TBGD)
            k, v = [tokens_first(x, batch_first) for x in blocks_SBGD]

        def attend(heads: slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend_runs(q, k, v, batch_first, args, kwargs | rows_of(per_head, heads))

        if len(heads) == 1:
            return attend(heads[0], q, k, v)
        return attend_grouped_in_chunks(LocalChunks([q], heads), k, v, H // G, attend)

    def _attend_runs(
        self, q: Tensor, k: Tensor, v: Tensor, batch_first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Attends with the local queries over all keys, one run of consecutive tokens after the other; contiguous."""
        dim = 1 if batch_first else 0
        runs = local_runs(self.group, q.shape[dim])
        outs = []
        for run, q_run in zip(runs, q.split([run.stop - run.start for run in runs], dim), strict=True):
            outs.append(self.attend_locally(q_run, k, v, *args, first_query=run.start, **kwargs))
        return outs[0].contiguous() if len(outs) == 1 else torch.cat(outs, dim)


class GatherKVMLAAttention(GatherKVAttention):
    """`GatherKVAttention` for MLA: latents and the shared RoPE key are gathered, every rank expands all heads.

    | direction | collectives                                                  | elements sent per token |
    |-----------|--------------------------------------------------------------|-------------------------|
    | forward   | all-gather (latent, key)                                     | (L+R)(ranks-1)          |
    | backward  | all-to-all (latent, key: partial sums)                       | the same                |

    No other MLA class sends fewer bytes. The price is that each rank expands all heads of all tokens, which multiplies
    that work by the number of ranks, and holds the keys and values of all heads.

    Args:
        local_attention, group: as in `GatherKVAttention`.
        nope_dim, rope_dim, value_dim: N, R and V.
        head_chunks: the number of chunks of heads that are expanded and attended with one after the other, and again in
            backward, so that only the keys and values of one chunk exist at once.
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
        super().__init__(local_attention, group, head_chunks=head_chunks)
        self.latents = Latents(nope_dim, rope_dim, value_dim)

    def forward(  # type: ignore[override]  # latents take the place of keys and values
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
        """As `LatentKVMLAAttention.forward`, but `expand` is called for all heads, or for each chunk of them."""
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, latent=latent, k_shared=k_shared)
        self.latents.check(q, latent, k_shared, batch_first)
        if self.group.size > 1:
            latent, k_shared = gather_rows([latent, k_shared], self.group, batch_first)
        heads = chunks_of_rank(q.shape[2], 1, self.head_chunks, 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend_runs(q, k, v, batch_first, args, kwargs)

        return self.latents.attend_in_chunks(q, latent, k_shared, batch_first, heads, expand, attend)
