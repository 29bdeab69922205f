"""The small models that the whole trainings use, and ways to parallelize them: stock DeepSpeed's, and every strategy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from ds_mla_ulysses.small_models import SETTINGS, small_config

MODELS = tuple(SETTINGS)
VOCABULARY = 512
#: Ways to parallelize, by their names in the tables.
STRATEGIES = {
    "packed": {"strategy": "packed"},
    "latent_kv": {"strategy": "latent_kv"},
    "latent_qkv": {"strategy": "latent_qkv"},
    "gather_kv": {"strategy": "gather_kv"},
    "head_tail": {"strategy": "gather_kv", "split": "head_tail"},
}


def build(model_type: str, dtype: torch.dtype, **changes: Any) -> nn.Module:
    """A model that has the same weights in every process, and in every dtype up to rounding.

    Args:
        model_type: one of MODELS.
        dtype: of the parameters.
        changes: settings of the config that replace those of the small model.
    """
    from transformers import AutoModelForCausalLM

    config = small_config(model_type, VOCABULARY, **changes)
    config._experts_implementation = "eager"  # the only one that runs in every dtype
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype).train()


def tokens(count: int, seed: int) -> dict[str, Tensor]:
    """One sequence of random tokens, with labels for all of them."""
    input_ids = torch.randint(VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": input_ids, "labels": input_ids}


def materialise(model: nn.Module, group: dist.ProcessGroup) -> None:
    """MLA with stock DeepSpeed: Q, K and V of all heads travel in three all-to-alls and the output in one."""
    from deepspeed.sequence.layer import DistributedAttention
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def local(q: Tensor, k: Tensor, v: Tensor, module: nn.Module, scaling: float | None) -> Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return sdpa(module, *heads_first, None, dropout=0.0, scaling=scaling, is_causal=True)[0]

    stock = DistributedAttention(local, group, scatter_idx=2, gather_idx=1)

    def three_all_to_alls(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        return stock(*(x.transpose(1, 2) for x in (q, k, v)), 0, None, module, scaling), None

    AttentionInterface.register("three_all_to_alls", three_all_to_alls)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "three_all_to_alls"
