"""Finds the attention layers of a Hugging Face model, and refuses models that would be silently wrong.

A probe (`hf/probe.py`) observes what layers hand to the attention function. The code of a forward, which tells less, is
looked at only where the probe's forward did not run it: see `names_of`.

MLA widths are read from the modules, never from the config: `config.head_dim` is R in most models and N+R in others.

Letters: N width of a query or key head without its RoPE part · R width of the RoPE part.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UlyssesValueError
from ..layout.widths import MLAWidths
from .arguments import MEDIA, SCORE_ARGUMENTS
from .probe import AttentionCall, Probe, probe

#: Layer types whose masks follow from positions, documents and a window.
_LAYER_TYPES = {"full_attention", "sliding_attention"}
#: Mask functions of transformers that text models may call; others make masks that positions do not tell.
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask"}
_ALONE = "train it without sequence parallelism"


class UnsupportedModelError(UlyssesValueError):
    """The model cannot be made sequence-parallel; the message names it, the reason and the way out."""


@dataclass(frozen=True)
class AttentionModel:
    """The parts of a model that are patched.

    Attributes:
        text_model: the module whose forward makes position ids and masks.
        layers: its attention modules, in order.
        model_type: the type that the text model's config names.
    """

    text_model: nn.Module
    layers: tuple[nn.Module, ...]
    model_type: str


def find_attention(model: nn.Module) -> AttentionModel:
    """Finds the attention layers of a Hugging Face model and the text model that holds them.

    Raises:
        UnsupportedModelError: there are no supported attention layers, or the model has a feature that would be silently
            wrong.
    """
    name = _name_of(model)
    _refuse_learnt_prompts(name, model)
    text_model, layers, seen = _find_layers(name, model)
    _refuse_what_is_needed(name, model)
    _refuse_encoder_decoder(name, model, text_model)
    _refuse_linear_attention(name, text_model)
    _refuse_indexers(name, text_model)
    _refuse_layer_types(name, text_model)
    _refuse_bidirectional(name, text_model)
    _refuse_fused_attention(name, text_model, layers)
    _refuse_pooling(name, model)
    for layer in layers:
        calls = seen.calls_of(layer) if seen is not None else []
        check = _refuse_mla_layer if is_mla(layer) else _refuse_layer
        check(f"{name}: {type(layer).__name__}", layer, calls)
        _refuse_what_is_lost(name, layer, calls)
    _refuse_masks(name, text_model, seen)
    _refuse_counted_positions(name, text_model, seen)
    return AttentionModel(text_model, tuple(layers), text_model.config.model_type)


def is_mla(module: nn.Module) -> bool:
    """Whether the module is Multi-head Latent Attention."""
    return hasattr(module, "kv_lora_rank") and hasattr(module, "kv_b_proj")


def is_patched(model: nn.Module) -> bool:
    """Whether `parallelize` has patched any layer of the model."""
    return any("_ulysses" in vars(m) for m in model.modules())


def _name_of(model: nn.Module) -> str:
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return type(model).__name__ + (f" ({model_type})" if model_type else "")


def _find_layers(name: str, model: nn.Module) -> tuple[Any, list[nn.Module], Probe | None]:
    """Returns the innermost text model with attention layers, those layers in order, and what the probe has seen."""
    from transformers import PreTrainedModel

    models = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    mla = {m for m in model.modules() if is_mla(m)}
    if mla:
        text_models = [m for m in models if mla <= set(m.modules())][-1:]
    else:
        # A model with images or sounds has other attention too: the text model is the one of the text config.
        texts = {(type(c), c.model_type) for c in (m.config.get_text_config() for m in models[:1])}
        text_models = [m for m in models if (type(m.config), m.config.model_type) in texts]
    for text_model in reversed(text_models):  # from the inside out
        seen = probe(text_model)
        layers = [m for m in text_model.modules() if is_mla(m) or _attends(m, seen)]
        if layers:
            return text_model, layers, seen
    if models:
        raise UnsupportedModelError(
            f"{name} has no layer that calls transformers' attention interface: parallelize supports decoders such as "
            "deepseek_v3, llama, qwen3_moe and gemma3."
        )
    raise UnsupportedModelError(
        f"{name} is not a transformers PreTrainedModel around its attention layers, so this package cannot see "
        "positions and masks: load it with AutoModelForCausalLM (remote code: load it natively, without trust_remote_code), "
        "or use UlyssesMLAAttention or UlyssesAttention in your own model."
    )


def _attends(module: nn.Module, seen: Probe | None) -> bool:
    return (seen is not None and bool(seen.calls_of(module))) or "get_interface" in names_of(module)


def names_of(module: nn.Module) -> set[str]:
    """The names in the code of a module's forward, beneath decorators and the hooks of accelerate.

    This is the way out for code that the probe's forward did not run: a forward that was replaced on an instance and may
    be bound to its weights, a layer that runs on other inputs only (cross-attention), and models that cannot be built or
    run without weights (remote code, routers that copy numbers to the host).
    """
    code = getattr(inspect.unwrap(vars(module).get("_old_forward", module.forward)), "__code__", None)
    if code is None:
        return set()
    # The keywords of calls are tuples among the constants.
    keywords = (word for constant in code.co_consts if isinstance(constant, tuple) for word in constant)
    return {*code.co_names, *(word for word in keywords if isinstance(word, str))}


# Checks of the whole model.


def _refuse_learnt_prompts(name: str, model: nn.Module) -> None:
    for module in model.modules():
        adapters = getattr(module, "peft_config", None)
        if isinstance(adapters, dict) and any(getattr(c, "is_prompt_learning", False) for c in adapters.values()):
            raise UnsupportedModelError(
                f"{name} learns a prompt, whose tokens PEFT would put in front of every rank's shard: use "
                "LoRA or another adapter of the layers."
            )


def _refuse_encoder_decoder(name: str, model: nn.Module, text_model: Any) -> None:
    has_decoder = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if has_decoder or getattr(text_model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder with a decoder; only decoders are supported: {_ALONE}.")


def _refuse_linear_attention(name: str, text_model: Any) -> None:
    """Refuses layers that carry a state from token to token."""
    if "linear_attention" in _layer_types(text_model) or any(
        hasattr(m, "A_log") or isinstance(m, nn.Conv1d) or "DeltaAttention" in type(m).__name__
        for m in text_model.modules()
    ):
        raise UnsupportedModelError(
            f"{name} has linear-attention layers, whose state would restart on every rank: train it without sequence "
            "parallelism until those layers are supported."
        )


def _refuse_indexers(name: str, text_model: nn.Module) -> None:
    """Refuses layers that choose keys by scores; a layer without an indexer may reuse the choice of another."""
    for module in text_model.modules():
        if getattr(module, "indexer", None) is not None or (is_mla(module) and hasattr(module, "skip_topk")):
            raise UnsupportedModelError(
                f"{name}: {type(module).__name__} selects keys with a sparse indexer, which is built on the local length and "
                "would choose among one rank's tokens: use a model with dense attention, or train it without sequence "
                "parallelism."
            )


def _refuse_layer_types(name: str, text_model: Any) -> None:
    others = sorted(_layer_types(text_model) - _LAYER_TYPES)
    if others:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(others)}, whose masks this package does not support (it "
            f"supports {' and '.join(sorted(_LAYER_TYPES))}): {_ALONE}."
        )


def _layer_types(text_model: Any) -> set[str]:
    return set(getattr(text_model.config, "layer_types", None) or ())


def _refuse_bidirectional(name: str, text_model: Any) -> None:
    # With "vision", tokens of images attend in both directions. Those are refused in the forward.
    if getattr(text_model.config, "use_bidirectional_attention", False) not in (None, False, "vision"):
        raise UnsupportedModelError(_other_masks(name, "use_bidirectional_attention"))


def _refuse_masks(name: str, text_model: nn.Module, seen: Probe | None) -> None:
    """Refuses text models that make other masks than those of causality, documents and windows."""
    if seen is None:
        words = {word for word in names_of(text_model) if word.startswith("create_") and word.endswith("_mask")}
        if words - _MASKS:
            raise UnsupportedModelError(_other_masks(name, ", ".join(sorted(words - _MASKS))))
    elif not all(mask.is_known for mask in seen.masks):
        raise UnsupportedModelError(_other_masks(name, "found in a trial forward"))


def _refuse_counted_positions(name: str, text_model: nn.Module, seen: Probe | None) -> None:
    """Refuses text models that number the tokens themselves; those without any positions are right."""
    counts = _lacks_position_ids(text_model) if seen is None else seen.counts_positions
    if counts:
        raise UnsupportedModelError(
            f"{name} does not use the position_ids that it is given and counts positions itself, so they would restart at 0 "
            f"on every rank: {_ALONE}."
        )


def _lacks_position_ids(text_model: Any) -> bool:
    """Whether the forward takes tokens by name but not their positions, by its signature."""
    parameters = inspect.signature(vars(text_model).get("_old_forward", text_model.forward)).parameters
    return "input_ids" in parameters and "position_ids" not in parameters


def _other_masks(name: str, what: str) -> str:
    return f"{name} has masks other than those of causality, documents and windows ({what}): {_ALONE}."


def _refuse_fused_attention(name: str, text_model: nn.Module, layers: Sequence[nn.Module]) -> None:
    known = set(layers)
    unknown = {
        type(m).__name__
        for m in text_model.modules()
        if m not in known and hasattr(m, "num_key_value_groups") and hasattr(m, "o_proj")
    }
    if unknown:
        raise UnsupportedModelError(
            f"{name} has attention layers ({', '.join(sorted(unknown))}) that do not call transformers' attention "
            "interface (a fused kernel replaces it), so they would see one rank's tokens only: load the model without "
            f"them (use_kernels=False), or {_ALONE}."
        )


def _refuse_pooling(name: str, model: nn.Module) -> None:
    pooled = ("SequenceClassification", "ImageClassification", "QuestionAnswering", "RewardModel")
    if any(word in type(model).__name__ for word in pooled):
        raise UnsupportedModelError(
            f"{name} pools over the sequence, but each rank has only a shard of it: parallelize the model with its language "
            "modelling head or its base model, and pool over the ranks in your own loop."
        )


def _refuse_what_is_needed(name: str, model: nn.Module) -> None:
    """Refuses models that cannot run on text alone."""
    parameters = inspect.signature(model.forward).parameters
    needed = [word for word in MEDIA if word in parameters and parameters[word].default is inspect.Parameter.empty]
    if needed:
        raise UnsupportedModelError(
            f"{name} needs {' and '.join(needed)} in every forward, but only text is supported under sequence "
            "parallelism: parallelize its language model, or train it without sequence parallelism."
        )
    if "shared_kv_states" in parameters:
        raise UnsupportedModelError(
            f"{name} attends to keys and values that another model hands it (shared_kv_states), of which each rank would "
            f"have its local tokens only: {_ALONE}."
        )


# Checks of one layer. `name` is that of the model and of the layer's class; `calls` are those that the probe has seen.


def _refuse_layer(name: str, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    is_causal = getattr(layer, "is_causal", True) is not False
    if not is_causal or "Cross" in type(layer).__name__ or any(c.keywords.get("is_causal") is False for c in calls):
        raise UnsupportedModelError(f"{name} is not causal self-attention: {_ALONE}.")
    # Without a call that was seen, the code has to tell.
    keywords = [set(call.keywords) for call in calls] or [names_of(layer)]
    refuse_lost_window(name, layer, all("sliding_window" in words for words in keywords))


def refuse_lost_window(name: str, layer: nn.Module, is_handed_on: bool) -> None:
    """Refuses a layer whose config has a sliding window that its attention function is not told.

    Args:
        name: the name of the layer, for the message.
        is_handed_on: whether the layer calls the attention function with the keyword `sliding_window`.

    Raises:
        UnsupportedModelError: the window would be lost.
    """
    config: Any = layer.config
    if is_handed_on or is_mla(layer) or getattr(config, "sliding_window", None) is None:
        return
    types, index = getattr(config, "layer_types", None), getattr(layer, "layer_idx", None)
    if types is None or index is None or types[index] == "sliding_attention":
        raise UnsupportedModelError(_lost_window(name))


def _lost_window(name: str) -> str:
    return (
        f"{name} does not hand its sliding window to the attention function, so it would be lost: set "
        f"config.sliding_window = None if no sequence is longer, or {_ALONE} and without MoBA."
    )


def _refuse_what_is_lost(name: str, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """Refuses layers whose calls of the attention function show that something would not arrive or be dropped."""
    kind = type(layer).__name__
    for call in calls:
        where = f"{name}: {kind} ({call.layer})"
        if not call.has_documents:
            raise UnsupportedModelError(
                f"{where} does not receive the keyword arguments of the model's forward, so it would not know the "
                f"sequence that the ranks share, and would attend to one rank's tokens only: {_ALONE}."
            )
        biases = sorted(word for word in SCORE_ARGUMENTS if call.keywords.get(word) is not None)
        if call.has_other_mask or biases:
            what = ", ".join(biases) if biases else "a mask or bias that it makes itself"
            raise UnsupportedModelError(
                f"{where} gives the attention function {what}, which covers one rank's tokens and would be lost: "
                f"{_ALONE}."
            )
        if call.mask is None or not call.mask.is_known:
            continue
        window, handed_on = call.mask.window, call.keywords.get("sliding_window")
        if window is None and handed_on is not None:
            raise UnsupportedModelError(
                f"{where} hands a sliding window of {handed_on} tokens to the attention function, but its mask has none, so "
                f"the result would depend on the attention implementation: set config.sliding_window = None, or {_ALONE}."
            )
        if window != handed_on:
            raise UnsupportedModelError(_lost_window(f"{name}: {kind}"))


def _refuse_mla_layer(name: str, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    _refuse_other_expansion(name, layer, calls)
    _refuse_mla_widths(name, layer)


def _refuse_other_expansion(name: str, layer: nn.Module, calls: Sequence[AttentionCall]) -> None:
    """Refuses MLA layers whose keys and values are not those that `expand_kv` makes of the latents."""
    if not hasattr(layer, "expand_kv"):
        raise UnsupportedModelError(
            f"{name} has no expand_kv, the place where its keys and values are made. If the model comes with remote "
            "code, load it natively (without trust_remote_code, for example as deepseek_v3); otherwise upgrade to "
            "transformers >= 5.15."
        )
    # Without a call that was seen, the code has to tell.
    attends = [c.attends_to_expanded for c in calls] or [{"expand_kv", "get_interface"} <= names_of(layer)]
    if not all(attends):
        raise UnsupportedModelError(
            f"{name}.forward does not call the attention interface with the results of expand_kv (a fused kernel replaces "
            "it), so its heads cannot be exchanged: load the model without fused MLA kernels (use_kernels=False)."
        )


def _refuse_mla_widths(name: str, layer: Any) -> None:
    if MLAWidths.of(layer).rope == 0:
        raise UnsupportedModelError(
            f"{name} has no RoPE part (qk_rope_head_dim=0), so there is no shared key to gather: train it without "
            "sequence parallelism."
        )
    if getattr(layer, "num_key_value_groups", 1) != 1:
        raise UnsupportedModelError(
            f"{name} has num_key_value_groups={layer.num_key_value_groups}; MLA with grouped key-value heads is not "
            "supported: set num_key_value_heads to num_attention_heads if the checkpoint allows it, or train without "
            "sequence parallelism."
        )
