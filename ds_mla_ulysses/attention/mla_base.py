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
from ..layout.gather import gather_rows, start_gather_rows
from ..layout.heads import chunks_of_rank
from .base import SequenceAttention
from .chunks import attend_in_chunks, chunks_of, for_chunks
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
        super().__init__(local_attention, group, head_chunks)
        self.latents = Latents(nope_dim, rope_dim, value_dim)

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
        """Exchanges, expands and attends with one head chunk after the other, and returns the output of all.

        The next chunk's exchange is in flight while a chunk computes. Each chunk's keys and values are freed after it and
        recomputed in backward.

        Args:
            by_heads: the tensors that are exchanged by heads: q_BTHK, perhaps kv_BTHP (or T before B).
            gathered: the tensors that are gathered once: perhaps latent_BTL, and k_BTR (or T before B).
            pending: the gather of the last `gathered`, if it is the only one and under way already.
            expand: computes kv of a chunk's heads from the gathered latent, or returns the kv that was exchanged.
        """
        group = self.group
        chunks_of_rank(by_heads[0].shape[2], group.size, self.head_chunks, group.rank)  # raises before anything is sent
        if group.size > 1 and pending is None:
            pending = start_gather_rows(gathered, group, batch_first)
        chunks = chunks_of(by_heads, group, self.head_chunks, batch_first)
        if group.size > 1:
            gathered = gather_rows(gathered, group, batch_first, pending)

        def attend(heads: slice, q: Tensor, latent_or_kv: Tensor, key: Tensor) -> Tensor:
            k, v = self.latents.expand(latent_or_kv, key, batch_first, heads, expand)
            return self.attend_locally(q, k, v, *args, **kwargs)

        shared = zip(*(for_chunks(self.head_chunks, x) for x in gathered), strict=True)
        return attend_in_chunks(chunks, shared, attend)
