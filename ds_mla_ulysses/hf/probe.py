"""Observes what a model's layers hand to their attention function, in one forward without weights.

The text model is built again from its config on the meta device. There, transformers' attention functions and mask
functions are recording ones, and the forward gets the same keyword argument that carries the documents of a
sequence-parallel forward. The given model is only looked at, so its weights may be partitioned, quantised or adapted.

Letters: B batch · H query heads · T tokens · V value width.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UlyssesRuntimeError

_logger = logging.getLogger("ds_mla_ulysses")

#: The name of the recording functions, which transformers knows while a probe runs. It must not contain "flash".
_NAME = "ds_mla_ulysses_probe"
_TOKENS = 16
_Result = TypeVar("_Result")
_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Mask:
    """A mask that the text model made by transformers' mask functions.

    Attributes:
        window: the number of tokens that a token sees, itself included; None if it sees all previous ones.
        is_known: whether the mask is causal with that window and nothing else.
    """

    window: int | None
    is_known: bool


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function.

    Attributes:
        layer: the name of the attention module within the text model.
        has_documents: whether the keyword argument of the text model's forward arrived.
        keywords: the other keyword arguments.
        mask: the mask that arrived, if the text model made it by transformers' mask functions.
        has_other_mask: whether another mask or bias arrived.
        attends_to_expanded: for MLA, whether key and value are the results of `expand_kv`, unchanged.
    """

    layer: str
    has_documents: bool
    keywords: dict[str, Any]
    mask: Mask | None
    has_other_mask: bool
    attends_to_expanded: bool


#: Which code a layer runs, and its layer type.
_Kind = tuple[Any, str | None]


@dataclass(frozen=True)
class Probe:
    """What one forward has shown.

    Attributes:
        masks: all masks that the text model made by transformers' mask functions.
        counts_positions: whether queries or keys were computed from positions that the model counts itself, and none from
            the given position_ids.
    """

    masks: tuple[Mask, ...]
    counts_positions: bool
    _calls: dict[_Kind, list[AttentionCall]]

    def calls_of(self, layer: nn.Module) -> list[AttentionCall]:
        """The calls of layers that run the same code with the same layer type; empty if the forward ran none."""
        return self._calls.get(_kind_of(layer), [])


def probe(text_model: nn.Module) -> Probe | None:
    """Runs a copy of a text model without weights, and returns what its layers handed to the attention function.

    The given model and the state of random numbers are unchanged, and transformers' registries are as before.

    Returns:
        None if nothing can be told: the text model's forward was replaced on the instance, or the copy cannot be built
        or run on the meta device.
    """
    from .latent_forward import DOCUMENTS  # which imports the families, which import this file

    def run(model: nn.Module, recorder: _Recorder) -> Probe:
        positions = torch.arange(_TOKENS).unsqueeze(0)
        recorder.given.add(positions)
        _forward(model, {"position_ids": positions, DOCUMENTS: recorder.marker})
        calls: dict[_Kind, list[AttentionCall]] = {}
        for module, call in recorder.calls:
            calls.setdefault(_kind_of(module), []).append(call)
        counts_positions = recorder.uses_counted and not recorder.uses_given
        return Probe(tuple(mask for _, mask in recorder.masks), counts_positions, calls)

    return _on_copy(text_model, DOCUMENTS, run)


def returns_loss_function(model: nn.Module) -> bool | None:
    """Whether the loss of a model with a head is the result of its `loss_function`, to which nothing is added.

    It is observed in a forward of a copy without weights, with labels. The auxiliary loss of routers is left out.

    Returns:
        None if nothing can be told, see `probe`.
    """

    def run(copied: Any, recorder: _Recorder) -> bool:
        loss = torch.ones(())
        copied.loss_function = lambda *args, **kwargs: loss
        if hasattr(copied.config, "output_router_logits"):
            copied.config.output_router_logits = False
        output = _forward(copied, {"labels": torch.zeros(1, _TOKENS, dtype=torch.long)})
        return getattr(output, "loss", None) is loss

    return _on_copy(model, "", run)


