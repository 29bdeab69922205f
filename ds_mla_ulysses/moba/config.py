"""The MoBA settings of a model: which layers run MoBA, and with which blocks."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UlyssesTypeError, UlyssesValueError

#: The names of all implementations. "auto" stands for one of them: see `choose_implementation`.
IMPLEMENTATIONS = ("reference", "torch", "flash", "triton")


@dataclass(frozen=True)
class MoBAConfig:
    """Selects the layers that run MoBA, and sets their blocks and their implementation.

    Args:
        block_size: tokens per block. A tuple gives one number for each layer of the model.
        top_k: blocks that each query and head attends to, including the current block. With 1, attention stays
            within the current block. A tuple gives one number for each layer.
        full_attention_layers: indices of the layers with full attention. Negative indices count from the last layer.
        dense: the attention implementation of those layers, by its name in transformers.
        implementation: "auto" or one of `IMPLEMENTATIONS`.

    Source: Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs (arXiv 2502.13189).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is below 1, a tuple is empty, or a name is empty or unknown.
    """

    block_size: int | tuple[int, ...] = 4096
    top_k: int | tuple[int, ...] = 12
    full_attention_layers: tuple[int, ...] = ()
    dense: str = "sdpa"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_size", "top_k"):
            value = getattr(self, name)
            if isinstance(value, (tuple, list)):
                if not value:
                    raise UlyssesValueError(
                        f"{name} must have one integer >= 1 for each layer, got an empty {value!r}."
                    )
                object.__setattr__(self, name, tuple(value))
                for number in value:
                    check_count(name, number)
            else:
                check_count(name, value)
        layers = self.full_attention_layers
        if not isinstance(layers, (tuple, list)) or not all(_is_int(i) for i in layers):
            raise UlyssesTypeError(f"full_attention_layers must be a tuple of layer indices, got {layers!r}.")
        object.__setattr__(self, "full_attention_layers", tuple(layers))
        if not isinstance(self.dense, str):
            raise UlyssesTypeError(f"dense must be the name of an attention implementation, got {self.dense!r}.")
        if not self.dense:
            raise UlyssesValueError("dense must be the name of an attention implementation, such as 'sdpa', got ''.")
        check_implementation(self.implementation)

    def blocks_of(self, layer: int, layers: int) -> tuple[int, int] | None:
        """Returns (block_size, top_k) of one layer, or None if the layer has full attention.

        Args:
            layer: the index of the layer.
            layers: the number of layers in the model.

        Raises:
            ValueError: the layer, or one of `full_attention_layers`, is not in the model, or a tuple has more or
                fewer numbers than the model has layers.
        """
        for index in (layer, *self.full_attention_layers):
            if not -layers <= index < layers:
                raise UlyssesValueError(
                    f"layer {index} is not in a model of {layers} layers: see full_attention_layers."
                )
        for name in ("block_size", "top_k"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != layers:
                raise UlyssesValueError(f"{name} has {len(value)} numbers, but the model has {layers} layers.")
        if layer % layers in {index % layers for index in self.full_attention_layers}:
            return None
        return _of_layer(self.block_size, layer), _of_layer(self.top_k, layer)


def check_count(name: str, value: object) -> None:
    """Raises TypeError unless the argument is an int, and ValueError unless it is at least 1."""
    if not _is_int(value):
        raise UlyssesTypeError(f"{name} must be an integer >= 1, got {value!r}.")
    if value < 1:  # type: ignore[operator]
        raise UlyssesValueError(f"{name} must be an integer >= 1, got {value!r}.")


def check_implementation(name: str) -> None:
    """Raises TypeError unless the name is a string, and ValueError unless it is "auto" or in `IMPLEMENTATIONS`."""
    if name not in ("auto", *IMPLEMENTATIONS):
        valid = ", ".join(map(repr, IMPLEMENTATIONS))
        error = UlyssesValueError if isinstance(name, str) else UlyssesTypeError
        raise error(f"unknown MoBA implementation {name!r}: choose 'auto' or one of {valid}.")


def _of_layer(value: int | tuple[int, ...], layer: int) -> int:
    return value if isinstance(value, int) else value[layer]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
