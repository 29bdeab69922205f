"""What every strategy answers: which layers it refuses, and what it sends, computes and holds. Nothing runs here.

Letters, of widths and counts:
    H query heads of the layer          N key width without position
    G KV heads of the layer             R width of the shared RoPE key
    M(p) query heads of rank p          K = N + R, query and key width
    J(p) KV heads of rank p             V value width
    n ranks of the group, r this rank   P = N + V, packed key and value of one head
    L latent width of keys and values   Q latent width of queries

Bytes: an element has 2 (bf16) unless it is said to be fp32, which has 4. With n ranks, one local token is n tokens of the
whole sequence, so a tensor [S, M, K] takes 2nMK bytes per local token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from ...layout.heads import HeadPartition
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work


@dataclass(frozen=True)
class Refusal:
    """Why a strategy is impossible for a layer.

    Attributes:
        reason: a few words, for a table.
        sentence: the error for the user, with `{layer}` in the place of the layer's class name.
    """

    reason: str
    sentence: str


@dataclass(frozen=True)
class Computed:
    """What the rank with the most work computes of one layer, forward.

    Attributes:
        attention: its share of the attention scores, divided by the mean share of all ranks.
        expanded: pairs of a token and a head whose key and value it computes from the KV latent.
        queries: pairs of a token and a head whose query it computes from the query latent.
    """

    attention: float
    expanded: float
    queries: float


@dataclass(frozen=True)
class Held:
    """Bytes per local token that attention in bf16 holds on the rank with the most heads, from projected queries on.

    The local attention is one that never holds scores, as flash attention: it saves queries, keys, values, its output and
    the fp32 logarithm of each row's sum; in backward it makes an fp32 sum of the queries' gradient beside the gradients.

    Attributes:
        saved: kept from forward for backward, including the output of the local tokens, which the projection saves.
        forward: the most that exist at a time in forward, what is saved by then included.
        backward: the same in backward.
        kept: the part of `saved` that a checkpoint with `keep_attention` keeps.
    """

    saved: float
    forward: float
    backward: float
    kept: float


@dataclass(frozen=True)
class Description:
    """One row of the documentation's table of strategies.

    Attributes:
        layers: the layers that the row is about.
        exchange: which tensors travel and how.
        forward, backward: elements that rank r sends per local token, as formulas in this file's letters.
    """

    layers: str
    exchange: str
    forward: str
    backward: str


MLA_LAYERS, HEAD_LAYERS = "MLA", "MHA, GQA, MQA"


class Strategy(ABC):
    """One strategy in numbers and rules. Instances have no state.

    Attributes:
        name: what users pass as `strategy=`.
        descriptions: one for each kind of layer that the strategy supports.
        splits: which splits of a sequence the strategy supports.
        exchanges_heads: whether each rank attends with some of the heads. There must then be a head for every rank.
    """

    name: ClassVar[str]
    descriptions: ClassVar[tuple[Description, ...]]
    splits: ClassVar[tuple[str, ...]] = ("contiguous",)
    exchanges_heads: ClassVar[bool] = True

    def refusal(self, mla: MLAWidths | None) -> Refusal | None:
        """Says why layers of these widths are refused, if they are.

        Args:
            mla: the widths of an MLA layer; None for a layer of any other kind.
        """
        return None

    def sliced_projections(self, head_chunks: int) -> tuple[str, ...]:
        """Names the projections of an MLA module that are computed for some heads only, from rows of their weights."""
        return ()

    @abstractmethod
    def sent_elements(self, widths: MLAWidths | HeadWidths, ranks: int, rank: int) -> tuple[int, int]:
        """Returns the elements that `rank` sends to other ranks per local token, (forward, backward).

        The numbers are exact, also if the number of heads is not divisible by the number of ranks.
        """

    @abstractmethod
    def collectives(self, widths: MLAWidths | HeadWidths, head_chunks: int = 1) -> int:
        """Returns the number of collective calls of forward and backward together."""

    @abstractmethod
    def computed(self, work: Work) -> Computed:
        """Returns what the rank with the most work computes."""

    @abstractmethod
    def held(self, widths: MLAWidths | HeadWidths, ranks: int, head_chunks: int) -> Held:
        """Returns the bytes per local token that attention holds, wire buffers included."""

    def kv_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        """Returns the most heads whose keys and values a rank holds, for all tokens, while it attends."""
        return self.most_heads(widths, ranks)

    def most_heads(self, widths: MLAWidths | HeadWidths, ranks: int) -> int:
        """Returns the most query heads that a rank attends with."""
        return HeadPartition(widths.heads, ranks).count(0) if self.exchanges_heads else widths.heads

    def imbalance_of_heads(self, work: Work) -> float:
        """Returns the most heads of a rank divided by the mean of all ranks."""
        return self.most_heads(work.widths, work.ranks) * work.ranks / work.widths.heads

    def refused(self, work: Work) -> str | None:
        """Says in a few words why the strategy is impossible for this work, if it is."""
        widths = work.widths
        refusal = self.refusal(widths if isinstance(widths, MLAWidths) else None)
        if refusal is not None:
            return refusal.reason
        if self.exchanges_heads and widths.heads < work.ranks:
            return f"{widths.heads} heads are fewer than the ranks"
        least = widths.heads // work.ranks if self.exchanges_heads else widths.heads
        if work.head_chunks > least:
            return f"{work.head_chunks} head chunks are more than the {least} heads of a rank"
        return None


#: Bytes of an element in bf16 and in fp32.
BF16, FP32 = 2, 4


def held_by_heads(
    widths: MLAWidths | HeadWidths, ranks: int, *, arrived: float, made: float, gradients: float, local: float
) -> Held:
    """Returns what a strategy holds under which each rank attends with M heads and returns their output to the tokens.

    Saved: what arrived and what was made of it, output and row sums of the local heads, output of the local tokens:
    arrived + made + 2nMV + 4nM + 2HV.

    Forward peaks when the output returns, whose wire carries 2(n-1)MV, while the module still holds its local tensors.

    Backward peaks in the local attention: everything saved but the local tokens' output, the output's gradient 2nMV, the
    fp32 sum 4nMK, and the gradients.

    Args:
        arrived: bytes of the tensors that the exchange made.
        made: bytes of queries, keys or values that are made of them.
        gradients: bytes of the gradients of queries, keys and values.
        local: bytes of the tensors of local tokens that the module still holds when the output returns.
    """
    heads = HeadPartition(widths.heads, ranks).count(0)
    attended = arrived + made + BF16 * ranks * heads * widths.value + FP32 * ranks * heads
    saved = attended + BF16 * widths.heads * widths.value
    kernel = FP32 * ranks * heads * widths.key + gradients
    return Held(
        saved,
        local + saved + BF16 * (ranks - 1) * heads * widths.value,
        attended + BF16 * ranks * heads * widths.value + kernel,
        saved - made,
    )


def held_in_chunks(
    widths: MLAWidths,
    ranks: int,
    head_chunks: int,
    *,
    local: float,
    saved: float,
    exchanged: float,
    expanded: int,
) -> Held:
    """Returns what a strategy holds under which MLA's local heads are exchanged and attend in chunks of m heads.

    Forward peaks when the last chunk leaves, whose tensors then exist once more, or in that chunk's local attention. The
    output of all chunks, 2HV, exists as soon as the first chunk is done.

    Backward peaks in the local attention of a chunk: its keys, output and row sums, perhaps packed keys and values, the
    gradient of the whole output, the fp32 sum 4nmK, and gradients 2nm(2K+V). The gradients of what all chunks share wait:
    one as it is, several as a sum in fp32. The output's gradients of chunks that are done are gone.

    Args:
        local: bytes of the tensors of local tokens that the module still holds.
        saved: bytes of the tensors that arrive for all chunks, which each chunk's recomputation begins with.
        exchanged: bytes of the tensors of all chunks' local tokens that are exchanged by heads.
        expanded: width of one head's packed keys and values, if the chunk makes them; 0 if they arrive.
    """
    K, V, n, c = widths.key, widths.value, ranks, head_chunks
    m, output, of_chunk = -(-HeadPartition(widths.heads, n).count(0) // c), BF16 * widths.heads * V, exchanged / c
    attended = BF16 * n * m * (expanded + K + V) + FP32 * n * m
    forward = max((output if c > 2 else 0) + of_chunk, output + attended)
    sums = FP32 * n * (widths.rope + (widths.latent if expanded else 0))
    backward = output + attended + n * m * (FP32 * K + BF16 * (2 * K + V))
    waiting = max(0, sums / 2 - output / c, sums - 2 * output / c if c > 2 else 0)
    return Held(saved + output, local + saved + forward, saved + backward + waiting, 0.0)


def local_queries(widths: MLAWidths | HeadWidths) -> float:
    """Returns the bytes of a local token's queries, which an MLA module holds with and without RoPE applied."""
    queries = BF16 * widths.heads * widths.key
    return 2 * queries + BF16 * widths.heads * widths.rope if isinstance(widths, MLAWidths) else queries


def sent_by_heads(
    widths: MLAWidths | HeadWidths, ranks: int, rank: int, per_head: int, gathered: int
) -> tuple[int, int]:
    """Returns what a strategy sends that distributes heads, all-gathers, and returns the output to its tokens.

    Forward: sum over the other ranks of M(p) * per_head, M(r) * V * (n-1), gathered * (n-1).
    Backward: M(r) * per_head * (n-1), sum over the other ranks of M(p) * V, gathered * (n-1).

    Args:
        per_head: elements of a token and head that are sent to the head's rank.
        gathered: elements of a token that are sent to every other rank.

    Returns:
        elements per local token, (forward, backward).
    """
    local, others = HeadPartition(widths.heads, ranks).count(rank), ranks - 1
    remote = widths.heads - local
    forward = remote * per_head + local * others * widths.value + gathered * others
    return forward, local * others * per_head + remote * widths.value + gathered * others
