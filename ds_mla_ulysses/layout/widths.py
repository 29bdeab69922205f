"""The widths of attention layers.

Letters: H query heads · G key/value heads · N non-positional key width · R shared rope key width · K = N+R query and key
width · V value width · L, Q latents of keys and values, and of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MLAWidths:
    """Widths of one MLA layer: N, R, V, L and Q (None where there is no query latent), and its heads H."""

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
    """Widths of one layer with multi-head, grouped or multi-query attention: H, G, K and V."""

    heads: int
    kv_heads: int
    key: int
    value: int