def _on_copy(model: Any, documents: str, run: Callable[[nn.Module, _Recorder], _Result]) -> _Result | None:
    """Runs a function on a copy of the model without weights, in which attention and masks are recorded."""
    if _code_of(model) is not type(model).forward:
        return None
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            copied = _copy_of(model)
            recorder = _Recorder({module: name for name, module in copied.named_modules()}, documents)
            for module in list(copied.modules()):
                recorder.watch(module)
                if isinstance(module, nn.ModuleList):
                    recorder.run_once_of_each_kind(module)
            with _registered(recorder), _WithoutValues(recorder, copied):
                return run(copied, recorder)
    except Exception as error:  # a model's code may raise anything
        _logger.debug("the probe of %s failed", type(model).__name__, exc_info=error)
        return None


def _copy_of(model: Any) -> nn.Module:
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # every model can be built with it
    config._experts_implementation = "eager"  # which runs no expert that no token selects
    copied = type(model)(config).eval()
    for module in copied.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal"):
            module.config._attn_implementation_internal = _NAME
    return copied


def _forward(model: nn.Module, more: dict[str, Any]) -> Any:
    """Runs a model on tokens without a cache, with those further arguments that it takes."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given = {"position_ids": torch.arange(_TOKENS).unsqueeze(0), "use_cache": False}
    given = {name: value for name, value in given.items() if name in parameters}
    given |= {name: value for name, value in more.items() if name in parameters or takes_any}
    return model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), **given)


class _Derived:
    """The tensors that were computed from some first ones, followed by their storages, which views share."""

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}  # they are kept, so that no later storage is at the same address

    def add(self, *values: Any) -> None:
        """Adds those of the values that are tensors, also those inside tuples and lists."""
        for value in values:
            if isinstance(value, Tensor):
                self._found[value.untyped_storage()._cdata] = value
            elif isinstance(value, (tuple, list)):
                self.add(*value)

    def has_any(self, *values: Any) -> bool:
        """Whether any of the values is such a tensor, or a tuple or list that contains one."""
        return bool(self._found) and any(
            value.untyped_storage()._cdata in self._found
            if isinstance(value, Tensor)
            else isinstance(value, (tuple, list)) and self.has_any(*value)
            for value in values
        )


@dataclass
class _Recorder:
    """Records calls of the attention function and of the mask function."""

    names: dict[nn.Module, str]
    documents: str  # the name of the keyword argument
    marker: object = field(default_factory=object)
    calls: list[tuple[nn.Module, AttentionCall]] = field(default_factory=list)
    masks: list[tuple[Tensor, Mask]] = field(default_factory=list)
    expanded: dict[nn.Module, tuple[Tensor, Tensor]] = field(default_factory=dict)
    given: _Derived = field(default_factory=_Derived)  # from the position_ids of the forward
    counted: _Derived = field(default_factory=_Derived)  # from positions that the forward counts
    uses_given: bool = False
    uses_counted: bool = False

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """The attention function: query [B,H,T,.], value [B,.,.,V] -> [B,T,H,V]."""
        mask = self._mask_of(attention_mask)
        marker = kwargs.pop(self.documents, None)
        expanded = self.expanded.pop(module, (None, None))
        call = AttentionCall(
            layer=self.names[module],
            has_documents=marker is self.marker,
            keywords=kwargs,
            mask=mask,
            has_other_mask=attention_mask is not None and mask is None,
            attends_to_expanded=key is expanded[0] and value is expanded[1],
        )
        self.calls.append((module, call))
        self.uses_given |= self.given.has_any(query, key)
        self.uses_counted |= self.counted.has_any(query, key)
        B, H, T, _ = query.shape
        return query.new_empty(B, T, H, value.shape[-1]), None

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor] | None = None,
        local_size: int | None = None,
        use_vmap: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """The mask function: a tensor that stands for the mask."""
        tensor = torch.empty(batch_size, 1, q_length, kv_length, dtype=torch.bool)
        self.masks.append((tensor, Mask(local_size, not use_vmap and _is_causal(mask_function, local_size))))
        return tensor

    def _mask_of(self, tensor: Any) -> Mask | None:
        for made, mask in self.masks:
            if tensor is made or (isinstance(tensor, Tensor) and tensor._base is made):  # or a slice of it
                return mask
        return None

    def watch(self, module: Any) -> None:
        """Records the results of an MLA module's `expand_kv`."""
        if not hasattr(module, "expand_kv"):
            return
        expand_kv = module.expand_kv

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.expanded[module] = expand_kv(*args, **kwargs)
            return self.expanded[module]

        module.expand_kv = recorded

    def run_once_of_each_kind(self, layers: nn.ModuleList) -> None:
        """Lets layers that are built alike and called alike return what the first of them returned."""
        outputs: dict[Any, Any] = {}

        def once(layer: Any) -> None:
            forward = layer.forward

            def first(*args: Any, **kwargs: Any) -> Any:
                key = _structure_of(layer), self._alike(args), self._alike(kwargs)
                if key not in outputs:
                    outputs[key] = forward(*args, **kwargs)
                return outputs[key]

            layer.forward = first

        for layer in layers:
            once(layer)

    def _alike(self, value: Any) -> Any:
        """Something hashable that is equal for arguments which a layer cannot tell apart."""
        if isinstance(value, Tensor):
            return value.shape, value.dtype, next((i for i, (made, _) in enumerate(self.masks) if made is value), None)
        if isinstance(value, (tuple, list)):
            return tuple(self._alike(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, self._alike(item)) for name, item in value.items())
        return value if isinstance(value, _SCALARS) else id(value)


