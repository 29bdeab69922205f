"""latent_kv: the numbers and rules of gathering KV latents. See `base` for the letters."""

from __future__ import annotations

from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import (
    BF16,
    MLA_LAYERS,
    Computed,
    Description,
    Held,
    Refusal,
    Strategy,
    held_by_heads,
    held_in_chunks,
    local_queries,
    sent_by_heads,
)


class LatentKV(Strategy):
    """Queries travel by heads. KV latents are all-gathered, and each rank expands its local heads of all tokens."""

    name = "latent_kv"
    descriptions = (
        Description(
            MLA_LAYERS,
            "queries travel by heads; the KV latent and the shared RoPE key are gathered; each rank expands its local heads",
            "Σ M(p)K + M(r)V(n-1) + (L+R)(n-1)",
            "M(r)K(n-1) + Σ M(p)V + (L+R)(n-1)",
        ),
    )

    def refusal(self, mla: MLAWidths | None) -> Refusal | None:
        if mla is not None:
            return None
        return Refusal(
            "no latents",
            f"strategy={self.name!r} is for MLA, but {{layer}} has no latents: choose 'packed' or 'gather_kv'.",
        )

    def sliced_projections(self, head_chunks: int) -> tuple[str, ...]:
        return ("kv_b_proj",)

    def sent_elements(self, widths: MLAWidths | HeadWidths, ranks: int, rank: int) -> tuple[int, int]:
        assert isinstance(widths, MLAWidths)
        return sent_by_heads(widths, ranks, rank, widths.key, widths.latent + widths.rope)

    def collectives(self, widths: MLAWidths | HeadWidths, head_chunks: int = 1) -> int:
        return 4 * head_chunks + 2  # queries and output travel in chunks, latents do not

    def computed(self, work: Work) -> Computed:
        return Computed(
            self.imbalance_of_heads(work),
            expanded=work.tokens * self.most_heads(work.widths, work.ranks),
            queries=work.tokens / work.ranks * work.widths.heads,
        )

    def held(self, widths: MLAWidths | HeadWidths, ranks: int, head_chunks: int) -> Held:
        """Latents and queries arrive; packed keys and values are made of the latents, and keys with the RoPE key."""
        assert isinstance(widths, MLAWidths)
        heads = self.most_heads(widths, ranks)
        arrived = BF16 * ranks * (widths.latent + widths.rope + heads * widths.key)
        of_kv_head, local = widths.nope + widths.value, local_queries(widths)
        if head_chunks > 1:
            exchanged = BF16 * widths.heads * widths.key
            return held_in_chunks(
                widths,
                ranks,
                head_chunks,
                local=local,
                saved=arrived,
                exchanged=exchanged,
                expanded=of_kv_head,
            )
        return held_by_heads(
            widths,
            ranks,
            arrived=arrived,
            made=BF16 * ranks * heads * (of_kv_head + widths.key),
            gradients=BF16 * ranks * heads * (2 * widths.key + widths.value),
            local=local,
        )
