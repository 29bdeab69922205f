"""The arguments of a module's call by name, and a base for objects that must not be copied with a patched model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import UlyssesRuntimeError

#: Arguments of attention functions that change the result and that no strategy exchanges between ranks.
SCORE_ARGUMENTS = ("position_bias", "head_mask", "indices", "block_indices")

#: Arguments with images, videos or sounds, or with what was made of them.
MEDIA = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_values_images",
    "pixel_values_local",
    "high_res_pixel_values",
    "image_patches",
    "flattened_patches",
    "input_features",
    "input_values",
    "audio_input_ids",
    "image_hidden_states",
    "image_embeds",
    "image_encoder_embeddings",
    "perceiver_embeddings",
    "cross_attention_states",
    "mm_encoder_outputs",
)


class NotCopied:
    """An object that belongs to one patched model. A copy would share its process group, its hooks or its weights.

    Raises:
        RuntimeError: the object is copied or pickled.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UlyssesRuntimeError("a parallelized model cannot be copied or pickled: call handle.restore() first.")


def by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments of a call by name, whether they were passed by position or by keyword."""
    bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def requires_gradients(value: Any) -> bool:
    """Says whether an argument is or holds a tensor that requires a gradient, in containers or in a cache of keys."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Mapping):
        return any(map(requires_gradients, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(requires_gradients, value))
    layers = getattr(value, "layers", ())  # of a transformers Cache
    return any(requires_gradients((getattr(x, "keys", None), getattr(x, "values", None))) for x in layers)


def is_given(value: Any) -> bool:
    """Says whether an argument was given and is not switched off (None, False or 0)."""
    return isinstance(value, Tensor) or (value is not None and value is not False and value != 0)
