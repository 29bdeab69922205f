"""The strategies in numbers and rules, one file each; `hf.strategies` has how a Hugging Face layer attends under them."""

from __future__ import annotations

from collections.abc import Sequence

from ...comm.group import SPLITS
from ...layout.widths import HeadWidths, MLAWidths
from ..work import Work
from .base import HEAD_LAYERS, MLA_LAYERS, Computed, Description, Refusal, Strategy
from .latent_kv import LatentKV
from .latent_qkv import LatentQKV
from .packed import Packed


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

    def collectives(self, widths: MLAWidths | HeadWidths) -> int:
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


#: Every strategy by its name. Of equally fast ones, "auto" takes the first.
STRATEGIES: dict[str, Strategy] = {rules.name: rules for rules in (Packed(), LatentKV(), LatentQKV(), GatherKV())}

__all__ = [
    "STRATEGIES",
    "Computed",
    "Description",
    "GatherKV",
    "LatentKV",
    "LatentQKV",
    "Packed",
    "Refusal",
    "Strategy",
    "names_that_call_projections_whole",
    "names_with_split",
    "one_of",
    "table",
]


def names_with_split(split: str) -> list[str]:
    """Returns the names of the strategies that support a split of the sequence."""
    return [name for name, rules in STRATEGIES.items() if split in rules.splits]


def names_that_call_projections_whole() -> list[str]:
    """Returns the names of the strategies that compute every projection for all heads, as adapters need it."""
    return [name for name, rules in STRATEGIES.items() if not rules.sliced_projections(1)]


def one_of(names: Sequence[str]) -> str:
    """Joins names for an error: `'packed' or 'gather_kv'`."""
    quoted = [repr(name) for name in names]
    return " or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1])))


def table() -> str:
    """Returns the Markdown table of all strategies for the documentation; `base` explains the letters."""
    rows = [("strategy", "layers", "exchange", "sent forward", "sent backward"), ("---",) * 5]
    for name, rules in STRATEGIES.items():
        rows += [(f"`{name}`", d.layers, d.exchange, d.forward, d.backward) for d in rules.descriptions]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
