"""latent_qkv: the numbers and rules of gathering query latents and KV latents. See `base` for the letters."""

from __future__ import annotations

from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import BF16, FP32, MLA_LAYERS, Computed, Description, Held, Refusal, Strategy, held_by_heads, sent_by_heads


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

    def collectives(self, widths: MLAWidths | HeadWidths, head_chunks: int = 1) -> int:
        return 4

    def computed(self, work: Work) -> Computed:
        pairs = work.tokens * self.most_heads(work.widths, work.ranks)
        return Computed(self.imbalance_of_heads(work), expanded=pairs, queries=pairs)

    def held(self, widths: MLAWidths | HeadWidths, ranks: int, head_chunks: int) -> Held:
        """Latents arrive, from which the module makes queries, keys and values of all tokens.

        While the output returns, it still holds its queries without RoPE applied. With head chunks, keys and values exist
        for one chunk of m heads at a time; in forward, the outputs of the chunks are joined; in backward, the queries'
        gradients of the chunks before wait, and the latents' gradients are summed in fp32.
        """
        assert isinstance(widths, MLAWidths)
        K, V, R, n, c = widths.key, widths.value, widths.rope, ranks, head_chunks
        heads, of_kv_head = self.most_heads(widths, ranks), widths.nope + V
        arrived = BF16 * n * ((widths.query_latent or 0) + widths.latent + R)
        local, queries, output = BF16 * n * heads * (K + R), BF16 * n * heads * K, BF16 * n * heads * V
        if c > 1:
            m, saved = -(-heads // c), arrived + queries
            attended = BF16 * n * m * (of_kv_head + K + V) + FP32 * n * m
            sums = FP32 * n * (widths.latent + R)
            returning = BF16 * (n - 1) * heads * V + BF16 * widths.heads * V
            of_kernel = n * m * (FP32 * K + BF16 * (2 * K + V))
            return Held(
                saved + BF16 * widths.heads * V,
                local + saved + max(attended + output * (c - 1) / c, output + max(output, returning)),
                saved + output + attended + of_kernel + sums + queries * (c - 1) / c,
                0.0,
            )
        return held_by_heads(
            widths,
            n,
            arrived=arrived,
            made=2 * queries + BF16 * n * heads * of_kv_head,
            gradients=BF16 * n * heads * (2 * K + V),
            local=local,
        )
