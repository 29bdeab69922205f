"""What a model says of its MoBA layers."""

from __future__ import annotations

from dataclasses import dataclass

#: The implementations, by name. "auto" stands for one of them: see `choose_implementation`.
IMPLEMENTATIONS = ("reference", "torch", "flash", "triton")


@dataclass(frozen=True)
class MoBAConfig:
    """Which layers run MoBA, and how.

    Args:
        moba_chunk_size: tokens per block; or one number for each layer of the model.
        moba_topk: blocks per query and head, its own one counted, 1 being attention within blocks; or one number
            for each layer.
        full_attention_layers: indices of layers with full attention; negative ones count from the last.
        dense: the attention implementation of those layers, by its name in transformers.
        implementation: "auto", or one of `IMPLEMENTATIONS`.

    Source: Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs (arXiv 2502.13189).

    Raises:
        ValueError: a value that means nothing.
    """

    moba_chunk_size: int | tuple[int, ...] = 4096
    moba_topk: int | tuple[int, ...] = 12
    full_attention_layers: tuple[int, ...] = ()
    dense: str = "sdpa"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        for name in ("moba_chunk_size", "moba_topk"):
            value = getattr(self, name)
            by_layer = isinstance(value, (tuple, list)) and len(value) > 0
            for number in value if by_layer else [value]:
                _check_number(name, number)
            if by_layer:
                object.__setattr__(self, name, tuple(value))
        layers = self.full_attention_layers
        if not isinstance(layers, (tuple, list)) or not all(_is_int(i) for i in layers):
            raise ValueError(f"full_attention_layers must be a tuple of layer indices, got {layers!r}.")
        object.__setattr__(self, "full_attention_layers", tuple(layers))
        if not isinstance(self.dense, str) or not self.dense:
            raise ValueError(
                f"dense must be the name of an attention implementation, such as 'sdpa', got {self.dense!r}."
            )
        check_implementation(self.implementation)

    def blocks_of(self, layer: int, layers: int) -> tuple[int, int] | None:
        """Block size and top-k of layer `layer` in a model of `layers` layers; None where it has full attention.

        Raises:
            ValueError: the layer, or one of `full_attention_layers`, is not in the model; numbers for another
                number of layers.
        """
        for index in (layer, *self.full_attention_layers):
            if not -layers <= index < layers:
                raise ValueError(f"layer {index} is not in a model of {layers} layers: see full_attention_layers.")
        for name in ("moba_chunk_size", "moba_topk"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != layers:
                raise ValueError(f"{name} has {len(value)} numbers, but the model has {layers} layers.")
        if layer % layers in {index % layers for index in self.full_attention_layers}:
            return None
        size, topk = self.moba_chunk_size, self.moba_topk
        return (
            size if isinstance(size, int) else size[layer],
            topk if isinstance(topk, int) else topk[layer],
        )


def check_blocks(moba_chunk_size: int, moba_topk: int) -> None:
    """Refuses anything but two integers from 1 on."""
    _check_number("moba_chunk_size", moba_chunk_size)
    _check_number("moba_topk", moba_topk)


def _check_number(name: str, value: object) -> None:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{name} must be an integer from 1 on, got {value!r}.")


def check_implementation(name: str) -> None:
    """Refuses a name that stands for nothing."""
    if name not in ("auto", *IMPLEMENTATIONS):
        valid = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"unknown MoBA implementation {name!r}: choose 'auto' or one of {valid}.")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
