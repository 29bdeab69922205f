"""What the classes of all strategies share: how one attention layer of a Hugging Face model attends under a strategy.

Shape letters:
    B batch                             K query and key width
    T tokens of this rank               V value width
    S tokens of the whole sequence      L latent width of keys and values
    H all query heads                   R width of the shared RoPE key
    G KV heads                          M heads of this rank
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from ...attention.gather import GatherKVAttention, GatherKVMLAAttention
from ...attention.mla_base import MLAHeadExchange
from ...attention.ulysses import UlyssesAttention
from ...comm.group import SequenceGroup
from ...layout.widths import MLAWidths
from ...planner.strategies import Strategy
from ..arguments import NotCopied
from ..families import is_mla
from ..head_projections import WithHeads, project

#: The settings of a call that are tensors with one row for each query head: attention sinks.
PER_HEAD = ("s_aux",)

#: A module, the name of an attribute, and the value that replaces it.
Replacement = tuple[nn.Module, str, Any]


class LayerStrategy(NotCopied, ABC):
    """How one attention layer attends under one strategy. An instance belongs to one layer of one patched model.

    Args:
        layer: an attention module that the class supports and `check_layer` has accepted.
        kernel: the layer's local attention, `kernel(q_BTMK, k_BSGK, v_BSGV, **settings) -> out_BTMV`.
        group: the sequence-parallel group.
        head_chunks: the number of chunks of local heads that attend one after the other.

    Attributes:
        rules: the strategy's numbers and rules.
        replaced: the attributes of modules that have to be replaced while the model is parallelized.
    """

    rules: ClassVar[Strategy]
    replaced: Sequence[Replacement] = ()

    @abstractmethod
    def __init__(
        self, layer: nn.Module, kernel: Callable[..., Tensor], group: SequenceGroup, head_chunks: int
    ) -> None: ...

    @classmethod
    @abstractmethod
    def supports(cls, layer: nn.Module) -> bool:
        """Says whether the class is for layers of this kind."""

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        """Refuses a layer that the strategy's rules accept but whose code the class cannot run.

        Raises:
            UnsupportedModelError: the result would be wrong.
        """

    @abstractmethod
    def attend(self, query_BTHK: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        """Attends from this rank's queries to the whole sequence.

        Args:
            query_BTHK, key, value: what the module passes to its attention function. key_BGTK and value_BGTV; with MLA
                the latent_B1TL and the RoPE key_B1TR take their places.
            settings: keyword arguments of the local attention.

        Returns:
            out_BTHV.
        """


class HeadsLayer(LayerStrategy):
    """Multi-head, grouped-query and multi-query attention. A subclass names its attention class."""

    attention_class: ClassVar[type[UlyssesAttention] | type[GatherKVAttention]]

    def __init__(self, layer: nn.Module, kernel: Callable[..., Tensor], group: SequenceGroup, head_chunks: int) -> None:
        self.attention = self.attention_class(kernel, group, head_chunks=head_chunks)

    @classmethod
    def supports(cls, layer: nn.Module) -> bool:
        return not is_mla(layer)

    def attend(self, query_BTHK: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        per_head = {name: settings[name] for name in PER_HEAD if settings.get(name) is not None}
        settings = {name: value for name, value in settings.items() if name not in PER_HEAD}
        tensors = query_BTHK, key.transpose(1, 2), value.transpose(1, 2)
        return self.attention(*tensors, per_head=per_head, **settings)


class MLALayer(LayerStrategy):
    """Multi-head latent attention, whose module hands over KV latents and the shared RoPE key.

    A subclass names its attention class.

    Attributes:
        layer: the attention module.
        widths: its widths.
    """

    attention_class: ClassVar[type[MLAHeadExchange] | type[GatherKVMLAAttention]]

    def __init__(self, layer: nn.Module, kernel: Callable[..., Tensor], group: SequenceGroup, head_chunks: int) -> None:
        self.layer: Any = layer
        self.widths = MLAWidths.of(layer)
        projections = [getattr(layer, name) for name in self.rules.sliced_projections(head_chunks)]
        self.replaced: Sequence[Replacement] = [(p, "forward", WithHeads(p, self.widths.heads)) for p in projections]
        self.attention = self.attention_class(
            kernel,
            group,
            nope_dim=self.widths.nope,
            rope_dim=self.widths.rope,
            value_dim=self.widths.value,
            head_chunks=head_chunks,
        )

    @classmethod
    def supports(cls, layer: nn.Module) -> bool:
        return is_mla(layer)

    def expand(self, latent_BSL: Tensor, heads: slice) -> Tensor:
        """Computes the packed keys and values kv_BSMP of some heads, from rows of the projection's weight."""
        return project(self.layer, "kv_b_proj", latent_BSL, heads).unflatten(-1, (heads.stop - heads.start, -1))

    def expand_all(self, latent_BSL: Tensor) -> Tensor:
        """Computes the packed keys and values kv_BSHP of all heads. It calls the projection as the module does."""
        projected: Tensor = self.layer.kv_b_proj(latent_BSL)
        return projected.unflatten(-1, (self.widths.heads, -1))
