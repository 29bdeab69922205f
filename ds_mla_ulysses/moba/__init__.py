"""Mixture of Block Attention: every query attends to its own block and to the past blocks that a gate picks.

Names are imported when they are first used, so that a config can be made without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "MoBAConfig": "config",
    "choose_implementation": "api",
    "moba_attention": "api",
    "moba_attn_varlen": "api",
    "moba_select": "api",
}

__all__ = [
    "MoBAConfig",
    "choose_implementation",
    "moba_attention",
    "moba_attn_varlen",
    "moba_select",
]

if TYPE_CHECKING:
    from .api import choose_implementation, moba_attention, moba_attn_varlen, moba_select
    from .config import MoBAConfig


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value
