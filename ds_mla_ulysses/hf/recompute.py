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
        raise UlyssesValueError(
            f"recompute={recompute!r} keeps what head_chunks={head_chunks} frees and recomputes chunk by chunk: leave one of "
            "them out."
        )


class KeptLayers:
    """The layers of a text model whose checkpoints keep attention.

    Args:
        text_model: the text model.
        attentions: its attention modules.
        recompute: what is kept; None to leave checkpointing as it is.
    """

    def __init__(self, text_model: nn.Module, attentions: Sequence[nn.Module], recompute: str | None) -> None:
        self.recompute = recompute
        known = set(attentions)
        # The flag is there before checkpointing is switched on. The text model itself may be the one that checkpoints.
        every = [] if recompute is None else [x for x in text_model.modules() if hasattr(x, "gradient_checkpointing")]
        self._layers = [x for x in every if not known.isdisjoint(x.modules())]
        self._replaced: list[tuple[nn.Module, Any]] = []
        self._warned = False

    def problem(self) -> str | None:
        """Why the checkpoints of the layers cannot keep attention; None if they can, or if there are none."""
        for layer in self._checkpointed():
            problem = _problem_of(vars(layer).get(_FUNCTION), self.recompute)
            if problem is not None:
                return problem
        return None

    def begin(self) -> None:
        """Makes the checkpoints of a forward keep attention, until `end`."""
        if self.recompute is None or not torch.is_grad_enabled():
            return
        layers = self._checkpointed()
        if not layers and not self._warned and any(layer.training for layer in self._layers):
            self._warned = True
            warnings.warn(
                f"recompute={self.recompute!r} has no effect, because gradient checkpointing is off: call "
                "model.gradient_checkpointing_enable(), or leave recompute out.",
                stacklevel=2,
            )
        for layer in layers:
            function = vars(layer)[_FUNCTION]
            self._replaced.append((layer, function))
            vars(layer)[_FUNCTION] = partial(function, context_fn=_CONTEXTS[self.recompute])

    def end(self) -> None:
        """Gives the layers their functions back."""
        while self._replaced:
            layer, function = self._replaced.pop()
            vars(layer)[_FUNCTION] = function

    def _checkpointed(self) -> list[nn.Module]:
        return [layer for layer in self._layers if layer.gradient_checkpointing and layer.training]


def _problem_of(function: Any, recompute: str | None) -> str | None:
    """Why a checkpoint function cannot be given a context_fn."""
    name = f"recompute={recompute!r}"
    settings = function.keywords if isinstance(function, partial) else {}
    inner = function.func if isinstance(function, partial) else function
    # transformers wraps torch's function in one of its own to keep the inputs of layers on the host.
    if inner is not checkpoint and getattr(inner, "__module__", None) != "transformers.modeling_utils":
        return (
            f"{name} needs torch.utils.checkpoint for gradient checkpointing, but the layers are checkpointed by {inner!r}: "
            "call model.gradient_checkpointing_enable()."
        )
    if settings.get("use_reentrant") is not False:
        return (
            f"{name} needs gradient checkpointing that is not reentrant: call model.gradient_checkpointing_enable("
            "gradient_checkpointing_kwargs={'use_reentrant': False}), or set gradient_checkpointing_kwargs in "
            "TrainingArguments."
        )
    context_fn = settings.get("context_fn")
    if context_fn is not None and context_fn not in _CONTEXTS.values():
        return f"{name} brings a context_fn of its own, but gradient_checkpointing_kwargs has {context_fn!r}: remove one."
    return None
