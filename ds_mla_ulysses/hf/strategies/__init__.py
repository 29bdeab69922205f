"""How a Hugging Face layer attends under each strategy, one file each; `planner.strategies` has their numbers and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ...attention.chunks import check_count
from ...comm.group import SequenceGroup
from ...errors import UlyssesValueError
from ...layout.heads import HeadChunks
from ...layout.widths import HeadWidths, MLAWidths
from ...planner.auto import Auto, decide
from ...planner.models import widths_of_config
from ...planner.strategies import STRATEGIES, names_that_call_projections_whole, names_with_split, one_of
from ...planner.work import Work
from ..families import UnsupportedModelError, is_mla
from ..local_attention import LayerKernel
from ..moba import MoBAKernel
from .base import LayerStrategy
from .gather_kv import GatherKVHeadsLayer, GatherKVMLALayer
from .latent_kv import LatentKVLayer
from .latent_qkv import LatentQKVLayer
from .packed import PackedHeadsLayer, PackedMLALayer

#: The class of each strategy and kind of layer.
LAYER_STRATEGIES: tuple[type[LayerStrategy], ...] = (
    PackedMLALayer,
    PackedHeadsLayer,
    LatentKVLayer,
    LatentQKVLayer,
    GatherKVMLALayer,
    GatherKVHeadsLayer,
)

__all__ = ["LAYER_STRATEGIES", "LayerStrategy", "check_layer", "check_strategy", "decide_strategy", "strategy_of"]


def check_strategy(strategy: str | Auto, split: str, head_chunks: int) -> Auto | None:
    """Refuses settings that are wrong for every model.

    Returns:
        what "auto" bases its choice on; None if a strategy was named.

    Raises:
        ValueError: an unknown strategy, a split that it does not support, head_chunks that is not an int >= 1.
    """
    check_count(head_chunks)
    SequenceGroup.of(None).with_split(split)
    if isinstance(strategy, Auto) or strategy == "auto":
        return strategy if isinstance(strategy, Auto) else Auto()
    if strategy not in STRATEGIES:
        raise UlyssesValueError(f"strategy must be one of {['auto', *STRATEGIES]}, got {strategy!r}.")
    if split not in STRATEGIES[strategy].splits:
        raise UlyssesValueError(
            f"split={split!r} is for strategy={one_of(names_with_split(split))}, whose queries stay on their rank: with "
            f"{strategy!r} every rank has the same work already. Choose split='contiguous'."
        )
    return None


def decide_strategy(
    auto: Auto, model: nn.Module, kernels: Sequence[LayerKernel], group: SequenceGroup, head_chunks: int
) -> tuple[str, str]:
    """Chooses the strategy of a model's layers. Every rank of the job has to call it.

    Args:
        kernels: the local attention of each layer.

    Returns:
        the strategy and the reason, the same on all ranks.

    Raises:
        ValueError: no strategy is possible.
    """
    layers = [kernel.module for kernel in kernels]
    refused: dict[str, str] = {}
    for strategy in STRATEGIES:
        try:
            for layer in layers:
                check_layer(layer, strategy, group.size, head_chunks)
        except ValueError as error:
            refused[strategy] = str(error)
    parameter = next(x for x in model.parameters() if x.is_floating_point())  # quantised ones are not
    moba = [kernel for kernel in kernels if isinstance(kernel, MoBAKernel) and not kernel.is_full]
    blocks = [kernel.blocks for kernel in moba if kernel.blocks is not None]
    # If some layers have full attention, those layers take the longest and determine the choice.
    keys = max(block * topk for block, topk in blocks) if len(blocks) == len(kernels) else None
    first = layers[0]
    widths: MLAWidths | HeadWidths = MLAWidths.of(first) if is_mla(first) else widths_of_config(first.config)
    work = Work(widths, group.size, 0, split=group.split, keys_per_query=keys, head_chunks=head_chunks)
    return decide(auto, work, refused, group, parameter.dtype, parameter.device)


def check_layer(layer: nn.Module, strategy: str, ranks: int, head_chunks: int = 1) -> None:
    """Refuses a layer for which the strategy or the number of head chunks would be wrong.

    Raises:
        UnsupportedModelError: the layer has no latents, or has projections that cannot be computed for some heads only.
        ValueError: fewer heads than ranks if the strategy exchanges heads; a rank with fewer heads than head chunks.
    """
    kind, rules = type(layer).__name__, STRATEGIES[strategy]
    mla = MLAWidths.of(layer) if is_mla(layer) else None
    refusal = rules.refusal(mla)
    if refusal is not None:
        raise UnsupportedModelError(refusal.sentence.format(layer=kind))
    _class_of(layer, strategy).check(layer)
    for name in rules.sliced_projections(head_chunks) if mla is not None else ():
        projection = getattr(layer, name)
        if type(projection) is not nn.Linear:
            whole = f"choose {one_of(names_that_call_projections_whole())}, which call it whole"
            raise UnsupportedModelError(
                f"strategy={strategy!r} takes rows of {name}'s weight, but {kind}.{name} is a "
                f"{type(projection).__name__} (an adapter or a quantised layer), of which rows would be wrong: "
                f"{whole if rules.sliced_projections(1) else 'leave head_chunks out'}."
            )
    heads = mla.heads if mla is not None else getattr(layer.config, "num_attention_heads", None)
    if heads is not None and (rules.exchanges_heads or head_chunks > 1):
        HeadChunks(heads, ranks if rules.exchanges_heads else 1, head_chunks)


def strategy_of(
    layer: nn.Module, kernel: Callable[..., Tensor], group: SequenceGroup, strategy: str, head_chunks: int = 1
) -> LayerStrategy:
    """Returns how a layer attends under a strategy, both of which `check_layer` has accepted."""
    return _class_of(layer, strategy)(layer, kernel, group, head_chunks)


def _class_of(layer: nn.Module, strategy: str) -> type[LayerStrategy]:
    return next(found for found in LAYER_STRATEGIES if found.rules.name == strategy and found.supports(layer))
