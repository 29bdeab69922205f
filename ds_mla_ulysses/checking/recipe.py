"""A small config and a small model of any architecture, from its config."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UlyssesValueError
from .facts import ENCODERS, FACTS, Facts
from .request import Request

VOCABULARY = 96
HEADS = 4
#: A model with more parameters was not made small by the recipe.
_MOST_PARAMETERS = 30_000_000
#: Per-layer settings of which the small model has every value.
LAYER_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
#: Layers that a small model has if its config does not need more.
_LAYERS = 4
#: RoPE types switch their frequencies here, inside the rows of `cases`.
_SWITCH = 16

#: The widths of small models. Those of MLA differ from each other, so that swapped ones show.
_WIDTHS: Mapping[str, int] = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "attention_hidden_size": 64,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 8,
    "intermediate_size": 64,
    "n_inner": 64,
    "d_ff": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "num_attention_heads": HEADS,
    "n_head": HEADS,
    "num_heads": HEADS,
    "head_dim": 16,
    "rotary_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "sliding_window": 16,
    "sliding_window_size": 16,
    "swa_head_dim": 16,
    "rel_extent": 16,
    "dense_intermediate_size": 64,
    "shared_intermediate_size": 16,
    "moe_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 16,
    "unpadded_vocab_size": VOCABULARY,
    "attention_chunk_size": 16,
    "floor_scale": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "num_mem_blocks": 1,
    "num_memory_blocks": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Further widths of the configs beside that of the text model: vision and audio models, and what connects them.
_MEDIA_WIDTHS: Mapping[str, int] = {
    "depth": 2,
    "embed_dim": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_num_layers": 1,
    "decoder_hidden_size": 64,
    "decoder_intermediate_size": 64,
    "resampler_depth": 1,
    "aligner_num_add_layers": 1,
    "out_hidden_size": 64,
    "output_dim": 64,
    "text_hidden_size": 64,
    "projection_dim": 64,
    "projection_hidden_dim": 64,
    "projection_intermediate_size": 64,
    "projector_hidden_size": 64,
    "alignment_intermediate_size": 64,
    "merged_hidden_size": 64,
    "patch_embed_hidden_size": 64,
    "downsample_hidden_size": 32,
    "latent_query_num": 8,
    "image_token_embed_dim": 64,
    "mlp_dim": 64,
    "base_channels": 32,
    "latent_channels": 32,
    "num_embeddings": 64,
    "codebook_size": 64,
    "codebook_dim": 32,
}
#: Tokens of images and other media lie above those of text (`cases.TEXT_VOCABULARY`).
_MEDIA_TOKEN = 90
_MEDIA_TOKENS = re.compile(r"(image|video|audio|vision|boi|eoi|boa|eoa).*_(token_id|token_index|patch_id)")
#: Settings that are cut only if they are larger: with 0 or 1 a layer has another kind.
_AT_MOST: Mapping[str, int] = {"first_k_dense_replace": 1, "decoder_sparse_step": 2, "interleave_moe_layer_step": 2}
_SHOWN = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "sliding_window",
    "is_decoder",
)


class NoRecipe(Exception):
    """No small model could be built; the message says why."""


def small_config(request: Request) -> Any:
    """Returns the config of a small model with the layer types and the kind of heads of the requested one.

    Raises:
        NoRecipe: transformers cannot read the config.
    """
    kind = str(request.config.get("model_type", ""))
    facts = FACTS.get(kind, Facts())
    try:
        config = _read(request, kind, facts)
        if facts.part:
            config = getattr(config, facts.part)
        if not (request.is_type and facts.is_small):
            _shrink(config, request.is_type)
        if request.is_type and kind in ENCODERS:
            config.is_decoder = True
        for name, value in {**facts.settings, **request.variant}.items():
            *path, last = name.split(".")
            owner = config
            for part in path:
                owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
            if isinstance(owner, dict):
                owner[last] = copy.deepcopy(value)
            else:
                setattr(owner, last, copy.deepcopy(value))
        _set_experts(config)
    except Exception as error:  # a config class may raise anything
        raise NoRecipe(f"no small config could be made of this one: {type(error).__name__}: {error}") from error
    return config


def shown_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of the text model that say which kinds of layers and heads it has."""
    text = config.get_text_config(decoder=True)
    shown = {name: vars(text)[name] for name in _SHOWN if vars(text).get(name) is not None}
    ropes = getattr(text, "rope_parameters", None) or {}
    types = {str(rope.get("rope_type")) for rope in _ropes(ropes)} - {"default", "None"}
    return shown | ({"rope_type": ", ".join(sorted(types))} if types else {})


