"""gather_kv: keys and values are gathered, with MLA their latents, and queries stay on their rank.

Shape letters: B batch · T tokens of this rank · S tokens of the whole sequence · H all heads · K query and key width ·
L latent width of keys and values · R width of the shared RoPE key · P packed key and value width of one head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.gather import GatherKVAttention, GatherKVMLAAttention
from ...planner.strategies.gather_kv import GatherKV
from .base import HeadsLayer, MLALayer


class GatherKVHeadsLayer(HeadsLayer):
    """Keys and values of all heads are gathered."""

    rules, attention_class = GatherKV(), GatherKVAttention


class GatherKVMLALayer(MLALayer):
    """KV latents and the RoPE key are gathered, and each rank expands all heads of all tokens."""

    rules, attention_class = GatherKV(), GatherKVMLAAttention
    attention: GatherKVMLAAttention

    def attend(self, query_BTHK: Tensor, latent_B1TL: Tensor, key_B1TR: Tensor, settings: dict[str, Any]) -> Tensor:
        shared = latent_B1TL.squeeze(1), key_B1TR.squeeze(1)
        # Rows of the projection are only used for head chunks. All heads at once come from the whole projection, which
        # may have an adapter.
        expand = self.expand if self.replaced else self._expand_whole
        return self.attention(query_BTHK, *shared, expand=expand, **settings)

    def _expand_whole(self, latent_BSL: Tensor, heads: slice) -> Tensor:
        return self.expand_all(latent_BSL)
