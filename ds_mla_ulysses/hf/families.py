"""Which modules of a Hugging Face model attend, and what has to be refused and why.

MLA widths are read from the modules, never from the config: `config.head_dim` is R in most models and
N+R in others.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import nn

from ..layout.widths import MLAWidths

#: Model types that the tests train; others with the same modules work with a warning. First those with MLA.
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
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi3",
)

#: Layer types whose masks follow from positions, documents and a window.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
#: Mask functions of transformers that text models may call; others build masks that positions do not tell.
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}
_ALONE = "train it without sequence parallelism"


class UnsupportedModelError(ValueError):
    """The model cannot be made sequence-parallel; the message names it, the reason and the way out."""


@dataclass(frozen=True)
class AttentionModel:
    """What of a model is patched.

    Attributes:
        text_model: the module whose forward makes position ids and masks.
        layers: its attention modules, in order.
        model_type: as in the text model's config.
    """

    text_model: nn.Module
    layers: tuple[nn.Module, ...]
    model_type: str


def find_attention(model: nn.Module) -> AttentionModel:
    """The attention layers of a Hugging Face model and the text model that holds them.

    Raises:
        UnsupportedModelError: no supported attention layers, or some feature that would be silently wrong.
    """
    from transformers import PreTrainedModel

    name = _name(model)
    for m in model.modules():
        adapters = getattr(m, "peft_config", None)
        if isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values()):
            raise UnsupportedModelError(
                f"{name} learns a prompt, whose tokens PEFT would put in front of every rank's part of the sequence: use "
                "LoRA or another adapter of layers."
            )
    mla = [m for m in model.modules() if is_mla(m)]
    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    if mla:
        owners = [m for m in models if {id(x) for x in m.modules()} >= set(map(id, mla))]
    else:
        # A model with images or sounds has other attention too: the text model is the one of the text config.
        texts = {(type(c), c.model_type) for c in (m.config.get_text_config() for m in models[:1])}
        owners = [m for m in models if (type(m.config), m.config.model_type) in texts and attention_layers(m)]
    if not owners and models:
        raise UnsupportedModelError(
            f"{name} has no layer that calls transformers' attention interface: parallelize supports decoders such as "
            f"{', '.join(TESTED)}."
        )
    if not owners:
        raise UnsupportedModelError(
            f"{name} is not a transformers PreTrainedModel around its attention layers, so positions and masks cannot "
            "be followed: load it with AutoModelForCausalLM (remote code: load it natively, without trust_remote_code), "
            "or use UlyssesMLAAttention or UlyssesAttention in your own model."
        )
    text_model = owners[-1]  # the innermost, since modules() goes from the outside in
    layers = attention_layers(text_model)
    _refuse_model(name, model, text_model, layers)
    for layer in layers:
        (_refuse_mla_layer if is_mla(layer) else _refuse_layer)(name, layer)
    return AttentionModel(text_model, tuple(layers), text_model.config.model_type)


def is_mla(module: nn.Module) -> bool:
    """Whether the module is Multi-head Latent Attention."""
    return hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj")


def attention_layers(model: nn.Module) -> list[nn.Module]:
    """The modules that call transformers' attention interface, MLA or not, in order."""
    return [m for m in model.modules() if is_mla(m) or "get_interface" in names_of(m)]


def names_of(module: nn.Module) -> set[str]:
    """The names that a module's own forward uses, beneath decorators and offloading hooks."""
    code = getattr(inspect.unwrap(vars(module).get("_old_forward", module.forward)), "__code__", None)
    if code is None:
        return set()
    # Keywords of calls are tuples among the constants.
    keywords = (word for constant in code.co_consts if isinstance(constant, tuple) for word in constant)
    return {*code.co_names, *(word for word in keywords if isinstance(word, str))}


def is_patched(model: nn.Module) -> bool:
    """Whether `parallelize` has patched any layer of the model."""
    return any("_ulysses" in vars(m) for m in model.modules())


