"""gather_kv: the numbers and rules of gathering keys and values for queries that stay. See `base` for the letters."""

from __future__ import annotations

from ...comm.group import SPLITS
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import BF16, FP32, HEAD_LAYERS, MLA_LAYERS, Computed, Description, Held, Strategy, local_queries


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

    def held(self, widths: MLAWidths | HeadWidths, ranks: int, head_chunks: int) -> Held:
        """Keys and values of all heads and tokens, with MLA packed and once more as keys; queries of the local tokens.

        Backward peaks in the local attention, with the gradients of all keys and values. Without latents these then
        travel back: they, two wire buffers, and the sums of the local tokens exist at once.

        With head chunks, keys and values exist for one chunk of m heads at a time; the gradients of the chunks' queries
        wait for the last chunk, and the latents' gradients are summed in fp32.
        """
        keys_and_values = self.kv_heads(widths, ranks) * (widths.key + widths.value)
        queries, output = BF16 * widths.heads * widths.key, BF16 * widths.heads * widths.value
        if isinstance(widths, MLAWidths):
            of_head = widths.nope + widths.value + widths.key
            whole = BF16 * ranks * (widths.latent + widths.rope + widths.heads * of_head)
            returning = 0.0
        else:
            whole = BF16 * ranks * keys_and_values
            # The gradients, two buffers without the local shard, and sums in fp32 and bf16 of the local tokens.
            returning = whole + BF16 * (2 * (ranks - 1) + 1) * keys_and_values + FP32 * keys_and_values + queries
        if isinstance(widths, MLAWidths) and head_chunks > 1:
            c, m = head_chunks, -(-widths.heads // head_chunks)
            arrived = BF16 * ranks * (widths.latent + widths.rope)
            attended = BF16 * ranks * m * of_head + m * (BF16 * widths.value + FP32)
            of_kernel = m * (FP32 + BF16) * widths.key + BF16 * ranks * m * (widths.key + widths.value)
            sums = FP32 * ranks * (widths.latent + widths.rope)
            return Held(
                arrived + queries + output,
                arrived + local_queries(widths) + max(2 * output, attended + output * (c - 1) / c),
                arrived + queries + output + attended + of_kernel + sums + queries * (c - 1) / c,
                0.0,
            )
        if head_chunks > 1 and isinstance(
            widths, HeadWidths
        ):  # the chunks' queries exist once more, with their output, its gradient and their own
            of_chunk = (2 * queries + 2 * queries + 2 * output) / head_chunks
            saved = whole + queries + output
            attending = saved + output + of_chunk + whole / min(head_chunks, self.kv_heads(widths, ranks))
            return Held(saved, saved + local_queries(widths) + output, max(attending, returning), 0.0)
        saved = whole + queries + output + FP32 * widths.heads
        kernel = 2 * queries + queries + BF16 * ranks * keys_and_values  # the fp32 sum takes twice the bytes of queries
        kept = saved - queries - (BF16 * ranks * widths.heads * of_head if isinstance(widths, MLAWidths) else 0)
        return Held(saved, saved + local_queries(widths) - queries, max(saved + output + kernel, returning), kept)

    def kv_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        return widths.heads if isinstance(widths, MLAWidths) else widths.kv_heads
