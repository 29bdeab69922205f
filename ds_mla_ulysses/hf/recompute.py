"""How a model's gradient checkpointing is made to keep attention: `parallelize(recompute=...)`.

transformers gives each layer a function that checkpoints it, in `_gradient_checkpointing_func`, whenever checkpointing is
switched on. During a sequence-parallel forward, the layers that contain attention get the same function with a `context_fn`
of `comm.kept` instead. It does not matter, therefore, when and how often checkpointing is switched on, and forwards of the
plain model keep the function that the user chose.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..comm.kept import keep_attention, keep_output
from ..errors import UlyssesValueError

#: The values of `recompute` and their `context_fn`.
_CONTEXTS: dict[str, Callable[[], Any]] = {"keep_attention": keep_attention, "keep_output": keep_output}
_FUNCTION = "_gradient_checkpointing_func"


def check_recompute(recompute: Any, head_chunks: int) -> None:
    """Raises ValueError unless recompute is None or the name of what is kept, and the setting fits head_chunks."""
    if recompute is None:
        return
    if not isinstance(recompute, str) or recompute not in _CONTEXTS:
        raise UlyssesValueError(
            f"recompute must be None (attention is recomputed with its layer) or one of {list(_CONTEXTS)}, got {recompute!r}."
        )
    if head_chunks > 1:
        raise UlyssesValueError(_problem_of_chunks(f"recompute={recompute!r}", head_chunks))


class KeptLayers:
    """The layers of a text model whose checkpoints keep attention.

    Args:
        text_model: the text model.
        attentions: its attention modules.
        recompute: what is kept; None to leave checkpointing as it is.
        head_chunks: the number of head chunks.

    Attributes:
        is_on: whether attention is kept in the forward that runs now, or ran last, by the setting or a context_fn that the
            user gave.
    """

    def __init__(
        self, text_model: nn.Module, attentions: Sequence[nn.Module], recompute: str | None, head_chunks: int
    ) -> None:
        self._recompute, self._head_chunks = recompute, head_chunks
        known = set(attentions)
        # The flag is there before checkpointing is switched on. The text model itself may be the one that checkpoints.
        every = [x for x in text_model.modules() if hasattr(x, "gradient_checkpointing")]
        self._layers = [x for x in every if not known.isdisjoint(x.modules())]
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._warned = self.is_on = False

    def problem(self) -> str | None:
        """Why the checkpoints of the layers cannot keep attention as they should; None if they can."""
        for layer in self._checkpointed():
            problem = self._problem_of(vars(layer).get(_FUNCTION))
            if problem is not None:
                return problem
        return None

    def begin(self) -> None:
        """Makes the checkpoints of a forward keep attention, until `end`."""
        layers, recompute = self._checkpointed(), self._recompute
        self.is_on = any(_keeps(vars(layer).get(_FUNCTION)) for layer in layers)
        if recompute is None:
            return
        if not layers and not self._warned and torch.is_grad_enabled() and any(x.training for x in self._layers):
            self._warned = True
            warnings.warn(
                f"recompute={recompute!r} has no effect, because gradient checkpointing is off: call "
                "model.gradient_checkpointing_enable(), or leave recompute out.",
                stacklevel=2,
            )
        for layer in layers:
            function = vars(layer)[_FUNCTION]
            self._replaced.append((layer, function))
            vars(layer)[_FUNCTION] = partial(function, context_fn=_CONTEXTS[recompute])
            self.is_on = True

    def end(self) -> None:
        """Gives the layers their functions back."""
        while self._replaced:
            layer, function = self._replaced.pop()
            vars(layer)[_FUNCTION] = function

    def _checkpointed(self) -> list[nn.Module]:
        return [layer for layer in self._layers if layer.gradient_checkpointing and layer.training]

    def _problem_of(self, function: Any) -> str | None:
        """Why a layer's checkpoint function cannot keep attention as it should."""
        settings = function.keywords if isinstance(function, partial) else {}
        inner = function.func if isinstance(function, partial) else function
        if self._recompute is None:
            chunks = self._head_chunks
            return _problem_of_chunks("the context_fn", chunks) if chunks > 1 and _keeps(function) else None
        name = f"recompute={self._recompute!r}"
        # transformers wraps torch's function in one of its own to keep the inputs of layers on the host.
        if inner is not checkpoint and getattr(inner, "__module__", None) != "transformers.modeling_utils":
            return (
                f"{name} needs torch.utils.checkpoint for gradient checkpointing, but layers are checkpointed by {inner!r}: "
                "call model.gradient_checkpointing_enable()."
            )
        if settings.get("use_reentrant") is not False:
            return (
                f"{name} needs gradient checkpointing that is not reentrant: set gradient_checkpointing_kwargs="
                "{'use_reentrant': False} in gradient_checkpointing_enable or TrainingArguments."
            )
        if "context_fn" in settings and settings["context_fn"] is not _CONTEXTS[self._recompute]:
            return (
                f"{name} brings its own context_fn, but gradient_checkpointing_kwargs has {settings['context_fn']!r}: leave "
                "one of them out."
            )
        return None


def _keeps(function: Any) -> bool:
    """Whether a checkpoint function has a `context_fn` that keeps attention."""
    return isinstance(function, partial) and function.keywords.get("context_fn") in _CONTEXTS.values()


def _problem_of_chunks(name: str, head_chunks: int) -> str:
    return f"{name} keeps attention, but head_chunks={head_chunks} frees and recomputes it chunk by chunk: leave one of them out."