class _WithoutValues(TorchDispatchMode):
    """Answers for the values that meta tensors lack: numbers are 1, conditions hold, and no index is selected.

    It also follows what is computed from the given position_ids and from counted ones.
    """

    def __init__(self, recorder: _Recorder, model: nn.Module) -> None:
        super().__init__()
        self._given, self._counted, self._tables = recorder.given, recorder.counted, _Derived()
        self._tables.add(*model.parameters(), *model.buffers())
        self._answers_left = 10_000  # a loop that waits for another answer ends

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        if func not in (aten._local_scalar_dense.default, aten.nonzero.default) or not args[0].is_meta:
            out = func(*args, **kwargs)
            for derived in (self._given, self._counted):
                if derived.has_any(*args, *kwargs.values()):
                    derived.add(out)
            if self._counts(func, args, out):
                self._counted.add(out)
            return out
        if not self._answers_left:
            raise UlyssesRuntimeError("the forward depends on too many values")
        self._answers_left -= 1
        if func is aten.nonzero.default:
            return torch.empty(0, args[0].ndim, dtype=torch.long, device="meta")
        return torch.ones((), dtype=args[0].dtype, device="cpu").item()

    def _counts(self, func: Any, args: tuple[Any, ...], out: Any) -> bool:
        """Whether an operator numbers the tokens, or takes the first rows of a table for them."""
        aten = torch.ops.aten
        if not isinstance(out, Tensor) or _TOKENS not in out.shape:
            return False
        if func is aten.slice.Tensor:
            return out.shape != args[0].shape and self._tables.has_any(args[0])
        return func.overloadpacket in (aten.arange, aten.cumsum)


@contextmanager
def _registered(recorder: _Recorder) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_NAME, recorder.attention)
    AttentionMaskInterface.register(_NAME, recorder.mask)
    try:
        yield
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME)  # transformers has no inverse of register


def _is_causal(mask_function: Callable[..., Tensor] | None, window: int | None) -> bool:
    """Whether a mask function is causal with a window, by its answers around all places where that shows."""
    if mask_function is None:
        return True
    edges = (window, 2 * window) if window is not None else (64, 4096)
    places = sorted({*range(8), *(edge + step for edge in edges for step in (-1, 0, 1))})
    query, key = torch.meshgrid(*[torch.tensor(places, device="cpu")] * 2, indexing="ij")
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    try:
        seen = mask_function(zero, zero, query, key)
        want = (key <= query) & (query - key < window) if window is not None else key <= query
        return torch.equal(seen.expand_as(want), want)
    except Exception:  # it looks at the batch, which has no values here
        return False


def _structure_of(layer: nn.Module) -> Any:
    """Something hashable that is equal for layers which are built alike, whatever their place."""
    return tuple(
        (
            name,
            type(module),
            _layer_type_of(module),
            tuple((k, v) for k, v in vars(module).items() if k != "layer_idx" and isinstance(v, _SCALARS)),
        )
        for name, module in layer.named_modules()
    )


def _kind_of(module: nn.Module) -> _Kind:
    return _code_of(module), _layer_type_of(module)


def _layer_type_of(module: nn.Module) -> str | None:
    types: Any = getattr(getattr(module, "config", None), "layer_types", None)
    index: Any = getattr(module, "layer_idx", None)
    return types[index] if types is not None and isinstance(index, int) and index < len(types) else None


def _code_of(module: nn.Module) -> Any:
    """The function that a module's forward runs, beneath the hooks of accelerate."""
    forward = vars(module).get("_old_forward", module.forward)
    return getattr(forward, "__func__", forward)
