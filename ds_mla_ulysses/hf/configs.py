"""The numbers of a model that is not loaded, from its config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from ..errors import UlyssesValueError
from ..layout.widths import HeadWidths, MLAWidths
from ..planner.models import PRESETS, Model, model_of_config, widths_of_config

Result = TypeVar("Result")

#: Config classes make lists with an entry for each layer.
_MOST_LAYERS = 10_000
#: How deeply the values of a config may be nested. Code that reads configs calls itself for each level.
_DEEPEST = 50


def find_widths(model: str) -> MLAWidths | HeadWidths:
    """Returns the widths of a preset, of a config.json, or of a folder that holds a config.json.

    Values that a config leaves out are the defaults of transformers for its model_type. Files on the Hub name only the
    values that differ.

    Raises:
        ValueError: there is no such preset or file, or the file is not the config of a decoder.
    """
    preset = PRESETS.get(model.lower())
    return preset.widths if preset is not None else _of_config(model, widths_of_config)


def find_model(model: str) -> Model:
    """Returns the numbers of a whole model, as `find_widths` returns its widths.

    Raises:
        ValueError: there is no such preset or file, or the file is not the config of a decoder with gated MLPs.
    """
    preset = PRESETS.get(model.lower())
    return preset if preset is not None else _of_config(model, model_of_config)


def _of_config(model: str, numbers_of: Callable[[Any], Result]) -> Result:
    """What `numbers_of` reads from the config of a decoder, in a file or a folder."""
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise UlyssesValueError(
            f"{model!r} is neither one of {', '.join(PRESETS)} nor a config.json or a folder with one (names on the "
            "Hub are not fetched)."
        )
    return numbers_of(_text_config(read_config(path)))


def read_config(path: Path) -> Any:
    """Returns the values of a JSON file.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or says impossible numbers of layers.
    """
    try:
        config = json.loads(path.read_text())
    except RecursionError:
        raise _too_deep(str(path)) from None
    except ValueError as error:
        raise UlyssesValueError(f"{path} is not JSON: {error}.") from None
    refuse_endless(config, str(path))
    return config


def refuse_endless(config: Any, name: str, depth: int = 0) -> None:
    """Raises ValueError for a config with which transformers would fill the memory, or would call itself too often.

    Args:
        config: the values, as JSON has them.
        name: what the error calls the config.
        depth: how deeply the values are nested in the config.
    """
    if depth > _DEEPEST:
        raise _too_deep(name)
    values = (
        config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, (list, tuple)) else ()
    )
    for key, value in values:
        is_count = isinstance(key, str) and key.endswith(("layer", "layers")) and isinstance(value, (int, float))
        if is_count and value > _MOST_LAYERS:
            raise UlyssesValueError(
                f"the config says {key} {value!r}, which is more than the {_MOST_LAYERS} that are read."
            )
        refuse_endless(value, name, depth + 1)


def _too_deep(name: str) -> UlyssesValueError:
    return UlyssesValueError(f"{name} is nested too deeply for the config of a model.")


def _text_config(config: Any) -> Any:
    """Returns an object with the attributes of a decoder's config.

    Raises:
        ValueError: the JSON is not an object, or transformers cannot read it.
    """
    from transformers import CONFIG_MAPPING

    if not isinstance(config, dict):
        raise UlyssesValueError(f"a config must be an object of names and values, got {config!r:.60}.")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        try:
            return CONFIG_MAPPING[kind].from_dict(config).get_text_config(decoder=True)
        except Exception as error:  # a config class may raise anything
            raise UlyssesValueError(f"transformers cannot read this config of {kind}: {error}") from None
    return _text_config(config["text_config"]) if "text_config" in config else SimpleNamespace(**config)
