"""The modules around a text model: heads, wrappers with images or sounds, PEFT.

Under sequence parallelism, everything that they make of the arguments of a forward would cover one rank's tokens only:
masks, positions counted from 0, a cache. And what they raise on one rank, for a token outside the vocabulary for example,
would leave the other ranks waiting. So a hook takes away what they could make something of. The arguments of the user pass
them unseen, under a keyword of our own, and the text model's hook uses and checks those on all ranks.

Letters: B batch · T local tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UlyssesValueError
from ..layout.shard import LAYOUT, SHIFT_LABELS
from .arguments import by_name
from .inputs import NO_LABELS, clamp_tokens, embeddings_of, problem_of_model, tokens_of

#: The keyword argument that carries `Outer` arguments to the text model's hook.
OUTER = "ulysses_outer"

#: The wrappers of the model whose module was given a layout in this thread, until the text model has got it.
_AWAITED: ContextVar[Wrappers | None] = ContextVar("ulysses_awaited", default=None)

_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
#: Model types in which tokens of type 0 attend in both directions.
PREFIX_TYPES = {"paligemma"}


class Outer:
    """The arguments that the outermost module was given, or what is wrong with them.

    Attributes:
        problem: a sentence; None if nothing is wrong. With a problem there are no arguments.
        input_ids, position_ids, attention_mask: as they were given.
        token_types: those that mark images for a module around the text model.
    """

    # Not a dataclass, whose fields torch.compile would guard on.
    def __init__(self, problem: str | None, given: dict[str, Any], token_types: dict[str, Any]) -> None:
        self.problem = problem
        self.input_ids, self.position_ids = given.get("input_ids"), given.get("position_ids")
        self.attention_mask, self.token_types = given.get("attention_mask"), token_types


class Wrappers:
    """The modules from the model that `parallelize` was given down to the text model, which is not one of them.

    Attributes:
        modules: transformers' models and PEFT's, the outermost first.
    """

    def __init__(self, model: nn.Module, text_model: nn.Module) -> None:
        from transformers import PreTrainedModel

        around: list[Any] = [
            m
            for m in model.modules()
            if m is not text_model and isinstance(m, PreTrainedModel) and text_model in set(m.modules())
        ]
        self.modules = [model, *around] if hasattr(model, "get_base_model") else around
        self._text_model = text_model
        names = {name for m in around for name in _parameters_of(m)}
        # A text model that takes token types adds an embedding of them, which is local.
        self._token_types = [n for n in _TOKEN_TYPES if n in names and n not in _parameters_of(text_model)]
        self._has_prefix = any(getattr(m.config, "model_type", None) in PREFIX_TYPES for m in around)

    def is_awaited(self) -> bool:
        """Whether a module was given a layout in this thread, which the text model has not got yet."""
        return _AWAITED.get() is self

    @staticmethod
    def end() -> None:
        """The layout has reached the text model, or the forward has ended without it."""
        _AWAITED.set(None)

    def hooks(self) -> list[tuple[nn.Module, Any]]:
        """The forward pre-hook of each module, to be registered with keyword arguments and before all others.

        Each of them works if no other ran: PEFT calls the forward of its model, but not that model's hooks.
        """
        return [
            (m, functools.partial(self._before, inspect.signature(m.forward), _hands_mask_on(m)))
            for m in self.modules
            if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(m.forward).parameters.values())
        ]

    def loss_functions(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """The modules with a head, and a `loss_function` of each that refuses to shift labels within a shard.

        Labels do not pass a hook if somebody calls the module's `forward`, as PEFT does.
        """
        return [(m, _refuse_labels(m.loss_function)) for m in self.modules if _has_head(m)]

    @torch.compiler.disable
    def _before(
        self,
        signature: inspect.Signature,
        hands_mask_on: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if kwargs.get(LAYOUT) is None:
            _AWAITED.set(None)
            return None
        _AWAITED.set(self)
        if args and any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values()):
            return None  # PEFT's model without a task, which hands them on
        given = by_name(signature, args, kwargs)
        if OUTER not in given:
            given = self._take_away(given, signature)
        # A module around this one may have taken the mask away, which this one's routers need.
        outer: Outer = given[OUTER]
        given["attention_mask"] = outer.attention_mask if hands_mask_on else no_mask(self._device_of(given))
        return (), given

    def _take_away(self, given: dict[str, Any], signature: inspect.Signature) -> dict[str, Any]:
        """Returns arguments of which no module makes anything for one rank's tokens alone, and none raises."""
        types = {name: given.get(name) for name in self._token_types}
        problem = problem_of_model(given) or self._problem_of_types(types)
        outer = Outer(problem, {} if problem else given, {} if problem else types)
        if problem:  # then any tokens do, as all ranks raise in the text model's hook
            any_tokens = torch.zeros(1, 1, dtype=torch.long, device=self._device_of(given))
            given = {"input_ids": any_tokens, LAYOUT: given[LAYOUT]}
        tokens = tokens_of(given)
        assert tokens is not None, "problem_of_model has looked at the tokens"
        B, T = tokens.shape[:2]
        if given.get("input_ids") is not None:
            given["input_ids"] = clamp_tokens(self._text_model, given["input_ids"])
        # Some wrappers count positions from 0 if there are none. The text model's hook does not use these.
        if "position_ids" in signature.parameters and given.get("position_ids") is None:
            given["position_ids"] = torch.arange(T, device=tokens.device).unsqueeze(0)
        # Some wrappers want token types in training, even for text alone.
        no_types = torch.zeros(B, T, dtype=torch.long, device=tokens.device)
        return given | dict.fromkeys(self._token_types, no_types) | {"use_cache": False, OUTER: outer}

    def _device_of(self, given: dict[str, Any]) -> torch.device:
        tensors = [x for x in (given.get("input_ids"), given.get("inputs_embeds")) if isinstance(x, Tensor)]
        return tensors[0].device if tensors else embeddings_of(self._text_model).weight.device

    def _problem_of_types(self, types: dict[str, Any]) -> str | None:
        for name, x in types.items():
            if x is not None and not isinstance(x, Tensor):
                return f"{name} must be a tensor, got {type(x).__name__}."
            if x is not None and self._has_prefix:
                return (
                    f"{name} marks a prefix whose tokens attend in both directions, which is not supported under sequence "
                    f"parallelism: leave {name} out to train causally."
                )
        return None


