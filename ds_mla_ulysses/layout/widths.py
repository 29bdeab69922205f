"""The widths of attention layers.

Letters:
    H query heads                       V value width
    G KV heads                          L width of the latents of keys and values
    N key width without position        Q width of the latents of queries
    R width of the shared RoPE key
    K query and key width, for MLA N + R
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MLAWidths:
    """The widths of one MLA layer: N, R, V, L and Q (None if queries have no latent), and its number of heads H."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_latent: int | None

    @classmethod
    def of(cls, module: Any) -> MLAWidths:
        """Reads the widths of a Hugging Face MLA attention module."""
        return cls(
            module.num_heads,
            module.qk_nope_head_dim,
            module.qk_rope_head_dim,
            module.v_head_dim,
            module.kv_lora_rank,
            getattr(module, "q_lora_rank", None),
        )

    @property
    def key(self) -> int:
        """K."""
        return self.nope + self.rope


@dataclass(frozen=True)
class HeadWidths:
    """The widths of one layer with multi-head, grouped-query or multi-query attention: H, G, K and V."""

    heads: int
    kv_heads: int
    key: int
    value: int
