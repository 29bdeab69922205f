"""The attention widths of models: by name, or of any Hugging Face config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..layout.widths import HeadWidths, MLAWidths

PRESETS: dict[str, MLAWidths] = {
    "deepseek-v2-lite": MLAWidths(16, 128, 64, 128, 512, None),
    "deepseek-v3": MLAWidths(128, 128, 64, 128, 512, 1536),
    "kimi-k2": MLAWidths(64, 128, 64, 128, 512, 1536),
    "glm-4.7-flash": MLAWidths(20, 192, 64, 256, 512, 768),
}


def find_widths(model: str) -> MLAWidths | HeadWidths:
    """The widths of a preset, of a config.json, or of a folder with one.

    Raises:
        ValueError: no such preset or file, or a config without attention heads.
    """
    if model.lower() in PRESETS:
        return PRESETS[model.lower()]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{model!r} is neither one of {', '.join(PRESETS)} nor a config.json or a folder with one (names of a hub are not "
            "fetched)."
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from None
    return widths_of_config(config)


def widths_of_config(config: Mapping[str, Any]) -> MLAWidths | HeadWidths:
    """The widths that a Hugging Face config names, of its text part if it has several.

    Raises:
        ValueError: a number is missing.
    """
    text = config.get("text_config") or config
    try:
        heads = text["num_attention_heads"]
        if text.get("kv_lora_rank"):
            names = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"
            return MLAWidths(heads, *(text[name] for name in names), text.get("q_lora_rank"))
        width = text.get("head_dim") or text["hidden_size"] // heads
    except KeyError as error:
        raise ValueError(f"the config has no {error.args[0]}: it is not a decoder's, or names it otherwise.") from None
    return HeadWidths(heads, text.get("num_key_value_heads") or heads, width, width)
