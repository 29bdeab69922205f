"""Sequence parallelism that gathers keys and values, while queries stay where they are.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all query heads · G all key/value heads ·
K = N+R query and key width · V value width · P = N+V · L latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.group import SPLITS
from ..layout.exchange import GatherTokens, gather_rows
from ..layout.split import own_runs
from .base import SequenceAttention, check_grouped, tokens_first
from .chunks import HeadChunks, check_count
from .expansion import Expand, Latents


class GatherKVAttention(SequenceAttention):
    """Every rank's queries, all heads, over the keys and values of the whole sequence: one all-gather in, none out.

    | direction | collectives                                                  | elements sent per token |
    |-----------|--------------------------------------------------------------|-------------------------|
    | forward   | all-gather (k, v)                                            | G(K+V)(ranks-1)         |
    | backward  | all-to-all (k, v: partial sums of every rank's queries)      | the same                |

    That is fewer than `UlyssesAttention` sends while ranks * G < H + G, and any number of ranks will do, however few
    the heads; but every rank holds the keys and values of all heads. What the ranks say of one token's key and value
    is summed in fp32 (or wider) and rounded once. A group of one communicates nothing.

    With the split "contiguous" the last rank's queries see the most keys and the first rank's the fewest; with
    "head_tail" causal attention is the same work on all.

    Args:
        local_attention: `local_attention(q, k, v, *args, first_query=r, **kwargs) -> out` in the layout that the call
            came in: q_BTHK, k_BSGK, v_BSGV -> out_BTHV. Query t has place r + t in the whole sequence. k and v are
            strided views, contiguous in the last dimension. With "head_tail" it is called once for each of the two
            runs that the rank's tokens are.
        group: the sequence group, a torch ProcessGroup or a SequenceGroup.
    """

    splits = SPLITS

    def query_heads(self, heads: int) -> slice:
        """All of them."""
        return slice(0, heads)

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
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, k=k, v=v)
        check_grouped(q, k, v, batch_first)
        if self.group.size > 1:
            blocks_TBGD = [tokens_first(x, batch_first) for x in (k, v)]
            blocks_SBGD = GatherTokens.apply(self.group, batch_first, None, *blocks_TBGD)
            k, v = (tokens_first(x, batch_first) for x in blocks_SBGD)
        return self._attend_runs(q, k, v, batch_first, args, kwargs)

    def _attend_runs(
        self, q: Tensor, k: Tensor, v: Tensor, batch_first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Local attention of the queries here over all keys, run by run: contiguous."""
        dim = 1 if batch_first else 0
        runs = own_runs(self.group, q.shape[dim])
        parts = []
        for run, q_run in zip(runs, q.split([run.stop - run.start for run in runs], dim), strict=True):
            parts.append(self.attend_locally(q_run, k, v, *args, first_query=run.start, **kwargs))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)


class GatherKVMLAAttention(GatherKVAttention):
    """`GatherKVAttention` for MLA: the latents and the shared rope key are gathered, every head is expanded everywhere.

    | direction | collectives                                                  | elements sent per token |
    |-----------|--------------------------------------------------------------|-------------------------|
    | forward   | all-gather (latent, key)                                     | (L+R)(ranks-1)          |
    | backward  | all-to-all (latent, key: partial sums)                       | the same                |

    No way of MLA sends fewer bytes. The price: each rank expands the heads of all tokens, which is ranks times the
    work, and holds the keys and values of all heads.

    Args:
        local_attention, group: as of `GatherKVAttention`.
        nope_dim, rope_dim, value_dim: N, R and V.
        head_chunks: parts of the heads that are expanded and attend one after the other, and once more in backward,
            so that keys and values of so large a part only exist at once.
    """

    def __init__(
        self,
        local_attention: Any,
        group: Any,
        *,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        head_chunks: int = 1,
    ) -> None:
        super().__init__(local_attention, group)
        check_count(head_chunks)
        self.latents, self.head_chunks = Latents(nope_dim, rope_dim, value_dim), head_chunks

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
        """As `LatentKVMLAAttention.forward`; `expand` is asked for all heads, or for each part of them."""
        batch_first = self._check_call(batch_dim_idx, rotary_pos_emb, q=q, latent=latent, k_shared=k_shared)
        self.latents.check(q, latent, k_shared, batch_first)
        if self.group.size > 1:
            latent, k_shared = gather_rows([latent, k_shared], self.group, batch_first)
        heads = HeadChunks(q.shape[2], 1, self.head_chunks).of_rank(0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self._attend_runs(q, k, v, batch_first, args, kwargs)

        return self.latents.attend_in_chunks(q, latent, k_shared, batch_first, heads, expand, attend)
