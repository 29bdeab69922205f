"""Widths of a model that is not loaded, from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..layout.widths import HeadWidths, MLAWidths
from ..planner.models import PRESETS, widths_of_config


def find_widths(model: str) -> MLAWidths | HeadWidths:
    """The widths of a preset, of a config.json, or of a folder with one.

    What a config leaves out is what transformers takes for its model_type: files on the hub name only what differs.

    Raises:
        ValueError: no such preset or file, or not the config of a decoder.
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
    return widths_of_config(_text_config(config))


def _text_config(config: Any) -> Any:
    """With the attributes of a decoder's config."""
    from transformers import CONFIG_MAPPING

    if not isinstance(config, dict):
        raise ValueError(f"a config is an object of names and values, got {config!r:.60}.")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        try:
            return CONFIG_MAPPING[kind].from_dict(config).get_text_config(decoder=True)
        except Exception as error:  # whatever the class of that config raises
            raise ValueError(f"transformers cannot read this config of {kind}: {error}") from None
    return _text_config(config["text_config"]) if "text_config" in config else SimpleNamespace(**config)