def _name(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" ({model_type})" if model_type else "")


def _refuse_model(name: str, model: nn.Module, text_model: nn.Module, layers: list[nn.Module]) -> None:
    config = text_model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder with a decoder; only decoders are supported: {_ALONE}.")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if "linear_attention" in others or any(
        hasattr(m, "A_log") or isinstance(m, nn.Conv1d) or "DeltaAttention" in type(m).__name__
        for m in text_model.modules()
    ):
        raise UnsupportedModelError(
            f"{name} has linear-attention layers, whose state would restart on every rank: train it without sequence "
            "parallelism until those layers are supported."
        )
    if others and not any(hasattr(m, "indexer") for m in text_model.modules()):
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(others)}, whose masks are not followed by this package (only "
            f"{' and '.join(sorted(_LAYER_TYPES))} are): {_ALONE}."
        )
    masks = {word for word in names_of(text_model) if word.startswith("create_") and word.endswith("_mask")} - _MASKS
    if masks or getattr(config, "use_bidirectional_attention", False):
        what = ", ".join(sorted(masks)) or "use_bidirectional_attention"
        raise UnsupportedModelError(f"{name} masks by more than causality, documents and windows ({what}): {_ALONE}.")
    unknown = {
        type(m).__name__
        for m in text_model.modules()
        if m not in layers and hasattr(m, "num_key_value_groups") and hasattr(m, "o_proj")
    }
    if unknown:
        raise UnsupportedModelError(
            f"{name} has attention layers ({', '.join(sorted(unknown))}) that do not call transformers' attention "
            "interface (a fused kernel replaces it), so they would see one rank's tokens only: load the model without "
            f"them (use_kernels=False), or {_ALONE}."
        )
    pooled = ("SequenceClassification", "QuestionAnswering", "RewardModel")
    if any(word in type(model).__name__ for word in pooled):
        raise UnsupportedModelError(
            f"{name} pools over the sequence, of which each rank has a part: parallelize the model with its language "
            "modelling head or its base model, and pool over the ranks in your own loop."
        )


def _refuse_layer(name: str, layer: nn.Module) -> None:
    kind = type(layer).__name__
    if getattr(layer, "is_causal", True) is False or "Cross" in kind:
        raise UnsupportedModelError(f"{name}: {kind} is not causal self-attention: {_ALONE}.")
    refuse_lost_window(f"{name}: {kind}", layer)


def refuse_lost_window(name: str, layer: nn.Module) -> None:
    """Refuses a layer whose window its mask alone knows."""
    config = layer.config
    if getattr(config, "sliding_window", None) is None:
        return
    types, index = getattr(config, "layer_types", None), getattr(layer, "layer_idx", None)
    slides = types is None or index is None or types[index] == "sliding_attention"
    if slides and not is_mla(layer) and "sliding_window" not in names_of(layer):
        raise UnsupportedModelError(
            f"{name} does not hand its sliding window to the attention function, so it would be lost: set "
            f"config.sliding_window = None if no sequence is longer, or {_ALONE} and without MoBA."
        )


def _refuse_mla_layer(name: str, layer: nn.Module) -> None:
    if getattr(layer, "indexer", None) is not None or hasattr(layer, "skip_topk"):
        raise UnsupportedModelError(
            f"{name} selects keys with a sparse indexer, which is built on the local length and would choose among one "
            "rank's tokens: use a dense MLA model, or train it without sequence parallelism."
        )
    if not hasattr(layer, "expand_kv"):
        raise UnsupportedModelError(
            f"{name}: {type(layer).__name__} has no expand_kv, the place where its keys and values are made. If the model "
            "comes with remote code, load it natively (without trust_remote_code, for example as deepseek_v3); "
            "otherwise upgrade to transformers >= 5.15."
        )
    if not {"expand_kv", "get_interface"} <= names_of(layer):
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
