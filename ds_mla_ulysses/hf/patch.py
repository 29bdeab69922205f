"""Everything that `parallelize` replaces on one Hugging Face model, and its undo.

| where                       | what                                                                                   |
|-----------------------------|----------------------------------------------------------------------------------------|
| each attention module       | `config` is a copy that names our attention function; MLA's `expand_kv` returns latents |
| its projections             | with the latent strategies: a forward that computes some heads only                    |
| the attention module        | with "latent_qkv": a forward on the latents of all tokens                              |
| the text model              | forward hooks, which gather the documents; the Handle                                  |
| its rotary embedding        | forward hooks, if its frequencies depend on the longest position                       |
| the modules around it       | forward pre-hooks, which take away what they would make masks or caches of; forward    |
|                             | hooks, which make `aux_loss` of the outputs that of the group; `loss_function`, which  |
|                             | refuses labels that would be shifted within a shard                                    |
| norms, MLPs, routers, experts | `forward`, which runs in tiles, see `tiled_layers.py`                                   |
| the given model's head      | `_call_impl`, which returns logits that are not made yet, see `lazy_logits.py`          |
| its checkpointed layers     | with `recompute`, during a forward: `_gradient_checkpointing_func`, see `recompute.py`  |

One entry with a name of our own is added to transformers' attention functions and stays there; only patched modules
name it. A forward is sequence-parallel if it is given a layout (`layout.shard.LAYOUT`). Its `Documents` are then handed
down to the attention function as a keyword argument, recomputation included.

Letters: B batch · T local tokens · H query heads · G key-value heads · S tokens of the whole sequence · K, V head widths.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import SequenceGroup
from ..errors import UlyssesRuntimeError
from ..layout.documents import Documents, gather_documents
from ..layout.shard import LAYOUT
from .arguments import NotCopied, by_name, requires_gradients
from .aux_loss import AuxLoss
from .families import AttentionModel, is_mla
from .inputs import find_problem, impossible_tokens, is_recomputation, problem_of_impossible_tokens, tokens_of
from .latent_forward import DOCUMENTS
from .lazy_logits import DeferredHead
from .local_attention import LayerKernel, as_autocast
from .moba import MoBAKernel
from .recompute import KeptLayers
from .sharded_weights import FETCHED_WHOLE
from .strategies import LayerStrategy, strategy_of
from .tiled_layers import tiled_forwards
from .wrappers import OUTER, Outer, Wrappers, marks_images, no_mask, problem_of_token_types

#: Our entry in transformers' attention functions. It must not contain "flash", for which transformers looks.
ATTENTION_NAME = "ds_mla_ulysses"


@dataclass(frozen=True)
class _Forward:
    """A forward of a patched text model, while it runs.

    Attributes:
        patch: of the model.
        is_sharded: whether the forward is sequence-parallel.
        longest_position: int64 scalar on the device, for rotary embeddings; None if they are not to use it.
        outer: the forward in which this one runs, of another model or in a hook.
    """

    patch: ModelPatch
    is_sharded: bool
    longest_position: Tensor | None
    outer: _Forward | None


#: The forward that runs in this thread. It ends with the text model's forward, before any backward.
_RUNNING: ContextVar[_Forward | None] = ContextVar("ulysses_forward", default=None)


@dataclass(frozen=True)
class _Layer(NotCopied):
    """What the attention function needs to know of one patched module."""

    patch: ModelPatch
    kernel: LayerKernel
    strategy: LayerStrategy
    expand_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None  # of MLA

    @torch.compiler.disable  # what is kept is not seen by a compiler
    def attend_eagerly(self, *args: Any) -> Tensor:
        return self.strategy.attend(*args)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The attention function of patched modules. query [B,H,T,K]; key, value [B,G,T,.], or the latents of expand_kv."""
    layer: _Layer = vars(module)["_ulysses"]
    documents: Documents | None = kwargs.pop(DOCUMENTS, None)
    if documents is None:  # a forward of the plain model, or a layer called by itself
        if not torch.compiler.is_compiling():
            _refuse_lost_documents(module, layer)
        if layer.expand_kv is not None:
            key, value = layer.expand_kv(key, value)
        return layer.kernel.plain(query, key, value, attention_mask, **kwargs)
    settings = layer.kernel.settings(documents, **kwargs)
    query, key, value = as_autocast(query, key, value)
    attend = layer.attend_eagerly if layer.patch.kept.is_on else layer.strategy.attend
    return attend(query.transpose(1, 2), key, value, settings), None


