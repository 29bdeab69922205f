"""Well-known models, and any model config, in the numbers that the planner needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UlyssesValueError
from ..layout.widths import HeadWidths, MLAWidths


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        count: routed experts of the layer.
        per_token: routed experts that a token is sent to.
        width: intermediate width of a routed expert.
        shared_width: intermediate width of all shared experts together; 0 if there are none.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class Model:
    """A decoder in numbers.

    Attributes:
        widths: of each attention layer.
        hidden: the hidden width.
        layers: the number of layers; `dense_layers` of them have an MLP, the others experts.
        vocabulary: tokens in the vocabulary.
        intermediate: intermediate width of the MLP.
        experts: None if no layer has any.
        is_tied: whether embeddings and head share their weights.
        normalizes_heads: whether queries and keys are normalised head by head.
    """

    widths: MLAWidths | HeadWidths
    hidden: int
    layers: int
    vocabulary: int
    intermediate: int
    dense_layers: int
    experts: Experts | None = None
    is_tied: bool = False
    normalizes_heads: bool = False

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention layer, without norms and biases."""
        w, hidden = self.widths, self.hidden
        if isinstance(w, HeadWidths):
            return hidden * (w.heads * (w.key + w.value) + w.kv_heads * (w.key + w.value))
        queries = hidden * w.heads * w.key
        if w.query_latent:
            queries = w.query_latent * (hidden + w.heads * w.key)
        expansion = w.latent * w.heads * (w.nope + w.value)
        return queries + hidden * (w.latent + w.rope) + expansion + w.heads * w.value * hidden

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer and of their router; 0 if there are none."""
        if self.experts is None:
            return 0
        e = self.experts
        return self.hidden * (3 * e.count * e.width + 3 * e.shared_width + e.count)

    @property
    def head_parameters(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without biases and the norms of heads and latents."""
        of_layers = self.layers * (self.attention_parameters + 2 * self.hidden)
        of_layers += (
            self.dense_layers * self.mlp_parameters + (self.layers - self.dense_layers) * self.expert_parameters
        )
        return of_layers + self.head_parameters * (1 if self.is_tied else 2) + self.hidden


PRESETS: dict[str, Model] = {
    "deepseek-v2-lite": Model(
        MLAWidths(16, 128, 64, 128, 512, None), 2048, 27, 102_400, 10_944, 1, Experts(64, 6, 1408, 2 * 1408)
    ),
    "deepseek-v3": Model(
        MLAWidths(128, 128, 64, 128, 512, 1536), 7168, 61, 129_280, 18_432, 3, Experts(256, 8, 2048, 2048)
    ),
    "kimi-k2": Model(MLAWidths(64, 128, 64, 128, 512, 1536), 7168, 61, 163_840, 18_432, 1, Experts(384, 8, 2048, 2048)),
    "glm-4.7-flash": Model(
        MLAWidths(20, 192, 64, 256, 512, 768), 2048, 47, 154_880, 10_240, 1, Experts(64, 4, 1536, 1536)
    ),
    "llama-3-8b": Model(HeadWidths(32, 8, 128, 128), 4096, 32, 128_256, 14_336, 32),
    "qwen3-8b": Model(HeadWidths(32, 8, 128, 128), 4096, 36, 151_936, 12_288, 36, normalizes_heads=True),
}

#: Model types of transformers that normalise queries and keys head by head, by the beginning of their names.
_NORMALIZE_HEADS = ("qwen3", "gemma3", "olmo3", "hunyuan")


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


def model_of_config(text: Any) -> Model:
    """Reads the numbers of a whole decoder from a config, by the attribute names of transformers.

    Args:
        text: as for `widths_of_config`.

    Raises:
        ValueError: a number is missing or is not a positive whole number.
    """
    layers, experts = _number(text, "num_hidden_layers"), _experts_of(text)
    intermediate = _number_or_none(text, "intermediate_size")
    if intermediate is None:
        raise UlyssesValueError("the config has no intermediate_size: memory is planned for layers with a gated MLP.")
    return Model(
        widths_of_config(text),
        _number(text, "hidden_size"),
        layers,
        _number(text, "vocab_size"),
        intermediate,
        layers if experts is None else _dense_layers(text, layers),
        experts,
        is_tied=bool(getattr(text, "tie_word_embeddings", False)),
        normalizes_heads=str(getattr(text, "model_type", "")).startswith(_NORMALIZE_HEADS),
    )


def _experts_of(text: Any) -> Experts | None:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next(filter(None, (_count(text, name) for name in names)), 0)
    if not count:
        return None
    width = _number_or_none(text, "moe_intermediate_size") or _number(text, "intermediate_size")
    shared = _number_or_none(text, "shared_expert_intermediate_size")
    if shared is None:
        shared = (_count(text, "n_shared_experts") or _count(text, "num_shared_experts")) * width
    return Experts(count, _number(text, "num_experts_per_tok"), width, shared)


def _dense_layers(text: Any, layers: int) -> int:
    kinds = getattr(text, "mlp_layer_types", None)
    if isinstance(kinds, list):
        return kinds.count("dense")
    return min(layers, _count(text, "first_k_dense_replace"))


def _count(text: Any, name: str) -> int:
    """A number that may be 0 or left out."""
    return 0 if getattr(text, name, None) == 0 else _number_or_none(text, name) or 0


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
