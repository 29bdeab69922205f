"""gather_kv: the numbers and rules of gathering keys and values for queries that stay. See `base` for the letters."""

from __future__ import annotations

from ...comm.group import SPLITS
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import HEAD_LAYERS, MLA_LAYERS, Computed, Description, Strategy


class GatherKV(Strategy):
    """Keys and values are all-gathered, with MLA their latents. Queries stay on their rank."""

    name = "gather_kv"
    descriptions = (
        Description(
            MLA_LAYERS,
            "KV latent and shared RoPE key are gathered; each rank expands all heads; queries stay on their rank",
            "(L+R)(n-1)",
            "(L+R)(n-1)",
        ),
        Description(
            HEAD_LAYERS,
            "keys and values of all heads are gathered; queries stay on their rank",
            "G(K+V)(n-1)",
            "G(K+V)(n-1)",
        ),
    )
    splits = SPLITS
    exchanges_heads = False

    def sliced_projections(self, head_chunks: int) -> tuple[str, ...]:
        # The projection is called for all heads at once unless they are computed in chunks.
        return ("kv_b_proj",) if head_chunks > 1 else ()

    def sent_elements(self, widths: MLAWidths | HeadWidths, ranks: int, rank: int) -> tuple[int, int]:
        if isinstance(widths, MLAWidths):
            gathered = widths.latent + widths.rope
        else:
            gathered = widths.kv_heads * (widths.key + widths.value)
        return gathered * (ranks - 1), gathered * (ranks - 1)

    def collectives(self, widths: MLAWidths | HeadWidths, head_chunks: int = 1) -> int:
        return 2

    def computed(self, work: Work) -> Computed:
        # Every rank expands all heads of all tokens.
        expanded, queries = work.tokens * work.widths.heads, work.tokens / work.ranks * work.widths.heads
        if work.split != "contiguous" or work.keys_per_query is not None:
            return Computed(1.0, expanded, queries)
        # The queries of the last rank attend to the most keys: so many times the mean of all ranks.
        return Computed(2 - 1 / work.ranks, expanded, queries)

    def kv_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        return widths.heads if isinstance(widths, MLAWidths) else widths.kv_heads
