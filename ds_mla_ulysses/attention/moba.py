"""DeepSpeed Ulysses with Mixture of Block Attention inside: every query gates over the whole sequence.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all query heads · M query heads here · G all
key/value heads · J key/value heads here · K query and key width · V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.group import SPLITS, SequenceGroup
from ..moba import MoBAConfig, moba_attention
from ..planner.strategies import GatherKV, Packed
from .base import SequenceAttention
from .gather import GatherKVAttention
from .ulysses import UlyssesAttention

_STRATEGIES = {Packed.name: UlyssesAttention, GatherKV.name: GatherKVAttention}


class UlyssesMoBAAttention(SequenceAttention):
    """DeepSpeed's `DistributedAttention` whose local attention is MoBA over the whole sequence.

    | strategy    | what travels                                                | see                 |
    |-------------|-------------------------------------------------------------|---------------------|
    | "packed"    | q, k, v in one all-to-all; the output in another            | `UlyssesAttention`  |
    | "gather_kv" | k and v in one all-gather; queries and output stay          | `GatherKVAttention` |

    Block means and scores belong to heads and to documents, and either way the keys of whole documents come
    together before the gate, so every query selects the blocks that it selects in one process. Blocks begin at each
    document's first token, wherever ranks begin. The result and the gradients are those of `moba_attn_varlen` on the
    whole sequence with all heads.

    Args:
        config: block size, top-k and implementation; which layers run MoBA is not this class's affair.
        group: the sequence group, a torch ProcessGroup or a SequenceGroup.
        strategy: one of the table.

    Source: arXiv 2502.13189.

    Raises:
        ValueError: an unknown strategy, a config with numbers for each layer.
    """

    splits = SPLITS  # the exchange that it takes knows which are its own

    def __init__(
        self,
        config: MoBAConfig,
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        strategy: str = "packed",
    ) -> None:
        if strategy not in _STRATEGIES:
            raise ValueError(f"strategy must be one of {list(_STRATEGIES)}, got {strategy!r}.")
        if not isinstance(config.moba_chunk_size, int) or not isinstance(config.moba_topk, int):
            raise ValueError("one attention has one moba_chunk_size and one moba_topk: give those of its layer.")
        super().__init__(self._of_rows, group)
        self.config, self.strategy = config, strategy
        self._exchange = _STRATEGIES[strategy](self._of_rows, self.group)

    def query_heads(self, heads: int) -> slice:
        """Returns the query heads that the class of the strategy attends with on this rank."""
        return self._exchange.query_heads(heads)

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
        return self._exchange(q, k, v, batch_dim_idx, rotary_pos_emb, **settings)

    # Boundaries are Python numbers to the gate: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def _of_rows(self, q: Tensor, k: Tensor, v: Tensor, *, batch_first: bool, **settings: Any) -> Tensor:
        """Queries and heads here over whole rows, q_BTMK, k_BSJK, v_BSJV -> out_BTMV, in the layout of the call."""
        rows = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
        blocks, implementation = (self.config.moba_chunk_size, self.config.moba_topk), self.config.implementation
        out_BTMV = moba_attention(*rows, *blocks, implementation=implementation, **settings)
        return out_BTMV if batch_first else out_BTMV.transpose(0, 1)