def marks_images(outer: Outer) -> Tensor | None:
    """bool scalar on the device: whether any token is not of type 0; None without token types."""
    marked = [(x != 0).any() for x in outer.token_types.values() if x is not None]
    return torch.stack(marked).any() if marked else None


def problem_of_token_types(outer: Outer) -> str | None:
    """The sentence about token types other than 0; None if there are none."""
    names = [name for name, x in outer.token_types.items() if x is not None and bool((x != 0).any())]
    if not names:
        return None
    return (
        f"{names[0]} marks tokens of images or sounds, which are not supported under sequence parallelism: only text is, "
        f"whose type is 0. Leave {names[0]} out if the tokens are text."
    )


def no_mask(device: torch.device) -> Tensor:
    """A mask that transformers hands on as it is, since it has four dimensions: no mask of S x S or T x T is made."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _refuse_labels(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss_function)
    def of_shifted_labels(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(LAYOUT) is not None and kwargs.get(SHIFT_LABELS) is None:
            raise UlyssesValueError(NO_LABELS)
        return loss_function(*args, **kwargs)

    return of_shifted_labels


def _hands_mask_on(module: Any) -> bool:
    """Whether the module makes no mask. One with a head does not, but may need the mask for its routers' loss."""
    from transformers import PreTrainedModel

    return not isinstance(module, PreTrainedModel) or _has_head(module)


def _has_head(module: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None


def _parameters_of(module: nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
