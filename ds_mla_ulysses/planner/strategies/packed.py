"""packed: the numbers and rules of sending heads packed into one all-to-all. See `base` for the letters."""

from __future__ import annotations

from ...layout.heads import HeadPartition
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import HEAD_LAYERS, MLA_LAYERS, Computed, Description, Strategy, sent_by_heads


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

    def kv_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        if isinstance(widths, MLAWidths):
            return self.most_heads(widths, ranks)
        partition = HeadPartition(widths.kv_heads, ranks, widths.heads)
        return max(partition.count(p) for p in range(ranks))