def build(request: Request, config: Any) -> nn.Module:
    """Builds the model that a rank compares, the same on every call and on every rank.

    Every parameter is moved off its initial value: zeros and ones would hide a wrong gradient. It is in training mode,
    without dropout.

    Raises:
        NoRecipe: it cannot be built, or is not small.
    """
    dtype = getattr(torch, request.dtype)
    facts = FACTS.get(str(request.config.get("model_type", "")), Facts())
    _stand_in_for_timm()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = _first_that_builds(_class_of(request, config, facts), config)
    finally:
        torch.set_default_dtype(before)
    model = model.to(dtype)
    if facts.language:
        model.set_default_language(facts.language)
    generator = torch.Generator().manual_seed(7)
    moved = [(p, 0.2 if p.ndim < 2 else 0.05) for p in model.parameters() if p.is_floating_point()]
    moved += [(b, 0.05) for name, b in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for tensor, scale in moved:
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.add_((scale * noise).to(tensor.dtype))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    trained: nn.Module = model.train()
    return trained


def _read(request: Request, kind: str, facts: Facts) -> Any:
    from transformers import CONFIG_MAPPING

    unwanted = ("quantization_config", "auto_map", "torch_dtype", "dtype", "transformers_version")
    given = {name: value for name, value in request.config.items() if name not in unwanted}
    if request.is_type:
        given = copy.deepcopy(dict(facts.init)) | given
    if request.model_code:
        found: Any = getattr(_load(request.model_code), "config_class", None)
        if found is not None:
            return found.from_dict(given)
    if kind not in CONFIG_MAPPING:
        raise UlyssesValueError(f"transformers does not know the model type {kind!r}; name its code with model_code")
    return CONFIG_MAPPING[kind](**given) if request.is_type else CONFIG_MAPPING[kind].from_dict(given)


def _load(model_code: str) -> Any:
    """Returns the class that "FILE.py:Class" names. The file is run."""
    file, _, name = model_code.rpartition(":")
    module_name = "ulysses_checked_" + Path(file).stem
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, file)
        if spec is None or spec.loader is None:
            raise UlyssesValueError(f"--model-code takes FILE.py:Class, got {model_code!r}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # classes are looked up there
        spec.loader.exec_module(module)
    return getattr(sys.modules[module_name], name)


def _class_of(request: Request, config: Any, facts: Facts) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto

    if request.model_code:
        return _load(request.model_code)
    if facts.class_name:
        return getattr(transformers, facts.class_name)
    kind = config.model_type
    if request.with_images:
        return getattr(transformers, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind])
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForCausalLM
    if kind in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    for name in request.config.get("architectures") or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise NoRecipe(f"no language model of transformers has the model type {kind!r}: name its class with model_code.")


def _first_that_builds(model_class: Any, config: Any) -> Any:
    """Builds with sdpa, or eagerly if the model has no sdpa."""
    make = getattr(model_class, "from_config", None) or model_class._from_config
    problem = ""
    for implementation in ("sdpa", "eager"):
        try:
            with torch.device("meta"):
                count = sum(
                    p.numel() for p in make(copy.deepcopy(config), attn_implementation=implementation).parameters()
                )
            if count > _MOST_PARAMETERS:
                raise NoRecipe(f"the recipe does not make this model small: it has {count:,} parameters.")
        except NoRecipe:
            raise
        except Exception as error:  # a model may raise anything
            problem = problem or f"{type(error).__name__}: {error}"
            continue
        torch.manual_seed(0)
        return make(copy.deepcopy(config), attn_implementation=implementation)
    raise NoRecipe(f"no small model could be built: {problem}")


def _stand_in_for_timm() -> None:
    """Without timm, an empty model takes the place of Gemma 3n's vision model, which does not run on text."""
    if importlib.util.find_spec("timm") is not None:
        return
    from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedModel

    class NoVision(PreTrainedModel):  # type: ignore[misc,unused-ignore]
        config_class = Gemma3nVisionConfig

    AutoModel.register(Gemma3nVisionConfig, NoVision, exist_ok=True)


