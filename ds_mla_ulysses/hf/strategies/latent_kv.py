"""latent_kv: queries travel by heads, KV latents are gathered and expanded for the local heads.

Shape letters: B batch · T tokens of this rank · H all heads · K query and key width · L latent width of keys and values ·
R width of the shared RoPE key.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.latent_kv import LatentKVMLAAttention
from ...planner.strategies.latent_kv import LatentKV
from .base import MLALayer


class LatentKVLayer(MLALayer):
    """Each rank expands the latents of all tokens for its local heads, from rows of `kv_b_proj`."""

    rules, attention_class = LatentKV(), LatentKVMLAAttention
    attention: LatentKVMLAAttention

    def attend(self, query_BTHK: Tensor, latent_B1TL: Tensor, key_B1TR: Tensor, settings: dict[str, Any]) -> Tensor:
        shared = latent_B1TL.squeeze(1), key_B1TR.squeeze(1)
        return self.attention(query_BTHK, *shared, expand=self.expand, **settings)
