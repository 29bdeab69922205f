"""Small random models, as their users would train them: over stock DeepSpeed or by one of our strategies."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY = 512
#: Ways to parallelize, by the names that the tables have for them.
STRATEGIES = {
    "packed": {"strategy": "packed"},
    "latent_kv": {"strategy": "latent_kv"},
    "latent_qkv": {"strategy": "latent_qkv"},
    "gather_kv": {"strategy": "gather_kv"},
    "head_tail": {"strategy": "gather_kv", "split": "head_tail"},
}
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.1,  # about hidden_size ** -0.5: at 0.02 attention is nearly uniform, and its errors hardly show
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8, "num_key_value_heads": 4},
    # Widths of a head to each other as in DeepSeek-V3: 128, 64 and 128.
    "deepseek_v3": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 96,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 64,
    },
}
MODELS = tuple(_OWN)


def build(model_type: str, dtype: torch.dtype, longest: int, **changes: Any) -> nn.Module:
    """The same weights in every process and in every dtype, but for rounding.

    Args:
        longest: tokens of a sequence.
        changes: to the config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = _COMMON | _OWN[model_type] | {"max_position_embeddings": max(4096, longest)} | changes
    config = AutoConfig.for_model(model_type, **settings)
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