def _shrink(config: Any, is_type: bool) -> None:
    """Cuts the widths and the layers of a config and of the configs in it."""
    settings = vars(config)
    is_mla = bool(settings.get("kv_lora_rank"))
    changed: dict[str, Any] = {name: x for name, x in _WIDTHS.items() if _is_number(settings.get(name))}
    changed |= {name: min(most, settings[name]) for name, most in _AT_MOST.items() if type(settings.get(name)) is int}
    for name, value in settings.items():
        if isinstance(value, float) and any(
            word in name for word in ("dropout", "pdrop", "jitter", "layerdrop", "drop_path")
        ):
            changed[name] = 0.0
    if config.get_text_config() is not config or not hasattr(config, "vocab_size"):
        changed |= {name: x for name, x in _MEDIA_WIDTHS.items() if _is_number(settings.get(name))}
    changed |= {name: _MEDIA_TOKEN for name, x in settings.items() if _is_number(x) and _MEDIA_TOKENS.fullmatch(name)}
    if _is_number(settings.get("num_key_value_heads")):
        changed["num_key_value_heads"] = HEADS if is_mla else _kv_heads(settings, is_type)
    if is_mla and "head_dim" in settings:
        changed["head_dim"] = _WIDTHS["qk_rope_head_dim"]
    changed |= _fewer_layers(settings)
    for name, value in changed.items():
        _try_set(config, name, value)
    for rope_name in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(rope_name), dict):
            _shrink_ropes(config, settings[rope_name])
    for value in list(settings.values()):
        if hasattr(value, "model_type"):
            _shrink(value, is_type)


def _kv_heads(settings: Mapping[str, Any], is_type: bool) -> int:
    """As many KV heads as query heads, fewer, or one, as in the config. The default of a class gets fewer."""
    heads = next((settings[n] for n in ("num_attention_heads", "n_head", "num_heads") if settings.get(n)), None)
    given = settings["num_key_value_heads"]
    if given == 1:
        return 1
    return HEADS if given == heads and not is_type else HEADS // 2


def _fewer_layers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The number of layers and every per-layer list, with all values that the lists have."""
    count_name = next((name for name in _LAYER_COUNTS if type(settings.get(name)) is int), None)
    if count_name is None:
        return {}
    count = settings[count_name]
    lists = {
        name: x for name, x in settings.items() if isinstance(x, list) and len(x) == count and name != "architectures"
    }
    kept = layers_to_keep(count, [x for x in lists.values()])
    changed: dict[str, Any] = {name: [x[i] for i in kept] for name, x in lists.items()}
    for name in _LAYER_COUNTS:
        if type(settings.get(name)) is int:
            changed[name] = len(kept)
    return changed


def layers_to_keep(count: int, per_layer: Sequence[Sequence[Any]]) -> list[int]:
    """Chooses layers so that every combination of kinds that the lists have is among them.

    Args:
        count: the number of layers.
        per_layer: lists of that length. Only words and flags are kinds.

    Returns:
        their numbers, in order; at least 4 if there are so many.
    """
    kinds = [x for x in per_layer if all(isinstance(value, str | bool) for value in x)]
    first: dict[tuple[Any, ...], int] = {}
    for layer in range(count):
        first.setdefault(tuple(x[layer] for x in kinds), layer)
    kept = set(first.values())
    # The rest alternates as the original does: from the first layer on.
    for layer in range(count):
        if len(kept) >= _LAYERS:
            break
        kept.add(layer)
    return sorted(kept)


def _shrink_ropes(config: Any, parameters: dict[str, Any]) -> None:
    settings = vars(config)
    width = settings.get("qk_rope_head_dim") if settings.get("kv_lora_rank") else settings.get("head_dim")
    width = width or getattr(config, "hidden_size", 64) // HEADS
    for rope in _ropes(parameters):
        half = int(width * (rope.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0)) // 2
        for name, stretch in (("short_factor", 1.0), ("long_factor", 2.0)):
            if isinstance(rope.get(name), list):
                rope[name] = [stretch + 0.25 * i for i in range(half)]
        if isinstance(rope.get("mrope_section"), list):
            rope["mrope_section"] = [half - 2 * (half // 4), half // 4, half // 4]
        if "original_max_position_embeddings" in rope:
            rope["original_max_position_embeddings"] = _SWITCH
        kind = str(rope.get("rope_type") or rope.get("type"))
        if "original_max_position_embeddings" in settings:
            _try_set(config, "original_max_position_embeddings", _SWITCH)
        if "dynamic" in kind:
            _try_set(config, "max_position_embeddings", _SWITCH)


def _ropes(parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The settings of each RoPE: one, or one for each layer type."""
    nested = [x for x in parameters.values() if isinstance(x, dict)]
    return nested or [dict(parameters) if not isinstance(parameters, dict) else parameters]


def _set_experts(config: Any) -> None:
    """Experts run one after the other, which works in float64."""
    config._experts_implementation = "eager"
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            _set_experts(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _try_set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:  # a property without a setter, or a value that the class does not take
        return
