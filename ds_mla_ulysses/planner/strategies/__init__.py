"""The strategies in numbers and rules, one file each; `hf.strategies` has how a Hugging Face layer attends under them."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Computed, Description, Refusal, Strategy
from .gather_kv import GatherKV
from .latent_kv import LatentKV
from .latent_qkv import LatentQKV
from .packed import Packed

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
