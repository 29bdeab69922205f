"""Which modules of a Hugging Face model are MLA, and what has to be refused and why.

Everything is read from the modules, never from the config: `config.head_dim` is R in most models and
N+R in others.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

#: Model types that the tests train; others with the same modules work with a warning.
TESTED = (
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k25",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
    "mistral4",
    "axk1",
    "longcat_flash",
)


class UnsupportedModelError(ValueError):
    """The model cannot be made sequence-parallel; the message names it, the reason and the way out."""


@dataclass(frozen=True)
class MLAWidths:
    """Widths of one MLA layer: N, R, V, L and Q (None where there is no query latent), and its heads H."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_latent: int | None

    @classmethod
    def of(cls, module: nn.Module) -> MLAWidths:
        """Reads the widths of a Hugging Face MLA attention module."""
        return cls(
            module.num_heads,
            module.qk_nope_head_dim,
            module.qk_rope_head_dim,
            module.v_head_dim,
            module.kv_lora_rank,
            getattr(module, "q_lora_rank", None),
        )


@dataclass(frozen=True)
class MLAModel:
    """What of a model is patched.

    Attributes:
        text_model: the module whose forward makes position ids and masks.
        layers: its MLA attention modules, in order.
        model_type: as in the text model's config.
    """

    text_model: nn.Module
    layers: tuple[nn.Module, ...]
    model_type: str


def find_mla(model: nn.Module) -> MLAModel:
    """The MLA layers of a Hugging Face model and the text model that holds them.

    Raises:
        UnsupportedModelError: no supported MLA layers, or some feature that would be silently wrong.
    """
    from transformers import PreTrainedModel

    name = _name(model)
    layers = [m for m in model.modules() if hasattr(m, "kv_lora_rank") and hasattr(m, "kv_b_proj")]
    if not layers:
        raise UnsupportedModelError(
            f"{name} has no Multi-head Latent Attention layer: parallelize supports {', '.join(TESTED)}."
        )
    owners = [
        m
        for m in model.modules()
        if isinstance(m, PreTrainedModel) and {id(x) for x in m.modules()} >= set(map(id, layers))
    ]
    if not owners:
        raise UnsupportedModelError(
            f"{name} is not a transformers PreTrainedModel around its attention layers, so positions and masks cannot "
            "be followed: load it with AutoModelForCausalLM (remote code: load it natively, without trust_remote_code), "
            "or use UlyssesMLAAttention in your own model."
        )
    text_model = owners[-1]  # the innermost, since modules() goes from the outside in
    config = text_model.config
    _refuse_model(name, model, text_model, config, layers)
    for layer in layers:
        _refuse_layer(name, layer)
    return MLAModel(text_model, tuple(layers), config.model_type)


def is_patched(model: nn.Module) -> bool:
    """Whether `parallelize` has patched any layer of the model."""
    return any("_ulysses" in vars(m) for m in model.modules())


def _name(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" ({model_type})" if model_type else "")


def _refuse_model(name: str, model: nn.Module, text_model: nn.Module, config: Any, layers: list[nn.Module]) -> None:
    if "linear_attention" in (getattr(config, "layer_types", None) or ()) or any(
        hasattr(m, "A_log") or "DeltaAttention" in type(m).__name__ for m in text_model.modules()
    ):
        raise UnsupportedModelError(
            f"{name} has linear-attention layers, whose state would restart on every rank: train it without sequence "
            "parallelism until those layers are supported."
        )
    others = [
        type(m).__name__
        for m in text_model.modules()
        if m not in layers and hasattr(m, "num_key_value_groups") and hasattr(m, "o_proj")
    ]
    if others:
        raise UnsupportedModelError(
            f"{name} mixes MLA with other attention layers ({sorted(set(others))}), which would see one rank's tokens "
            "only: train it without sequence parallelism."
        )
    pooled = ("SequenceClassification", "QuestionAnswering", "RewardModel")
    if any(word in type(model).__name__ for word in pooled):
        raise UnsupportedModelError(
            f"{name} pools over the sequence, of which each rank has a part: parallelize the model with its language "
            "modelling head or its base model, and pool over the ranks in your own loop."
        )


def _refuse_layer(name: str, layer: nn.Module) -> None:
    if getattr(layer, "indexer", None) is not None or hasattr(layer, "skip_topk"):
        raise UnsupportedModelError(
            f"{name} selects keys with a sparse indexer, which is built on the local length and would choose among one "
            "rank's tokens: use a dense MLA model, or train it without sequence parallelism."
        )
    forward = inspect.unwrap(vars(layer).get("_old_forward", layer.forward))
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if not hasattr(layer, "expand_kv"):
        raise UnsupportedModelError(
            f"{name}: {type(layer).__name__} has no expand_kv, the place where its keys and values are made. If the model "
            "comes with remote code, load it natively (without trust_remote_code, for example as deepseek_v3); "
            "otherwise upgrade to transformers >= 5.15."
        )
    if not {"expand_kv", "get_interface"} <= set(names):
        raise UnsupportedModelError(
            f"{name}: the forward of {type(layer).__name__} does not call expand_kv and the attention interface (a fused "
            "kernel replaces it), so its heads cannot be exchanged: load the model without fused MLA kernels "
            "(use_kernels=False)."
        )
    widths = MLAWidths.of(layer)
    if widths.rope == 0:
        raise UnsupportedModelError(
            f"{name}: {type(layer).__name__} has no rope part (qk_rope_head_dim=0), so there is no shared key to gather: "
            "train it without sequence parallelism."
        )
    if getattr(layer, "num_key_value_groups", 1) != 1:
        raise UnsupportedModelError(
            f"{name}: {type(layer).__name__} has num_key_value_groups={layer.num_key_value_groups}; MLA with grouped "
            "key-value heads is not supported: set num_key_value_heads to num_attention_heads if the checkpoint allows "
            "it, or train without sequence parallelism."
        )
