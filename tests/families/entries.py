"""What `make families` checks: every language model of transformers, those with images, and configs that defaults lack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_ALTERNATING = ["sliding_attention", "full_attention"]
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Entry:
    """One row of the result.

    Attributes:
        model_type: the model type.
        config: arguments of its config class, in place of the defaults.
        settings: settings of the small config, by dotted name.
        with_images: whether the model of images and text is meant, on text alone.
    """

    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    with_images: bool = False


#: Configs beside the defaults, by the name that the result has for them.
VARIANTS: Mapping[str, Entry] = {
    "gemma4_text, shared KV layers": Entry("gemma4_text", {"num_kv_shared_layers": 2}),
    "gemma4_text, keys are values": Entry("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_text, experts": Entry(
        "gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
    ),
    "gemma3n_text, shared KV layers": Entry(
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": _ALTERNATING * 3,
            "activation_sparsity_pattern": [0.0] * 6,
            "intermediate_size": [64] * 6,
        },
    ),
    "gemma3n_text, sparse activations": Entry("gemma3n_text", {"activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]}),
    "phi3, longrope": Entry(
        "phi3",
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 16,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
    ),
    "llama, dynamic RoPE": Entry("llama", {"rope_parameters": _DEFAULT_ROPE | {"rope_type": "dynamic", "factor": 4.0}}),
    "llama4_text, chunked attention": Entry("llama4_text", settings={"attention_chunk_size": 8}),
    "qwen2, sliding windows": Entry(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 4},
        {"sliding_window": 8},
    ),
    "stablelm, parallel residual": Entry("stablelm", settings={"use_parallel_residual": True, "qk_layernorm": True}),
    "granite, multipliers": Entry("granite", settings={"attention_multiplier": 0.3, "residual_multiplier": 0.5}),
    "cohere2, short windows": Entry("cohere2", settings={"sliding_window": 8}),
    "minimax_m3_vl_text, sparse layers": Entry(
        "minimax_m3_vl_text",
        {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "num_hidden_layers": 4},
        {"index_block_size": 8, "index_topk_blocks": 2},
    ),
    "minimax_m3_vl, sparse layers": Entry(
        "minimax_m3_vl",
        {"text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "num_hidden_layers": 4}},
        {"text_config.index_block_size": 8, "text_config.index_topk_blocks": 2},
        with_images=True,
    ),
    "paligemma, causal": Entry(
        "paligemma", settings={"text_config.use_bidirectional_attention": False}, with_images=True
    ),
    "bert, as an encoder": Entry("bert", settings={"is_decoder": False}),
}


#: Text models that no automatic class for causal language models has.
OTHERS = ("kimi_k25", "mistral4")


def entries() -> dict[str, Entry]:
    """Every model type of the installed transformers that makes text of text, the other text models, and the variants."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    known = {kind: Entry(kind) for kind in sorted([*causal, *OTHERS])}
    for kind, name in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
        if kind not in known:
            known[kind] = Entry(kind, with_images=True)
        elif causal.get(kind, name) != name:  # the automatic class for language models leaves the images out
            known[f"{kind}, with images"] = Entry(kind, with_images=True)
    return known | dict(VARIANTS)
