"""The auxiliary loss of MoE routers, over the tokens of a whole sequence-parallel group.

transformers' `load_balancing_loss_func` is, over the rows of all MoE layers,

    aux_loss = E * sum over experts e of (C_e / N) * (R_e / N)

where N is the number of rows (layers times tokens), C_e counts how often e is among the top K of a row, and R_e is the sum
of e's router probabilities. Rows are weighted by the attention mask, so padding does not count. Each rank sums over its
local tokens, and one all-reduce of 2E + 2 numbers makes the sums of the group. C and N have no gradient.

The model computes the loss of its local tokens inside its forward. `AuxLoss` replaces it in the outputs.

Letters: B batch · T local tokens · N rows, the B*T tokens of a layer · E experts · K experts of a token.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import all_reduce
from ..comm.collectives import accumulation_dtype
from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from ..layout.loss import with_value
from ..layout.shard import ShardLayout
from ..layout.split import local_runs

#: The name of transformers' function in modelling files.
_FUNCTION = "load_balancing_loss_func"
#: How far the loss of the local tokens may differ from the model's own, relatively. Another top K is off by far more.
_TOLERANCE = 1e-2


@dataclass(frozen=True)
class RouterSums:
    """Sums over rows: counts_E of chosen experts, probabilities_E with gradient, and the number of rows."""

    counts_E: Tensor
    probabilities_E: Tensor
    rows: Tensor

    @classmethod
    def of(cls, logits: Sequence[Tensor], top_k: int, weights_N: Tensor) -> RouterSums:
        """The sums over all layers.

        Args:
            logits: [N, E] of each layer.
            top_k: K.
            weights_N: float64, the weight of each row, 0 on padding.
        """
        device, experts = logits[0].device, logits[0].shape[-1]
        weights_N = weights_N.to(device)
        wide_N1 = weights_N.to(accumulation_dtype(logits[0].dtype)).unsqueeze(-1)
        counts_E = weights_N.new_zeros(experts)
        probabilities_E = wide_N1.new_zeros(experts)
        for layer_NE in logits:
            # Softmax and top K in the logits' dtype, as transformers takes them: ties must be broken alike.
            routing_NE = torch.nn.functional.softmax(layer_NE.to(device), dim=-1)
            chosen_NK = torch.topk(routing_NE.detach(), top_k, dim=-1).indices
            counts_E.scatter_add_(0, chosen_NK.flatten(), weights_N.repeat_interleave(top_k))
            probabilities_E = probabilities_E + (routing_NE.to(wide_N1.dtype) * wide_N1).sum(0)
        return cls(counts_E, probabilities_E, weights_N.sum() * len(logits))

    def loss(self) -> Tensor:
        """The loss of these rows alone."""
        shares_E = (self.counts_E / self.rows).to(self.probabilities_E.dtype)
        return len(shares_E) * (shares_E * self.probabilities_E / self.rows).sum()

    def loss_of_group(self, group: SequenceGroup, gradient_scale: float, differs: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of all ranks' rows, the same value on each rank, and the sum of `differs` over the ranks.

        Backward: no collective. Each rank's gradient is that of its local rows' share, so the SUM over ranks of a
        parameter's gradient is the gradient of the value (times gradient_scale).
        """
        experts, dtype = len(self.counts_E), self.probabilities_E.dtype
        numbers = [self.counts_E, self.probabilities_E.detach().double(), self.rows.view(1), differs.double().view(1)]
        totals = all_reduce(torch.cat(numbers), group, "loss")
        counts_E, probabilities_E, (rows, differing) = totals.split([experts, experts, 2])
        of_group = RouterSums(counts_E, probabilities_E, rows)
        share = RouterSums(counts_E, self.probabilities_E, rows)
        return with_value(share.loss(), of_group.loss().to(dtype), gradient_scale), differing


@dataclass
class _Forward:
    """One sequence-parallel forward: which local tokens count, and the sums over them once the text model has run."""

    layout: ShardLayout
    mask_BT: Tensor | None
    sums: RouterSums | None = None
    #: The loss of the local tokens as the model itself computes it, with the group's padding. Made once, to compare.
    local_loss: Tensor | None = None
    #: The group's loss, once it has taken the place of the model's.
    loss: Tensor | None = None


