"""Mixture of Block Attention: each query attends to its current block and to the past blocks that a gate picks."""

from .api import choose_implementation, moba_attention, moba_attn_varlen, moba_select
from .config import MoBAConfig

__all__ = ["MoBAConfig", "choose_implementation", "moba_attention", "moba_attn_varlen", "moba_select"]
