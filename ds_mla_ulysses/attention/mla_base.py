"""The base of the MLA classes that exchange heads: their constructor and their head chunks.

Shape letters:
    B batch                             N key width without position
    T tokens of this rank               R width of the shared RoPE key
    S tokens of the whole sequence      K = N + R, query and key width
    H all query heads                   V value width
    M query heads of this rank          P = N + V, packed key and value of one head
    L latent width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.group import SequenceGroup
from ..layout.exchange import HeadsToTokens, TokensToHeads, start_tokens_to_heads
from ..layout.gather import gather_rows, start_gather_rows
from .base import SequenceAttention, tokens_first
from .chunks import check_count, chunk_sizes, chunks_of_rank, for_chunks, recomputed
from .expansion import Expand, Latents


class MLAHeadExchange(SequenceAttention):
    """The base of `UlyssesMLAAttention` and `LatentKVMLAAttention`, in which each rank attends with some of the heads."""

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

    def _attend_in_chunks(
        self,
        by_heads: Sequence[Tensor],
        gathered: Sequence[Tensor],
        pending: Tensor | None,
        expand: Expand,
        batch_first: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Exchanges, expands and attends with one head chunk after the other, and returns each chunk's output.

        The next chunk's exchange is in flight while a chunk computes. Each chunk's keys and values are freed after it and
        recomputed in backward.

        Args:
            by_heads: the tensors that are exchanged by heads: q_BTHK, perhaps kv_BTHP (or T before B).
            gathered: the tensors that are gathered once: perhaps latent_BTL, and k_BTR (or T before B).
            pending: the gather of the last `gathered`, if it is the only one and under way already.
            expand: computes kv of a chunk's heads from the gathered latent, or returns the kv that was exchanged.
        """
        group, alone = self.group, self.group.size == 1
        H, n = by_heads[0].shape[2], self.head_chunks
        sizes, local_chunks = chunk_sizes(H, group.size, n), chunks_of_rank(H, group.size, n, group.rank)
        # The tensors are split, not sliced: each slice's backward would write a gradient of all heads.
        pieces = [tokens_first(x, batch_first).split(sizes, 2) for x in by_heads]

        def start(chunk: int) -> tuple[list[Tensor], Tensor | None]:
            """Returns this chunk's heads of every rank, and their exchange under way."""
            blocks_TBHD = [torch.cat(of_tensor[chunk::n], 2) for of_tensor in pieces]
            return blocks_TBHD, None if alone else start_tokens_to_heads(blocks_TBHD, sum(sizes[chunk::n]), group)

        if not alone and pending is None:
            pending = start_gather_rows(gathered, group, batch_first)
        under_way = start(0)
        if not alone:
            gathered = gather_rows(gathered, group, batch_first, pending)
        gathered_by_chunk = zip(*(for_chunks(n, x) for x in gathered), strict=True)
        outs = []
        for c, (heads, shared) in enumerate(zip(local_chunks, gathered_by_chunk, strict=True)):
            local, arriving = under_way
            if c + 1 < n:
                under_way = start(c + 1)
            if not alone:
                local = TokensToHeads.apply(sum(sizes[c::n]), group, batch_first, arriving, *local)

            def attend(q: Tensor, latent_or_kv: Tensor, key: Tensor, heads: slice = heads) -> Tensor:
                k, v = self.latents.expand(latent_or_kv, key, batch_first, heads, expand)
                return self.attend_locally(q, k, v, *args, **kwargs)

            out = recomputed(attend, *(tokens_first(x, batch_first) for x in local), *shared)
            out_SBMV = tokens_first(out, batch_first)
            out_TBHV = out_SBMV if alone else HeadsToTokens.apply(out_SBMV, sum(sizes[c::n]), group, batch_first)
            outs.append(out_TBHV.split(sizes[c::n], 2))
        in_order = [piece for of_rank in zip(*outs, strict=True) for piece in of_rank]
        return tokens_first(torch.cat(in_order, 2), batch_first).contiguous()
