"""What travels between ranks, for one attention layer of a Hugging Face model.

| strategy     | of MLA                                                          | of other heads             |
|--------------|-----------------------------------------------------------------|----------------------------|
| "packed"     | q and compact kv by heads, the shared key gathered              | q, k, v by heads           |
| "latent_kv"  | q by heads, kv latent and shared key gathered, own heads expanded | refused                  |
| "latent_qkv" | query latent, kv latent and shared key gathered, own heads expanded | refused                |
| "gather_kv"  | kv latent and shared key gathered, all heads expanded, q stays  | k and v gathered, q stays  |

Letters: B batch · T this rank's tokens · S all tokens · H heads · M own heads · G key-value heads · L latent · R rope
key · K, V head widths · P = N+V.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..attention.chunks import HeadChunks, check_count
from ..attention.expansion import Expand
from ..attention.gather import GatherKVAttention, GatherKVMLAAttention
from ..attention.latent_kv import LatentKVMLAAttention
from ..attention.mla import UlyssesMLAAttention
from ..attention.ulysses import UlyssesAttention
from ..comm.group import SequenceGroup
from ..layout.heads import HeadPartition
from ..layout.widths import HeadWidths, MLAWidths
from ..planner.auto import Auto, decide
from ..planner.models import widths_of_config
from ..planner.strategies import STRATEGIES
from ..planner.work import Work
from .families import UnsupportedModelError, is_mla, names_of
from .head_projections import WithHeads, project
from .latent_forward import check_forward, on_latents
from .local_attention import LayerKernel
from .moba import MoBAKernel

#: Those that take the rows of projections that belong to the own heads.
_OF_ROWS = {"latent_kv": ("kv_b_proj",), "latent_qkv": ("q_b_proj", "kv_b_proj")}
#: Submodules whose part "latent_qkv" knows.
_KNOWN = {"q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_KNOWN |= {"q_proj"}  # None where there is a query latent


@dataclass(frozen=True)
class LayerStrategy:
    """How one layer attends over ranks.

    Attributes:
        attend: `attend(query_BTHK, key, value, settings) -> out_BTHV`, of what the module hands to its attention
            function: key_BGTK and value_BGTV, with MLA latent_B1TL and key_B1TR; with "latent_qkv" of all tokens and
            the own heads. `settings` are the local attention's.
        replaced: (module, attribute, value) of each that has to be replaced for it.
    """

    attend: Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
    replaced: Sequence[tuple[nn.Module, str, Any]] = ()


def check_strategy(strategy: str | Auto, split: str, head_chunks: int) -> Auto | None:
    """Refuses what no model has: an unknown strategy, a split that it does not have, no number of parts.

    Returns:
        what "auto" is decided by, if it is that.

    Raises:
        ValueError: any of them.
    """
    check_count(head_chunks)
    SequenceGroup.of(None).with_split(split)
    if isinstance(strategy, Auto) or strategy == "auto":
        return Auto() if strategy == "auto" else strategy
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {['auto', *STRATEGIES]}, got {strategy!r}.")
    if split != "contiguous" and strategy != "gather_kv":
        raise ValueError(
            f"split={split!r} is for strategy='gather_kv', whose queries stay where they are: with {strategy!r} every rank "
            "has the same work already. Choose split='contiguous'."
        )
    return None


def decide_strategy(
    auto: Auto, model: nn.Module, kernels: Sequence[LayerKernel], group: SequenceGroup, head_chunks: int
) -> tuple[str, str]:
    """The strategy of a model's layers and why, the same on all ranks; every rank of the job has to call it.

    Args:
        kernels: the local attention of each layer.
    """
    layers = [kernel.module for kernel in kernels]
    refused: dict[str, str] = {}
    for strategy in STRATEGIES:
        try:
            for layer in layers:
                check_layer(layer, strategy, group.size, head_chunks)
        except ValueError as error:
            refused[strategy] = str(error)
    any_parameter = next(x for x in model.parameters() if x.is_floating_point())  # quantised ones are not
    blocks = [kernel.blocks for kernel in kernels if isinstance(kernel, MoBAKernel) and not kernel.is_full]
    # Layers with full attention among them, which have the most to do, decide for all.
    keys = max(block * topk for block, topk in blocks) if len(blocks) == len(kernels) else None
    work = Work(_widths_of(layers[0]), group.size, 0, split=group.split, keys_per_query=keys)
    return decide(auto, work, refused, group, any_parameter.dtype, any_parameter.device)


def _widths_of(layer: nn.Module) -> MLAWidths | HeadWidths:
    return MLAWidths.of(layer) if is_mla(layer) else widths_of_config(layer.config)


def check_layer(layer: nn.Module, strategy: str, ranks: int, head_chunks: int = 1) -> None:
    """Refuses a layer for which the strategy, or so many parts of its heads, would be wrong.

    Raises:
        UnsupportedModelError: no latents, or projections whose rows cannot be taken by themselves.
        ValueError: fewer heads than ranks, where heads are what is exchanged; fewer heads than parts.
    """
    kind, exchanges = type(layer).__name__, strategy != "gather_kv"
    if head_chunks > 1:
        if not is_mla(layer):
            raise UnsupportedModelError(
                f"head_chunks={head_chunks} is for MLA, whose keys and values are made of latents part by part; {kind} has "
                "them whole: leave head_chunks out."
            )
        HeadChunks(MLAWidths.of(layer).heads, ranks if exchanges else 1, head_chunks)
    if strategy in _OF_ROWS:
        if not is_mla(layer):
            raise UnsupportedModelError(
                f"strategy={strategy!r} is for MLA, {kind} has no latents: choose 'packed' or 'gather_kv'."
            )
        if strategy == "latent_qkv" and MLAWidths.of(layer).query_latent is None:
            raise UnsupportedModelError(
                f"strategy='latent_qkv' gathers query latents, {kind} has none (q_lora_rank is None): choose 'latent_kv'."
            )
        unknown = sorted(set(layer._modules) & names_of(layer) - _KNOWN)
        if strategy == "latent_qkv" and unknown:
            raise UnsupportedModelError(
                f"strategy='latent_qkv' would run {kind} on all tokens, whose {', '.join(unknown)} it does not know: "
                "choose 'latent_kv'."
            )
        if strategy == "latent_qkv":
            check_forward(layer)
    for name in _rows_taken(strategy, head_chunks):
        projection = getattr(layer, name)
        if type(projection) is not nn.Linear:
            whole = "choose 'packed' or 'gather_kv', which call it whole" if exchanges else "leave head_chunks out"
            raise UnsupportedModelError(
                f"strategy={strategy!r} takes rows of {name}'s weight, but {kind}.{name} is a "
                f"{type(projection).__name__} (an adapter or a quantised layer), of which rows would be wrong: {whole}."
            )
    if not exchanges:
        return
    heads = MLAWidths.of(layer).heads if is_mla(layer) else getattr(layer.config, "num_attention_heads", None)
    if heads is not None:
        HeadPartition(heads, ranks)


def _rows_taken(strategy: str, head_chunks: int) -> tuple[str, ...]:
    """Projections of which rows are taken."""
    return ("kv_b_proj",) if strategy == "gather_kv" and head_chunks > 1 else _OF_ROWS.get(strategy, ())


def strategy_of(
    layer: nn.Module, kernel: LayerKernel, group: SequenceGroup, strategy: str, head_chunks: int = 1
) -> LayerStrategy:
    """The strategy of one layer, which `check_layer` has found to be right."""
    if not is_mla(layer):
        return _of_heads(kernel, group, strategy)
    widths = MLAWidths.of(layer)
    dims = {"nope_dim": widths.nope, "rope_dim": widths.rope, "value_dim": widths.value, "head_chunks": head_chunks}
    if strategy == "packed":
        return _packed(layer, UlyssesMLAAttention(kernel, group, **dims))
    projections = [getattr(layer, name) for name in _rows_taken(strategy, head_chunks)]
    replaced = [(projection, "forward", WithHeads(projection, widths.heads)) for projection in projections]

    def expand(latent_BSL: Tensor, heads: slice) -> Tensor:
        return _heads(project(layer, "kv_b_proj", latent_BSL, heads), heads.stop - heads.start)

    if strategy == "gather_kv":
        attention = GatherKVMLAAttention(kernel, group, **dims)
        # Whole, as adapters want it, where all heads are wanted.
        whole = partial(_all_heads, layer, widths.heads)
        return _of_latents(attention, expand if replaced else whole, replaced)
    attention = LatentKVMLAAttention(kernel, group, **dims)
    if strategy == "latent_kv":
        return _of_latents(attention, expand, replaced)
    own = attention.query_heads(widths.heads)
    parts = HeadChunks(widths.heads, group.size, head_chunks).of_rank(group.rank)

    def attend(q_BSMK: Tensor, latent_B1SL: Tensor, key_B1SR: Tensor, settings: dict[str, Any]) -> Tensor:
        made_of, local = (latent_B1SL.squeeze(1), key_B1SR.squeeze(1)), partial(attention.attend_locally, **settings)
        return attention.latents.attend_in_chunks(q_BSMK, *made_of, True, parts, expand, local)

    return LayerStrategy(attend, [*replaced, (layer, "forward", on_latents(layer, group, own))])


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1))


def _all_heads(layer: nn.Module, heads: int, latent_BSL: Tensor, _: slice) -> Tensor:
    return _heads(layer.kv_b_proj(latent_BSL), heads)


def _packed(layer: nn.Module, attention: UlyssesMLAAttention) -> LayerStrategy:
    def attend(q_BTHK: Tensor, latent_B1TL: Tensor, key_B1TR: Tensor, settings: dict[str, Any]) -> Tensor:
        # First the gather, then the projection under which it travels.
        pending = attention.gather_shared_key(key_B1TR.squeeze(1))
        kv_BTHP = _heads(layer.kv_b_proj(latent_B1TL.squeeze(1)), q_BTHK.shape[2])
        return attention(q_BTHK, kv_BTHP, pending, 0, None, **settings)

    return LayerStrategy(attend)


def _of_latents(
    attention: LatentKVMLAAttention | GatherKVMLAAttention,
    expand: Expand,
    replaced: Sequence[tuple[nn.Module, str, Any]] = (),
) -> LayerStrategy:
    def attend(q_BTHK: Tensor, latent_B1TL: Tensor, key_B1TR: Tensor, settings: dict[str, Any]) -> Tensor:
        return attention(q_BTHK, latent_B1TL.squeeze(1), key_B1TR.squeeze(1), 0, None, expand=expand, **settings)

    return LayerStrategy(attend, replaced)


def _of_heads(kernel: LayerKernel, group: SequenceGroup, strategy: str) -> LayerStrategy:
    attention = (GatherKVAttention if strategy == "gather_kv" else UlyssesAttention)(kernel, group)

    def attend(query_BTHK: Tensor, key_BGTK: Tensor, value_BGTV: Tensor, settings: dict[str, Any]) -> Tensor:
        if settings.get("s_aux") is not None:
            settings = settings | {"s_aux": settings["s_aux"][attention.query_heads(query_BTHK.shape[2])]}
        return attention(query_BTHK, key_BGTK.transpose(1, 2), value_BGTV.transpose(1, 2), 0, None, **settings)

    return LayerStrategy(attend)
