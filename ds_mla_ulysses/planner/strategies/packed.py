"""packed: the numbers and rules of sending heads packed into one all-to-all. See `base` for the letters."""

from __future__ import annotations

from ...layout.heads import HeadPartition
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import (
    BF16,
    FP32,
    HEAD_LAYERS,
    MLA_LAYERS,
    Computed,
    Description,
    Held,
    Strategy,
    held_by_heads,
    held_in_chunks,
    local_queries,
    sent_by_heads,
)


class Packed(Strategy):
    """Q, K and V of each head travel in one all-to-all. With MLA the shared RoPE key is all-gathered once."""

    name = "packed"
    descriptions = (
        Description(
            MLA_LAYERS,
            "queries and compact keys and values travel by heads in one all-to-all; the shared RoPE key is gathered",
            "Σ M(p)(K+P) + M(r)V(n-1) + R(n-1)",
            "M(r)(K+P)(n-1) + Σ M(p)V + R(n-1)",
        ),
        Description(
            HEAD_LAYERS,
            "queries, keys and values travel by heads in one all-to-all",
            "Σ [M(p)K + J(p)(K+V)] + M(r)V(n-1)",
            "[M(r)K + J(r)(K+V)](n-1) + Σ M(p)V",
        ),
    )

    def sent_elements(self, widths: MLAWidths | HeadWidths, ranks: int, rank: int) -> tuple[int, int]:
        if isinstance(widths, MLAWidths):
            return sent_by_heads(widths, ranks, rank, widths.key + widths.nope + widths.value, widths.rope)
        forward, backward = sent_by_heads(widths, ranks, rank, widths.key, 0)
        # Ranks next to each other may need the same KV head, which is then sent to each of them.
        partition = HeadPartition(widths.kv_heads, ranks, widths.heads)
        of_kv_head = widths.key + widths.value
        remote_kv_heads = sum(partition.count(p) for p in range(ranks) if p != rank)
        return forward + remote_kv_heads * of_kv_head, backward + partition.count(rank) * of_kv_head * (ranks - 1)

    def collectives(self, widths: MLAWidths | HeadWidths, head_chunks: int = 1) -> int:
        # Queries and output travel in chunks. The RoPE key of MLA is gathered. Other keys and values travel with the
        # queries if there is one chunk, otherwise in an all-to-all of their own.
        apart = isinstance(widths, MLAWidths) or head_chunks > 1
        return 4 * head_chunks + (2 if apart else 0)

    def computed(self, work: Work) -> Computed:
        # Heads are computed where their tokens are.
        pairs = work.tokens / work.ranks * work.widths.heads
        return Computed(self.imbalance_of_heads(work), expanded=pairs, queries=pairs)

    def held(self, widths: MLAWidths | HeadWidths, ranks: int, head_chunks: int) -> Held:
        """Queries, keys and values are views of what arrived; with MLA, keys are written once more with the RoPE key.

        In backward, the gradients travel back when the local attention is done: they, a wire buffer and a receive buffer
        without the local shard, and the gradients of the local tokens exist at once. Without grouped heads that is more
        than the local attention holds.
        """
        heads = self.most_heads(widths, ranks)
        if isinstance(widths, MLAWidths):
            of_kv_head, kv_heads, all_kv_heads = widths.nope + widths.value, heads, widths.heads
            made, gradients = heads * widths.key, heads * (2 * widths.key + widths.value)
        else:
            of_kv_head, kv_heads = widths.key + widths.value, self.kv_heads(widths, ranks)
            made, all_kv_heads = 0, widths.kv_heads
            gradients = heads * widths.key + kv_heads * of_kv_head
        arrived = ranks * (heads * widths.key + kv_heads * of_kv_head)
        of_token = widths.heads * widths.key + all_kv_heads * of_kv_head
        local = local_queries(widths) + BF16 * all_kv_heads * of_kv_head
        if head_chunks > 1 and isinstance(widths, MLAWidths):
            return held_in_chunks(
                widths,
                ranks,
                head_chunks,
                local=local,
                saved=BF16 * (arrived + ranks * widths.rope),
                exchanged=BF16 * of_token,
                expanded=0,
            )
        if head_chunks > 1 and isinstance(widths, HeadWidths):
            return _held_in_dense_chunks(
                widths, ranks, head_chunks, BF16 * arrived, BF16 * ranks * kv_heads * of_kv_head
            )
        held = held_by_heads(
            widths,
            ranks,
            arrived=BF16 * arrived,
            made=BF16 * ranks * made,
            gradients=BF16 * ranks * gradients,
            local=local,
        )
        returning = BF16 * (ranks * gradients + 2 * arrived * (ranks - 1) / ranks + of_token) if ranks > 1 else 0
        of_key = BF16 * ranks * widths.rope if isinstance(widths, MLAWidths) else 0  # gathered, and kept with the rest
        return Held(held.saved, held.forward, max(held.backward, returning), held.kept + of_key)

    def kv_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        if isinstance(widths, MLAWidths):
            return self.most_heads(widths, ranks)
        partition = HeadPartition(widths.kv_heads, ranks, widths.heads)
        return max(partition.count(p) for p in range(ranks))


def _held_in_dense_chunks(
    widths: HeadWidths, ranks: int, head_chunks: int, arrived: float, keys_and_values: float
) -> Held:
    """Returns what `packed` holds with the local query heads in chunks of m heads, without latents.

    Keys and values, and the queries of each chunk, are kept as they arrived, beside the output of the local tokens, 2HV.

    Forward peaks when the output is projected, which takes about as much as the output, while the module still holds its
    local tensors.

    Backward peaks in the local attention of a chunk, with its output and the row sums, the gradient of the whole output,
    the fp32 sum 4nmK, and gradients. The gradients of keys and values of the chunks before wait: one as it is, several as
    a sum in fp32. The queries of those chunks are gone.

    Args:
        arrived: bytes of everything that arrives.
        keys_and_values: bytes of the keys and values of it.
    """
    n, K, V = ranks, widths.key, widths.value
    output, of_chunk = BF16 * widths.heads * V, (arrived - keys_and_values) / head_chunks
    m = -(-HeadPartition(widths.heads, n).count(0) // head_chunks)
    attending = n * m * (2 * BF16 * V + FP32 + FP32 * K + BF16 * K) + keys_and_values
    waiting = max(0, keys_and_values - of_chunk, 2 * keys_and_values - 2 * of_chunk if head_chunks > 2 else 0)
    local = BF16 * (widths.heads * K + widths.kv_heads * (K + V))
    saved = arrived + output
    backward = arrived + output + attending - BF16 * n * m * V + waiting
    return Held(saved, local + saved + output, backward, 0.0)
