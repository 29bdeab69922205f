"""The attention widths of models: by name, or of a config."""

from __future__ import annotations

from typing import Any

from ..layout.widths import HeadWidths, MLAWidths

PRESETS: dict[str, MLAWidths] = {
    "deepseek-v2-lite": MLAWidths(16, 128, 64, 128, 512, None),
    "deepseek-v3": MLAWidths(128, 128, 64, 128, 512, 1536),
    "kimi-k2": MLAWidths(64, 128, 64, 128, 512, 1536),
    "glm-4.7-flash": MLAWidths(20, 192, 64, 256, 512, 768),
}


def widths_of_config(text: Any) -> MLAWidths | HeadWidths:
    """The widths that a config names, by the attributes that transformers gives it.

    Args:
        text: the config of a decoder; of a model with several, that of its text part.

    Raises:
        ValueError: a number is missing, or is none.
    """
    heads = _number(text, "num_attention_heads")
    latent = _if_said(text, "kv_lora_rank")
    if latent is not None:
        of_head = (_number(text, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return MLAWidths(heads, *of_head, latent, _if_said(text, "q_lora_rank"))
    width = _if_said(text, "head_dim") or _number(text, "hidden_size") // heads
    return HeadWidths(heads, _if_said(text, "num_key_value_heads") or heads, width, width)


def _number(text: Any, name: str) -> int:
    value = _if_said(text, name)
    if value is None:
        raise ValueError(f"the config says no {name}: name it there, or a model_type that transformers knows.")
    return value


def _if_said(text: Any, name: str) -> int | None:
    value = getattr(text, name, None)
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"the config says {name} {value!r}, which must be a positive whole number.")
    return value
