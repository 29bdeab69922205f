"""DeepSpeed Ulysses with MoBA as the local attention: every query picks its blocks from the whole sequence.

Letters: B batch · T local tokens · S all tokens (T * ranks) · H all query heads · M local query heads ·
G all KV heads · J local KV heads · K query and key width · V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.group import SPLITS, SequenceGroup
from ..errors import UlyssesTypeError, UlyssesValueError
from ..moba import MoBAConfig, moba_attention
from ..planner.strategies import GatherKV, Packed
from .base import SequenceAttention
from .gather import GatherKVAttention
from .ulysses import UlyssesAttention

_STRATEGIES: dict[str, type[UlyssesAttention] | type[GatherKVAttention]] = {
    Packed.name: UlyssesAttention,
    GatherKV.name: GatherKVAttention,
}


class UlyssesMoBAAttention(SequenceAttention):
    """DeepSpeed's `DistributedAttention` whose local attention is MoBA over the whole sequence.

    | strategy    | collectives in forward                                        | see                 |
    |-------------|---------------------------------------------------------------|---------------------|
    | "packed"    | one all-to-all for q, k and v, another one for the output     | `UlyssesAttention`  |
    | "gather_kv" | one all-gather for k and v; queries and output stay local     | `GatherKVAttention` |

    Under both strategies, each rank has all keys of its heads before the gate runs. Every query therefore selects the
    same blocks as in one process. Blocks begin at each document's first token, independent of where shards begin. The
    result and the gradients are those of `moba_attn_varlen` on the whole sequence with all heads.

    Args:
        config: the block size, top_k and implementation. Its other settings are ignored.
        group: the sequence-parallel group, a torch ProcessGroup or a SequenceGroup.
        strategy: one of the strategies in the table.
        head_chunks: the number of chunks of query heads that the strategy's class attends with one after the other. Each
            query head selects its blocks by itself, so the selection stays the same. The means of a block are computed
            for each chunk that reads it.

    Source: arXiv 2502.13189.

    Raises:
        TypeError: the config is not a MoBAConfig.
        ValueError: the strategy is unknown, the config has one number for each layer, or head_chunks is not an int >= 1.
    """

    splits = SPLITS  # the strategy's own class refuses the splits that it does not support

    def __init__(
        self,
        config: MoBAConfig,
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        strategy: str = "packed",
        head_chunks: int = 1,
    ) -> None:
        if not isinstance(config, MoBAConfig):
            raise UlyssesTypeError(f"config must be a MoBAConfig, got {config!r}.")
        if strategy not in _STRATEGIES:
            raise UlyssesValueError(f"strategy must be one of {list(_STRATEGIES)}, got {strategy!r}.")
        if not isinstance(config.block_size, int) or not isinstance(config.top_k, int):
            raise UlyssesValueError(
                "UlyssesMoBAAttention is one layer's attention and takes one block_size and one top_k, got "
                f"block_size={config.block_size!r}, top_k={config.top_k!r}: pass the numbers of that layer."
            )
        super().__init__(self._of_rows, group, head_chunks)
        self.config, self.strategy = config, strategy
        self._settings = config.block_size, config.top_k, config.implementation
        self._exchange = _STRATEGIES[strategy](self._of_rows, self.group, head_chunks=head_chunks)

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
        """Computes MoBA of the local queries over the whole sequence.

        Args:
            q, k, v, batch_dim_idx, rotary_pos_emb: as in `UlyssesAttention.forward`.
            cu_seqlens: int32 or int64 [documents + 1], the boundaries of the documents among all B*S tokens of the
                whole rows, one row after the other. It must be the same on all ranks. None means one document per row.
            scale: multiplies the scores in the softmax. None means K ** -0.5.

        Returns:
            out_BTHV, or out_TBHV if batch_dim_idx is 1. It is contiguous.

        Raises:
            TypeError: there are more positional arguments, or cu_seqlens is not a tensor.
            ValueError: as in `UlyssesAttention.forward`, or the boundaries do not fit the tokens.
        """
        if args:
            raise UlyssesTypeError(f"unexpected arguments {args!r}: pass cu_seqlens and scale by keyword.")
        settings = {"batch_first": batch_dim_idx == 0, "cu_seqlens": cu_seqlens, "scale": scale}
        return self._exchange(q, k, v, batch_dim_idx, rotary_pos_emb, **settings)

    # The gate reads boundaries as Python numbers. If they were traced, each layout would need another graph.
    @torch.compiler.disable
    def _of_rows(self, q: Tensor, k: Tensor, v: Tensor, *, batch_first: bool, **settings: Any) -> Tensor:
        """Computes q_BTMK, k_BSJK, v_BSJV -> out_BTMV over whole rows, batch first or second as in the call."""
        q_BTMK, k_BSJK, v_BSJV = (x if batch_first else x.transpose(0, 1) for x in (q, k, v))
        block_size, top_k, implementation = self._settings
        out_BTMV = moba_attention(q_BTMK, k_BSJK, v_BSJV, block_size, top_k, implementation=implementation, **settings)
        return out_BTMV if batch_first else out_BTMV.transpose(0, 1)