#: The sequence-parallel forward that runs in this thread.
_FORWARD: ContextVar[_Forward | None] = ContextVar("ulysses_routers", default=None)


class AuxLoss:
    """Makes `aux_loss` of one model's outputs the loss of the whole group. `ModelPatch` calls it from its hooks.

    Args:
        modules: the modules around the text model, the outermost first.
        text_model: the module whose outputs have `router_logits`.
    """

    def __init__(self, modules: Sequence[nn.Module], text_model: nn.Module, group: SequenceGroup) -> None:
        self.modules, self.group = list(modules), group
        self._text_model = text_model
        self._is_compared = False
        #: What the gradient is multiplied by; the Handle knows.
        self.gradient_scale: Callable[[], float] = lambda: 1.0

    def begin(self, layout: ShardLayout, mask_BT: Tensor | None) -> None:
        """A sequence-parallel forward of the text model begins."""
        if self.modules:
            _FORWARD.set(_Forward(layout, mask_BT))

    @staticmethod
    def end() -> None:
        """The forward of the outermost module has ended."""
        _FORWARD.set(None)

    @torch.compiler.disable
    def keep_sums(self, router_logits: Sequence[Tensor]) -> None:
        """Sums over the local tokens, inside the model's forward, where autocast is as for the model's own loss."""
        forward, top_k = _FORWARD.get(), self._top_k()
        if forward is None or top_k is None or not router_logits:
            return
        weights_BT = self._weights(forward, router_logits[0])
        forward.sums = RouterSums.of(router_logits, top_k, (weights_BT * self._is_real(forward, weights_BT)).flatten())
        if not self._is_compared:
            with torch.no_grad():
                forward.local_loss = RouterSums.of(router_logits, top_k, weights_BT.flatten()).loss()

    @staticmethod
    def _weights(forward: _Forward, logits_NE: Tensor) -> Tensor:
        """float64 [B, T]: the weights of the local tokens in the model's own loss."""
        if forward.mask_BT is not None:
            return forward.mask_BT.to(logits_NE.device, torch.float64)
        tokens = forward.layout.length // forward.layout.ranks
        rows = logits_NE.numel() // logits_NE.shape[-1]
        return torch.ones(rows // tokens, tokens, dtype=torch.float64, device=logits_NE.device)

    def _is_real(self, forward: _Forward, weights_BT: Tensor) -> Tensor:
        """bool [T]: False on the padding that `shard_batch` has added, which one process does not have."""
        runs = local_runs(self.group, weights_BT.shape[1])
        places_T = torch.cat([torch.arange(run.start, run.stop, device=weights_BT.device) for run in runs])
        return places_T < forward.layout.tokens

    def replace(self, module: nn.Module, outputs: Any) -> None:
        """Puts the group's loss into the outputs of a module around the text model.

        `loss` is set to None if the module made one: it holds the auxiliary loss of the local tokens.

        Raises:
            ValueError: on all ranks, if the loss is not the function at the top of this file.
        """
        is_tuple = isinstance(outputs, tuple)
        if not is_tuple and getattr(outputs, "aux_loss", None) is None:
            return
        forward = _FORWARD.get()
        if forward is None:
            return
        if is_tuple:
            if forward.sums is not None and forward.loss is None and hasattr(module, "config"):
                raise UlyssesValueError(
                    "return_dict=False is not supported with output_router_logits under sequence parallelism: the "
                    "auxiliary loss of the group takes the place of the model's own by its name."
                )
        elif outputs.aux_loss is not forward.loss:
            self._replace(forward, outputs)

    @torch.compiler.disable  # its collective cannot be traced
    def _replace(self, forward: _Forward, outputs: Any) -> None:
        problem = self._problem(forward)
        if problem is not None:
            raise UlyssesValueError(
                f"the auxiliary loss of this model's routers is not supported under sequence parallelism: {problem} Set "
                "output_router_logits=False (TRL: router_aux_loss_coef=0.0)."
            )
        if forward.loss is None:
            assert forward.sums is not None
            forward.loss = self._loss(forward, forward.sums, outputs.aux_loss)
        outputs["aux_loss"] = forward.loss
        if getattr(outputs, "loss", None) is not None:
            outputs["loss"] = None

    def _loss(self, forward: _Forward, sums: RouterSums, local_loss: Tensor) -> Tensor:
        differs = torch.zeros((), dtype=torch.bool, device=sums.rows.device)
        if forward.local_loss is not None:
            own, ours = local_loss.detach().double().to(differs.device), forward.local_loss.double()
            differs = ~torch.isclose(own, ours, rtol=_TOLERANCE, equal_nan=True)
        loss, differing = sums.loss_of_group(self.group, self.gradient_scale(), differs)
        if not self._is_compared:
            self._is_compared = True
            if differing > 0:
                raise UlyssesValueError(
                    "the auxiliary loss that the model computes of its local tokens is not that of its router logits with "
                    f"{self._top_k()} experts per token, so it cannot be computed over a sequence-parallel group: set "
                    "output_router_logits=False (TRL: router_aux_loss_coef=0.0)."
                )
        return loss

    def _problem(self, forward: _Forward) -> str | None:
        """Why the loss of the group cannot be computed; the same on all ranks."""
        functions = [getattr(sys.modules.get(type(m).__module__), _FUNCTION, None) for m in self.modules]
        function = next((f for f in reversed(functions) if f is not None), None)
        if function is None:
            return f"its modelling file has no {_FUNCTION}, with which it could be compared."
        if not _has_known_form(function):
            return f"its {_FUNCTION} is not transformers' usual one."
        if self._top_k() is None:
            return "it has no num_experts_per_tok."
        if forward.sums is None:
            return "its text model does not return router_logits."
        return None

    def _top_k(self) -> int | None:
        found = self._setting("num_experts_per_tok")
        return found if isinstance(found, int) else None

    def coefficient(self) -> float:
        """By what the model multiplies the auxiliary loss before it adds it to its own loss.

        Raises:
            ValueError: the model does not say.
        """
        found = self._setting("router_aux_loss_coef")
        if found is None:
            found = self._setting("aux_loss_coef")
        if found is None:
            raise UlyssesValueError(
                "the model has neither router_aux_loss_coef nor aux_loss_coef, by which its auxiliary loss is weighted: set "
                "output_router_logits=False, or train it with a loop of your own."
            )
        return float(found)

    def _setting(self, name: str) -> Any:
        """An attribute of the causal language model, which its forward reads, or an entry of the text model's config."""
        attributes = (getattr(module, name, None) for module in reversed(self.modules))
        found = next((value for value in attributes if value is not None), None)
        return getattr(self._text_model.config, name, None) if found is None else found


@functools.cache
def _has_known_form(function: Callable[..., Any]) -> bool:
    """Whether a modelling file's function computes the loss at the top of this file, with and without a mask."""
    generator = torch.Generator().manual_seed(0)
    B, T, experts, top_k = 2, 7, 6, 2
    logits = [torch.randn(B * T, experts, generator=generator, device="cpu", requires_grad=True) for _ in range(3)]
    mask_BT = torch.ones(B, T, dtype=torch.long, device="cpu")
    mask_BT[0, :3] = mask_BT[1, 5:] = 0
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for mask in (None, mask_BT):
            try:
                own = function(tuple(logits), num_experts=experts, top_k=top_k, attention_mask=mask)
                own_gradients = torch.autograd.grad(own, logits)
            except Exception:  # another signature, another result: another form
                return False
            weights_N = (
                torch.ones(B * T, dtype=torch.float64, device="cpu") if mask is None else mask.flatten().double()
            )
            ours = RouterSums.of(logits, top_k, weights_N).loss()
            pairs = [(own, ours), *zip(own_gradients, torch.autograd.grad(ours, logits), strict=True)]
            if not all(a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-4, 1e-6) for a, b in pairs):
                return False
    return True
