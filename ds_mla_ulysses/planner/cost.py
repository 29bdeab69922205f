"""What one attention layer costs under each strategy, forward and backward, on the rank that has the most to do.

The strategies say what they send and compute (`planner.strategies`); this file turns that into bytes, products and time.
Time is the time of everything that is sent, one collective after the other, plus the time of the products whose number
differs between strategies: attention and the projections that compute heads from latents. Nothing is assumed to overlap,
and work that is the same under all strategies is left out. Documents and windows would reduce the cost of attention.

Shape letters: S tokens of all sequences together · T tokens of a rank · H query heads · K query and key width · V value
width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ..errors import UlyssesValueError
from ..layout.widths import HeadWidths, MLAWidths
from .strategies import STRATEGIES, names_with_split
from .work import Machine, Work

#: Backward computes a multiple of what forward does, so that both together are this many times forward: a projection has
#: two products in backward; attention computes its scores once more.
_PROJECTION_PASSES, _ATTENTION_PASSES = 3.0, 3.5


@dataclass(frozen=True)
class Estimate:
    """One layer, forward and backward, on the rank that has the most to do.

    Attributes:
        strategy: its name.
        refused: why the strategy is impossible; the numbers then mean nothing.
        collectives: the number of collective calls.
        sent_bytes: bytes sent to other ranks.
        extra_tflop: operations beyond an even share of what one process computes, in 10^12.
        imbalance: the largest share of attention that a rank computes, divided by the mean share.
        kv_bytes: bytes of the keys and values that attention reads. Without recomputation they are held until backward.
        send_ms: milliseconds of sending.
        compute_ms: milliseconds of attention and of the projections from latents.
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
        """Milliseconds of sending and computing together."""
        return self.send_ms + self.compute_ms


def sent_elements(widths: MLAWidths | HeadWidths, strategy: str, ranks: int, rank: int) -> tuple[int, int]:
    """Returns the elements that `rank` sends to other ranks per local token, (forward, backward); exact."""
    return STRATEGIES[strategy].sent_elements(widths, ranks, rank)


def estimate(work: Work, strategy: str, machine: Machine) -> Estimate:
    """Returns what the strategy costs. Its `refused` is set if widths, number of heads or split exclude the strategy."""
    rules = STRATEGIES[strategy]
    refused = rules.refused(work)
    if refused is None and work.split not in rules.splits:
        refused = f"split={work.split!r} is for {', '.join(names_with_split(work.split))}"
    if refused is not None:
        return Estimate(strategy, refused)
    w, ranks, T = work.widths, work.ranks, work.tokens / work.ranks
    sent_bytes = round(max(sum(rules.sent_elements(w, ranks, p)) for p in range(ranks)) * T * work.element_bytes)

    attention, (of_kv_latent, of_query_latent) = _attention_flop(work), _projection_flop(w)
    even = attention + T * w.heads * (of_kv_latent + of_query_latent)
    computed = rules.computed(work)
    flop = attention * computed.attention
    flop += of_kv_latent * computed.expanded
    flop += of_query_latent * computed.queries

    collectives = rules.collectives(w, work.head_chunks) if ranks > 1 else 0
    return Estimate(
        strategy,
        collectives=collectives,
        sent_bytes=sent_bytes,
        extra_tflop=(flop - even) / 1e12,
        imbalance=computed.attention,
        kv_bytes=work.tokens * rules.kv_heads(w, ranks) * (w.key + w.value) * work.element_bytes,
        send_ms=8e-6 * sent_bytes / machine.link_gbps + 1e-3 * machine.latency_us * collectives,
        compute_ms=flop / machine.tflops / 1e9,
    )


def estimates(work: Work, machine: Machine) -> list[Estimate]:
    """Returns an estimate for every strategy."""
    return [estimate(work, strategy, machine) for strategy in STRATEGIES]


def choose(found: Iterable[Estimate]) -> tuple[Estimate, str]:
    """Returns the fastest possible strategy and the reason in one sentence.

    Of equally fast strategies it takes the first, which holds and changes the least.

    Raises:
        ValueError: no strategy is possible.
    """
    found = list(found)
    possible = [e for e in found if e.refused is None]
    if not possible:
        raise UlyssesValueError("no strategy is possible: " + "; ".join(f"{e.strategy}: {e.refused}" for e in found))
    best = min(possible, key=lambda e: e.ms)
    others = sorted((e for e in possible if e is not best), key=lambda e: e.ms)
    if not others:
        return best, f"{best.strategy}: the only one possible"
    if best.sent_bytes == others[0].sent_bytes == 0:
        return best, f"{best.strategy}: nothing is sent"
    against = ", ".join(f"{e.strategy} {_ms(e)}" for e in others)
    return best, f"{best.strategy}, {_ms(best)} a layer against {against}"


def other_splits(work: Work, machine: Machine, best: Estimate, excluded: Collection[str] = ()) -> str:
    """Says which strategy would be faster than the best one, by at least a thousandth, with another split.

    Args:
        work: with the split that `best` was chosen for.
        excluded: strategies that the model excludes.

    Returns:
        the rest of a sentence for each of them; empty if there are none.
    """
    if work.ranks == 1 or work.split != "contiguous":
        return ""
    said = ""
    for strategy, rules in STRATEGIES.items():
        for split in rules.splits:
            if split == work.split or strategy in excluded:
                continue
            other = estimate(replace(work, split=split), strategy, machine)
            if other.refused is None and other.ms < 0.999 * best.ms:
                said += f"; {strategy} with split={split!r} would take {_ms(other)}"
    return said


def _ms(e: Estimate) -> str:
    return f"{e.ms:,.4g} ms ({e.send_ms:,.3g} sending)"


def _attention_flop(work: Work) -> float:
    """Operations of an even share of causal attention: two products of each query with each key that it attends to."""
    w, mean_keys = work.widths, ((work.sequence or work.tokens) + 1) / 2
    keys = mean_keys if work.keys_per_query is None else min(work.keys_per_query, mean_keys)
    return 2 * work.tokens * keys * w.heads * (w.key + w.value) * _ATTENTION_PASSES / work.ranks


def _projection_flop(w: MLAWidths | HeadWidths) -> tuple[float, float]:
    """Operations of one token and head: from the KV latent and from the query latent."""
    if isinstance(w, HeadWidths):
        return 0.0, 0.0
    of_kv, of_queries = w.latent * (w.nope + w.value), (w.query_latent or 0) * w.key
    return 2 * _PROJECTION_PASSES * of_kv, 2 * _PROJECTION_PASSES * of_queries
