"""Small random models, as their users would train them: over stock DeepSpeed or by one of our strategies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from common import SMALL, small_config

MODELS = SMALL
VOCABULARY = 512
#: Ways to parallelize, by the names that the tables have for them.
STRATEGIES = {
    "packed": {"strategy": "packed"},
    "latent_kv": {"strategy": "latent_kv"},
    "latent_qkv": {"strategy": "latent_qkv"},
    "gather_kv": {"strategy": "gather_kv"},
    "head_tail": {"strategy": "gather_kv", "split": "head_tail"},
}


def build(model_type: str, dtype: torch.dtype, longest: int, **changes: Any) -> nn.Module:
    """The same weights in every process and in every dtype, but for rounding.

    Args:
        longest: tokens of a sequence.
        changes: to the config.
    """
    from transformers import AutoModelForCausalLM

    config = small_config(VOCABULARY, longest, model_type, **changes)
    config._experts_implementation = "eager"  # the one that runs in every dtype
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).train()


def tokens(count: int, seed: int) -> dict[str, Tensor]:
    """One sequence of random tokens, each of which is to be predicted."""
    input_ids = torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "labels": input_ids}


def materialise(model: nn.Module, group: dist.ProcessGroup) -> None:
    """MLA over stock DeepSpeed: K and V of all heads, three all-to-alls in and one out, around transformers' sdpa."""
    from deepspeed.sequence.layer import DistributedAttention
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def local(q: Tensor, k: Tensor, v: Tensor, module: nn.Module, scaling: float | None) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(module, *heads_first, None, dropout=0.0, scaling=scaling, is_causal=True)[0]

    stock = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def three_all_to_alls(module, q, k, v, mask, scaling=None, **kwargs):
        return stock(*(x.transpose(1, 2) for x in (q, k, v)), 0, None, module, scaling), None

    AttentionInterface.register("three_all_to_alls", three_all_to_alls)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "three_all_to_alls"
