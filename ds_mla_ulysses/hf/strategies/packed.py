"""packed: Q, K and V of each head travel in one all-to-all.

Shape letters: B batch · T tokens of this rank · H all heads · K query and key width · V value width · L latent width of
keys and values · R width of the shared RoPE key · P packed key and value width of one head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.mla import UlyssesMLAAttention
from ...attention.ulysses import UlyssesAttention
from ...planner.strategies.packed import Packed
from .base import HeadsLayer, MLALayer


class PackedHeadsLayer(HeadsLayer):
    """Queries, keys and values travel by heads."""

    rules, attention_class = Packed(), UlyssesAttention


class PackedMLALayer(MLALayer):
    """Each rank expands all heads of its tokens, which then travel; the RoPE key is gathered during the expansion."""

    rules, attention_class = Packed(), UlyssesMLAAttention
    attention: UlyssesMLAAttention

    def attend(self, query_BTHK: Tensor, latent_B1TL: Tensor, key_B1TR: Tensor, settings: dict[str, Any]) -> Tensor:
        pending = self.attention.gather_shared_key(key_B1TR.squeeze(1))
        kv_BTHP = self.expand_all(latent_B1TL.squeeze(1))
        return self.attention(query_BTHK, kv_BTHP, pending, **settings)
