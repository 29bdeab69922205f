"""The attention widths of well-known models, and of any model config."""

from __future__ import annotations

from typing import Any

from ..errors import UlyssesValueError
from ..layout.widths import HeadWidths, MLAWidths

PRESETS: dict[str, MLAWidths] = {
    "deepseek-v2-lite": MLAWidths(16, 128, 64, 128, 512, None),
    "deepseek-v3": MLAWidths(128, 128, 64, 128, 512, 1536),
    "kimi-k2": MLAWidths(64, 128, 64, 128, 512, 1536),
    "glm-4.7-flash": MLAWidths(20, 192, 64, 256, 512, 768),
}


def widths_of_config(text: Any) -> MLAWidths | HeadWidths:
    """Reads the widths of the attention layers from a config, by the attribute names of transformers.

    Args:
        text: the config of a decoder. For a model with several parts, the config of its text model.

    Raises:
        ValueError: a width is missing or is not a positive whole number.
    """
    heads = _number(text, "num_attention_heads")
    latent = _number_or_none(text, "kv_lora_rank")
    if latent is not None:
        nope, rope, value = (_number(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return MLAWidths(heads, nope, rope, value, latent, _number_or_none(text, "q_lora_rank"))
    width = _number_or_none(text, "head_dim") or _number(text, "hidden_size") // heads
    return HeadWidths(heads, _number_or_none(text, "num_key_value_heads") or heads, width, width)


def _number(text: Any, name: str) -> int:
    value = _number_or_none(text, name)
    if value is None:
        raise UlyssesValueError(f"the config has no {name}: add it, or add a model_type that transformers knows.")
    return value


def _number_or_none(text: Any, name: str) -> int | None:
    value = getattr(text, name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise UlyssesValueError(f"{name} in the config must be a positive whole number, got {value!r}.")
    return value
