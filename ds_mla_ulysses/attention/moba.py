"""DeepSpeed Ulysses with Mixture of Block Attention inside: every head gates over the whole sequence.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all query heads · M this rank's query
heads · G all key/value heads · J this rank's key/value heads · K query and key width · V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.group import SequenceGroup
from ..moba import MoBAConfig, moba_attention, moba_attn_varlen
from .ulysses import UlyssesAttention


class UlyssesMoBAAttention(UlyssesAttention):
    """`UlyssesAttention` whose local attention is MoBA: what travels, and how often, is the same.

    The exchange brings each head's queries and keys of the whole sequence together before the gate, and block
    means and scores belong to heads, so every query selects the blocks that it selects in one process. Blocks
    begin at each document's first token, wherever ranks begin. The result and the gradients are those of
    `moba_attn_varlen` on the whole sequence with all heads.

    Args:
        config: block size, top-k and implementation; which layers run MoBA is not this class's affair.
        group: the sequence group, a torch ProcessGroup or a SequenceGroup.

    Source: arXiv 2502.13189.
    """

    def __init__(self, config: MoBAConfig, group: SequenceGroup | torch.distributed.ProcessGroup | None) -> None:
        super().__init__(self._whole_sequence, group)
        self.config = config

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: None = None,
        *args: Any,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """MoBA of this rank's tokens over the whole sequence.

        Args:
            q, k, v, batch_dim_idx, rotary_pos_emb: as for `UlyssesAttention`.
            cu_seqlens: int [documents + 1], where documents begin and end among all B*S tokens of the whole
                rows, one row after the other; the same on all ranks. None: each row is a document.
            scale: of the scores in the softmax; None: K ** -0.5.

        Returns:
            out_BTHV (or out_TBHV), contiguous.

        Raises:
            ValueError: as `UlyssesAttention`; boundaries that do not fit.
        """
        if args:
            raise ValueError(f"unexpected arguments {args!r}: MoBA takes cu_seqlens and scale by keyword.")
        settings = {"batch_first": batch_dim_idx == 0, "cu_seqlens": cu_seqlens, "scale": scale}
        return super().forward(q, k, v, batch_dim_idx, rotary_pos_emb, **settings)

    # Boundaries are Python numbers to the gate: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def _whole_sequence(
        self, q: Tensor, k: Tensor, v: Tensor, *, batch_first: bool, cu_seqlens: Tensor | None, scale: float | None
    ) -> Tensor:
        """q_BSMK, k_BSJK, v_BSJV -> out_BSMV, in the layout of the call."""
        q_BSMK, k_BSJK, v_BSJV = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
        blocks = self.config.moba_chunk_size, self.config.moba_topk
        how = {"scale": scale, "implementation": self.config.implementation}
        if cu_seqlens is None:
            out_BSMV = moba_attention(q_BSMK, k_BSJK, v_BSJV, *blocks, **how)
        else:
            flat = (x.flatten(0, 1) for x in (q_BSMK, k_BSJK, v_BSJV))
            out_BSMV = moba_attn_varlen(*flat, cu_seqlens, None, *blocks, **how).unflatten(0, q_BSMK.shape[:2])
        return out_BSMV if batch_first else out_BSMV.transpose(0, 1)
