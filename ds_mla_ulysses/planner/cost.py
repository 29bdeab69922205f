"""What one attention layer costs under each strategy, forward and backward, on the rank that has the most to do.

Elements that rank r sends, per local token; M(p) heads that rank p owns, J(p) key/value heads:

| strategy     | forward                                             | backward                                            |
|--------------|-----------------------------------------------------|-----------------------------------------------------|
| "packed"     | sum over others of M(p)(K+P), R(ranks-1), M(r)V(ranks-1) | sum of M(p)V, M(r)(K+P)(ranks-1), R(ranks-1)   |
| (other heads)| sum over others of M(p)K + J(p)(K+V), M(r)V(ranks-1) | sum of M(p)V, (M(r)K + J(r)(K+V))(ranks-1)         |
| "latent_kv"  | sum over others of M(p)K, (L+R)(ranks-1), M(r)V(ranks-1) | sum of M(p)V, M(r)K(ranks-1), (L+R)(ranks-1)   |
| "latent_qkv" | (Q+L+R)(ranks-1), M(r)V(ranks-1)                    | sum of M(p)V, (Q+L+R)(ranks-1)                      |
| "gather_kv"  | (L+R)(ranks-1); of other heads G(K+V)(ranks-1)      | the same                                            |

Time is that of what is sent, one collective after the other, and that of the products that strategies share unevenly:
those of the projections that make heads of latents, and of attention. Nothing is taken to overlap, and what all
strategies do alike is left out. Documents and windows would make attention less.

Letters: H heads · G key/value heads · N, R, K = N+R, V, P = N+V widths of a head · L, Q latents · T a rank's tokens
· S all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..layout.heads import HeadPartition
from ..layout.widths import HeadWidths, MLAWidths

STRATEGIES = ("packed", "latent_kv", "latent_qkv", "gather_kv")
#: Backward computes this many times what forward does: two products for each of a projection; attention's backward
#: makes its scores once more.
_PROJECTION_PASSES, _ATTENTION_PASSES = 3.0, 3.5


@dataclass(frozen=True)
class Machine:
    """How fast a rank sends and computes.

    Attributes:
        link_gbps: Gbit/s that a rank sends to others, while it receives as much.
        tflops: 10^12 operations a second in products.
        latency_us: microseconds of a collective that sends nothing.
    """

    link_gbps: float = 400.0
    tflops: float = 400.0
    latency_us: float = 10.0


@dataclass(frozen=True)
class Work:
    """What is to be planned: one layer of `tokens` in whole sequences over `ranks`.

    Attributes:
        tokens: of all sequences of a micro-batch together.
        sequence: tokens of one sequence, which attention's work grows with; by default all are one.
        element_bytes: of what travels.
        split: which tokens a rank holds, with "gather_kv".
        keys_per_query: that attention reads, of MoBA block size times top-k; by default all before it.
    """

    widths: MLAWidths | HeadWidths
    ranks: int
    tokens: int
    sequence: int | None = None
    element_bytes: int = 2
    split: str = "contiguous"
    keys_per_query: int | None = None

    def __post_init__(self) -> None:
        if self.sequence is not None and self.sequence > self.tokens > 0:
            raise ValueError(f"a sequence of {self.sequence} tokens is longer than all {self.tokens} of them.")


@dataclass(frozen=True)
class Estimate:
    """One layer, forward and backward, on the rank that has the most to do.

    Attributes:
        refused: why the strategy is not possible; then the numbers say nothing.
        collectives: calls.
        sent_bytes: to other ranks.
        extra_tflop: products beyond this rank's even share of what one process computes, in 10^12.
        imbalance: the most that a rank computes of attention by the mean of all ranks.
        kv_bytes: keys and values that attention reads, which are held until backward without recomputation.
        send_ms, compute_ms: milliseconds of sending, and of projections from latents and attention.
    """

    strategy: str
    refused: str | None = None
    collectives: int = 0
    sent_bytes: int = 0
    extra_tflop: float = 0.0
    imbalance: float = 1.0
    kv_bytes: int = 0
    send_ms: float = 0.0
    compute_ms: float = 0.0

    @property
    def ms(self) -> float:
        """Of both."""
        return self.send_ms + self.compute_ms


def sent_elements(widths: MLAWidths | HeadWidths, strategy: str, ranks: int, rank: int) -> tuple[int, int]:
    """Elements that `rank` sends to others per local token, (forward, backward); exact, with any number of heads."""
    others = ranks - 1
    if strategy == "gather_kv":
        gathered = (
            widths.latent + widths.rope
            if isinstance(widths, MLAWidths)
            else widths.kv_heads * (widths.key + widths.value)
        )
        return gathered * others, gathered * others
    queries = HeadPartition(widths.heads, ranks)
    own = queries.count(rank)
    foreign = widths.heads - own
    if isinstance(widths, HeadWidths):
        kv = HeadPartition(widths.kv_heads, ranks, widths.heads)
        foreign_kv = sum(kv.count(p) for p in range(ranks) if p != rank)
        of_kv = widths.key + widths.value
        forward = foreign * widths.key + foreign_kv * of_kv + own * widths.value * others
        return forward, foreign * widths.value + (own * widths.key + kv.count(rank) * of_kv) * others
    by_heads, gathered = {
        "packed": (widths.key + widths.nope + widths.value, widths.rope),
        "latent_kv": (widths.key, widths.latent + widths.rope),
        "latent_qkv": (0, (widths.query_latent or 0) + widths.latent + widths.rope),
    }[strategy]
    # What is for other ranks' heads goes out by heads; what is of the own heads goes to the tokens of all others.
    to_heads, to_tokens, gathered = foreign, own * others, gathered * others
    forward = to_heads * by_heads + to_tokens * widths.value + gathered
    return forward, to_tokens * by_heads + to_heads * widths.value + gathered


def estimate(work: Work, strategy: str, machine: Machine) -> Estimate:
    """What the strategy costs; refused where the widths or the number of heads exclude it."""
    refused = _refused(work, strategy)
    if refused:
        return Estimate(strategy, refused)
    w, ranks, T = work.widths, work.ranks, work.tokens / work.ranks
    is_mla, gathers = isinstance(w, MLAWidths), strategy == "gather_kv"
    most = w.heads if gathers else HeadPartition(w.heads, ranks).count(0)
    sent_bytes = round(max(sum(sent_elements(w, strategy, ranks, p)) for p in range(ranks)) * T * work.element_bytes)

    if not gathers:
        imbalance = most * ranks / w.heads
    elif work.split == "contiguous" and work.keys_per_query is None:
        imbalance = 2 - 1 / ranks  # so many times the mean are the keys that the last part's queries see
    else:
        imbalance = 1.0
    attention = _attention_flop(work)
    even = attention + T * w.heads * sum(_projection_flop(w))
    of_latents, of_queries = _projection_flop(w)
    # Pairs of a token and a head that are made of latents.
    own = work.tokens * most
    flop = attention * imbalance
    flop += of_latents * (T * w.heads if strategy == "packed" else own)
    flop += of_queries * (own if strategy == "latent_qkv" else T * w.heads)

    kv_heads = most if is_mla else w.kv_heads
    if not is_mla and not gathers:
        kv_heads = max(HeadPartition(w.kv_heads, ranks, w.heads).count(p) for p in range(ranks))
    collectives = _collectives(strategy, is_mla) if ranks > 1 else 0
    return Estimate(
        strategy,
        collectives=collectives,
        sent_bytes=sent_bytes,
        extra_tflop=(flop - even) / 1e12,
        imbalance=imbalance,
        kv_bytes=work.tokens * kv_heads * (w.key + w.value) * work.element_bytes,
        send_ms=8e-6 * sent_bytes / machine.link_gbps + 1e-3 * machine.latency_us * collectives,
        compute_ms=flop / machine.tflops / 1e9,
    )


def estimates(work: Work, machine: Machine) -> list[Estimate]:
    """Of every strategy."""
    return [estimate(work, strategy, machine) for strategy in STRATEGIES]


def choose(found: Iterable[Estimate]) -> tuple[Estimate, str]:
    """The fastest that is possible, and why in one sentence. Of equals the first: it holds and changes the least.

    Raises:
        ValueError: none is possible.
    """
    found = list(found)
    possible = [e for e in found if e.refused is None]
    if not possible:
        raise ValueError("no strategy is possible: " + "; ".join(f"{e.strategy}: {e.refused}" for e in found))
    best = min(possible, key=lambda e: e.ms)
    others = sorted((e for e in possible if e is not best), key=lambda e: e.ms)
    if not others:
        return best, f"{best.strategy}: the only one possible"
    if best.sent_bytes == others[0].sent_bytes == 0:
        return best, f"{best.strategy}: nothing is sent"
    against = ", ".join(f"{e.strategy} {_ms(e)}" for e in others)
    return best, f"{best.strategy}, {_ms(best)} a layer against {against}"


def head_tail(work: Work, machine: Machine, best: Estimate) -> str:
    """That "gather_kv" would be faster than the best by a thousandth at least, if ranks held head and tail; empty if not."""
    if work.split == "head_tail" or work.ranks == 1:
        return ""
    other = estimate(replace(work, split="head_tail"), "gather_kv", machine)
    return f"; gather_kv with split='head_tail' would take {_ms(other)}" if other.ms < 0.999 * best.ms else ""


def _ms(e: Estimate) -> str:
    return f"{e.ms:,.4g} ms ({e.send_ms:,.3g} sending)"


def _attention_flop(work: Work) -> float:
    """An even share of causal attention: two products of each query with each key that it sees."""
    w, mean_keys = work.widths, ((work.sequence or work.tokens) + 1) / 2
    keys = mean_keys if work.keys_per_query is None else min(work.keys_per_query, mean_keys)
    return 2 * work.tokens * keys * w.heads * (w.key + w.value) * _ATTENTION_PASSES / work.ranks


def _projection_flop(w: MLAWidths | HeadWidths) -> tuple[float, float]:
    """Of one token and head: from the latent of keys and values, and from that of queries."""
    if isinstance(w, HeadWidths):
        return 0.0, 0.0
    made = w.latent * (w.nope + w.value), (w.query_latent or 0) * w.key
    return tuple(2 * _PROJECTION_PASSES * x for x in made)


def _collectives(strategy: str, is_mla: bool) -> int:
    """Of forward and backward."""
    if not is_mla:
        return 2 if strategy == "gather_kv" else 4
    return {"packed": 6, "latent_kv": 6, "latent_qkv": 4, "gather_kv": 2}[strategy]


def _refused(work: Work, strategy: str) -> str | None:
    w = work.widths
    if strategy.startswith("latent") and not isinstance(w, MLAWidths):
        return "no latents"
    if strategy == "latent_qkv" and not w.query_latent:
        return "no query latent"
    if strategy != "gather_kv" and w.heads < work.ranks:
        return f"{w.heads} heads are fewer than the ranks"
    if work.split != "contiguous" and strategy != "gather_kv":
        return f"split={work.split!r} is for gather_kv"
    return None