def _refuse_lost_documents(module: nn.Module, layer: _Layer) -> None:
    running = _RUNNING.get()
    if running is not None and running.patch is layer.patch and running.is_sharded:
        raise UlyssesRuntimeError(
            f"{type(module).__name__} was called without the keyword arguments of the model's forward, so it would attend to "
            "one rank's tokens only: train this model without sequence parallelism."
        )


def _keep_latents(kv_nope_B1TL: Tensor, k_rot_B1TR: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the place of `expand_kv`: the strategy decides what is exchanged and what is expanded."""
    return kv_nope_B1TL, k_rot_B1TR


class ModelPatch(NotCopied):
    """The replacements of the table above: `apply` makes all of them or none, `undo` takes them back.

    Attributes:
        plain_depth: how many `Handle.plain` blocks are open.
        aux_loss: what makes the auxiliary losses of routers.
        head: what defers the model's head; None if it makes its logits whole.
        kept: what makes gradient checkpointing keep attention.
    """

    def __init__(
        self,
        model: nn.Module,
        found: AttentionModel,
        group: SequenceGroup,
        kernels: Sequence[LayerKernel],
        strategy: str,
        head_chunks: int,
        loss_tile: int | str | None = None,
        mlp_tile: int | None = None,
        recompute: str | None = None,
    ) -> None:
        self.model, self.group, self.strategy, self.head_chunks = model, group, strategy, head_chunks
        self.plain_depth = 0
        self.head = DeferredHead.of(model, loss_tile)
        self._tiled = [] if mlp_tile is None else tiled_forwards(found.text_model, mlp_tile)
        self.kept = KeptLayers(found.text_model, found.layers, recompute, head_chunks)
        self._text_model, self._layers, self._kernels = found.text_model, found.layers, kernels
        self._implementation = _config_of(found.text_model)._attn_implementation
        self._moba_kernels = [kernel for kernel in kernels if isinstance(kernel, MoBAKernel)]
        self._text_signature = inspect.signature(found.text_model.forward)
        self._wrappers = Wrappers(model, found.text_model)
        self.aux_loss = AuxLoss(_modules_around(found.text_model, model), found.text_model, group)
        self._undo: list[Callable[[], None]] = []

    @property
    def is_plain(self) -> bool:
        """Whether forwards without a layout may train now."""
        return self.plain_depth > 0

    def apply(self, **attributes: Any) -> None:
        """Makes every replacement, and sets attributes of the text model. If any fails, the model is what it was."""
        try:
            self._apply(attributes)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Takes all replacements back, the last one first."""
        while self._undo:
            self._undo.pop()()

    def _apply(self, attributes: dict[str, Any]) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, _attention)
        for layer, kernel in zip(self._layers, self._kernels, strict=True):
            self._apply_to_layer(layer, kernel)
        add = self._undo.append
        text_model = self._text_model
        add(text_model.register_forward_pre_hook(self._before_text_model, with_kwargs=True).remove)
        add(text_model.register_forward_hook(self._after_text_model, always_call=True).remove)
        for wrapper, hook in self._wrappers.hooks():
            add(wrapper.register_forward_pre_hook(hook, with_kwargs=True, prepend=True).remove)
        for head, loss_function in self._wrappers.loss_functions():
            self._replace(head, "_loss_function", loss_function)
        for module in self.aux_loss.modules:
            add(module.register_forward_hook(self._after_module).remove)
        add(self.model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True).remove)
        add(self.model.register_forward_hook(self._after_model, always_call=True).remove)
        for rotary in text_model.modules():
            if _depends_on_longest(rotary):
                add(rotary.register_forward_pre_hook(_add_longest_position, with_kwargs=True).remove)
                add(rotary.register_forward_hook(_cut_longest_position).remove)
        for module, forward in self._tiled:
            self._replace(module, "forward", forward)
            self._replace(module, FETCHED_WHOLE, True)
        if self.head is not None:
            self._replace(self.head.module, "_call_impl", self.head)
        for name, value in attributes.items():
            self._replace(text_model, name, value)

    def _apply_to_layer(self, layer: nn.Module, kernel: LayerKernel) -> None:
        # A shallow copy: whatever else is changed in the original's tables later is seen by both.
        config = copy.copy(_config_of(layer))
        config._attn_implementation_internal = ATTENTION_NAME
        strategy = strategy_of(layer, kernel, self.group, self.strategy, self.head_chunks)
        expand_kv: Any = layer.expand_kv if is_mla(layer) else None
        self._replace(layer, "_ulysses", _Layer(self, kernel, strategy, expand_kv))
        if expand_kv is not None:
            self._replace(layer, "expand_kv", _keep_latents)
        for module, name, value in strategy.replaced:
            self._replace(module, name, value)
        self._replace(layer, "config", config)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        # Straight into the instance's dict: an assigned module would appear among the submodules.
        attributes = vars(module)
        if name in attributes:
            self._undo.append(partial(attributes.__setitem__, name, attributes[name]))
        else:
            self._undo.append(partial(attributes.__delitem__, name))
        attributes[name] = value

    def _before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.head is not None and not torch.compiler.is_compiling():
            self.head.begin(defers=kwargs.get(LAYOUT) is not None)

    @torch.compiler.disable  # its collectives cannot be traced
    def _before_text_model(
        self, text_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gathers positions and padding once, and hands the documents down with this forward."""
        if _config_of(text_model)._attn_implementation != self._implementation:
            raise UlyssesRuntimeError(
                "the attention implementation of a parallelized model was changed: call handle.restore() first, then "
                "set_attn_implementation, then parallelize."
            )
        layout, is_awaited = kwargs.pop(LAYOUT, None), self._wrappers.is_awaited()
        self._wrappers.end()
        if layout is None and is_awaited:
            raise UlyssesRuntimeError(
                f"{type(self.model).__name__} was given a layout, but does not hand its keyword arguments on to "
                f"{type(text_model).__name__}, which would attend to one rank's tokens only: train it without sequence "
                "parallelism."
            )
        if layout is None:
            self.aux_loss.end()
            self._refuse_training(args, kwargs)
            _RUNNING.set(_Forward(self, False, None, _RUNNING.get()))
            return args, kwargs
        given = by_name(self._text_signature, args, kwargs)
        outer = given.pop(OUTER, None) or Outer(None, given, {})
        documents, positions_BT = self._gather_documents(text_model, given, outer, layout)
        longest = documents.longest_position if self.group.size > 1 else None
        _RUNNING.set(_Forward(self, True, longest, _RUNNING.get()))
        self.aux_loss.begin(layout, outer.attention_mask)
        given |= {
            "position_ids": positions_BT.contiguous(),  # some models take views of them
            "attention_mask": no_mask(positions_BT.device),
            "use_cache": False,
            DOCUMENTS: documents,
        }
        self.kept.begin()
        return (), given

    def _gather_documents(
        self, text_model: nn.Module, given: dict[str, Any], outer: Outer, layout: Any
    ) -> tuple[Documents, Tensor]:
        """The documents of the whole sequences and the local positions; raises on all ranks if one has a problem."""
        problem = outer.problem or find_problem(text_model, given, layout, self.group) or self.kept.problem()
        tokens = tokens_of(given)  # None only if there is a problem
        ids = outer.input_ids if problem is None else None

        def describe() -> str | None:
            of_ids = None if ids is None else problem_of_impossible_tokens(text_model, ids)
            return of_ids or problem_of_token_types(outer)

        trains = tokens is not None and torch.is_grad_enabled() and tokens.requires_grad
        return gather_documents(
            outer.position_ids,
            outer.attention_mask,
            (0, 0) if tokens is None else (tokens.shape[0], tokens.shape[1]),
            torch.device("cpu") if tokens is None else tokens.device,
            self.group,
            problem,
            {
                "inputs require gradients": trains,
                "gradients were enabled": torch.is_grad_enabled(),
                "activation checkpointing was enabled": _is_checkpointing(text_model),
                "autocast was enabled": _autocast_dtype(tokens),
                "set_moba was called": tuple(kernel.is_full for kernel in self._moba_kernels),
            },
            _impossible(text_model, ids, outer),
            describe,
            getattr(layout, "tokens", None),
        )

    def _after_text_model(self, text_model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.kept.end()
        running = _RUNNING.get()
        if running is not None and running.patch is self:  # not if the pre-hook has raised
            _RUNNING.set(running.outer)
        router_logits = getattr(out, "router_logits", None)
        if router_logits is not None:
            self.aux_loss.keep_sums(router_logits)

    def _after_module(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.aux_loss.replace(module, out)

    def _after_model(self, model: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.aux_loss.end()
        self._wrappers.end()
        if self.head is not None and not torch.compiler.is_compiling():
            self.head.end()

    def _refuse_training(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises RuntimeError if a forward without a layout would train on this rank's tokens alone.

        It raises on this rank only: without a layout, a rank cannot know whether others are in a collective.
        """
        if self.group.size == 1 or not torch.is_grad_enabled() or self.is_plain or is_recomputation():
            return
        if requires_gradients((args, kwargs)) or any(p.requires_grad for p in self.model.parameters()):
            raise UlyssesRuntimeError(
                "a forward that records gradients was given no layout, so it would train on this rank's tokens alone. Pass the "
                "shard, model(**handle.shard(batch).inputs), or in a Trainer or Accelerate loop the loader's whole batch, "
                f"model(**batch) with {LAYOUT!r} in it. To evaluate or generate, use torch.no_grad(). To train on whole "
                "sequences, use `with ds_mla_ulysses.handle_of(model).plain():`."
            )


def _longest_position() -> Tensor | None:
    running = _RUNNING.get()
    return None if running is None else running.longest_position


# Dynamic and long rope choose their frequencies by the longest position in the batch, which a rank may not have. It is
# appended as one more token, whose embedding is cut off again.
@torch.compiler.disable
def _add_longest_position(
    rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    longest = _longest_position()
    if longest is None:
        return None
    arguments = by_name(inspect.signature(rotary.forward), args, kwargs)
    positions = arguments["position_ids"]
    arguments["position_ids"] = torch.cat([positions, longest.expand(*positions.shape[:-1], 1)], dim=-1)
    return (), arguments


@torch.compiler.disable
def _cut_longest_position(rotary: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
    if _longest_position() is None:
        return None
    return tuple(x[:, :-1] for x in out) if isinstance(out, tuple) else out[:, :-1]


def _impossible(text_model: nn.Module, ids: Tensor | None, outer: Outer) -> Tensor | None:
    """bool, broadcasts to [B, T]: True where the ids or types of local tokens are not supported."""
    ids_are, types_are = None if ids is None else impossible_tokens(text_model, ids), marks_images(outer)
    if ids_are is None or types_are is None:
        return types_are if ids_are is None else ids_are
    return ids_are | types_are


def _is_checkpointing(text_model: nn.Module) -> bool:
    # Before transformers 5.20 it had the second name, which later ones warn of.
    name = "is_activation_checkpointing"
    return bool(getattr(text_model, name if hasattr(text_model, name) else "is_gradient_checkpointing", False))


def _autocast_dtype(tokens: Tensor | None) -> torch.dtype | None:
    device = "cpu" if tokens is None else tokens.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _modules_around(inner: nn.Module, outer: nn.Module) -> list[nn.Module]:
    """The modules that contain `inner`, from `outer` on."""
    path = next(name for name, module in outer.named_modules() if module is inner)
    parents = path.split(".") if path else []
    return [outer.get_submodule(".".join(parents[:depth])) for depth in range(len(parents))]


def _config_of(module: nn.Module) -> Any:
    return module.config


def _depends_on_longest(module: nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")
