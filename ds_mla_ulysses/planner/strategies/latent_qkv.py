"""latent_qkv: the numbers and rules of gathering query latents and KV latents. See `base` for the letters."""

from __future__ import annotations

from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import BF16, MLA_LAYERS, Computed, Description, Held, Refusal, Strategy, held_by_heads, sent_by_heads


class LatentQKV(Strategy):
    """All latents are all-gathered, and each rank computes queries, keys and values of its local heads of all tokens."""

    name = "latent_qkv"
    descriptions = (
        Description(
            f"{MLA_LAYERS} with a query latent",
            "query latent, KV latent and shared RoPE key are gathered; each rank computes its local heads",
            "M(r)V(n-1) + (Q+L+R)(n-1)",
            "Σ M(p)V + (Q+L+R)(n-1)",
        ),
    )

    def refusal(self, mla: MLAWidths | None) -> Refusal | None:
        if mla is None:
            return Refusal(
                "no latents",
                f"strategy={self.name!r} is for MLA, but {{layer}} has no latents: choose 'packed' or 'gather_kv'.",
            )
        if not mla.query_latent:
            return Refusal(
                "no query latent",
                f"strategy={self.name!r} gathers query latents, but {{layer}} has none (q_lora_rank is None): choose "
                "'latent_kv'.",
            )
        return None

    def sliced_projections(self, head_chunks: int) -> tuple[str, ...]:
        return "q_b_proj", "kv_b_proj"

    def sent_elements(self, widths: MLAWidths | HeadWidths, ranks: int, rank: int) -> tuple[int, int]:
        assert isinstance(widths, MLAWidths)
        return sent_by_heads(widths, ranks, rank, 0, (widths.query_latent or 0) + widths.latent + widths.rope)

    def collectives(self, widths: MLAWidths | HeadWidths) -> int:
        return 4

    def computed(self, work: Work) -> Computed:
        pairs = work.tokens * self.most_heads(work.widths, work.ranks)
        return Computed(self.imbalance_of_heads(work), expanded=pairs, queries=pairs)

    def held(self, widths: MLAWidths | HeadWidths, ranks: int) -> Held:
        """Latents arrive, from which the module makes queries, keys and values of all tokens.

        While the output returns, it still holds its queries without RoPE applied.
        """
        assert isinstance(widths, MLAWidths)
        heads, of_latents = self.most_heads(widths, ranks), (widths.query_latent or 0) + widths.latent + widths.rope
        return held_by_heads(
            widths,
            ranks,
            arrived=BF16 * ranks * of_latents,
            made=BF16 * ranks * heads * (2 * widths.key + widths.nope + widths.value),
            gradients=BF16 * ranks * heads * (2 * widths.key + widths.value),
            local=BF16 * ranks * heads * (widths.key + widths.rope),
        )
