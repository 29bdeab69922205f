"""The loss of sequences that ranks share, with the value and the gradient of one process.

Letters: B batch · T local tokens · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm.agreement import all_reduce, gather_numbers, raise_everywhere
from ..comm.group import SequenceGroup
from ..errors import UlyssesTypeError, UlyssesValueError
from .batch import IGNORED_LABEL
from .tiled_loss import sum_of_cross_entropies


def sequence_loss(
    logits_BTV: Tensor,
    shift_labels_BT: Tensor,
    group: SequenceGroup,
    num_items: int | Tensor | None = None,
    gradient_scale: float = 1.0,
    label_smoothing: float = 0.0,
    *,
    weights_BT: Tensor | None = None,
    check: bool = True,
    problem: Exception | None = None,
) -> Tensor:
    """Cross entropy of the whole sequences, the same value on each rank of the group.

    With `num_items`, it is the sum over the group's tokens divided by it; without, their mean. A group without any
    supervised token has loss 0 and gradient 0. It is computed in fp32, or in the logits' dtype if that is wider.

    Args:
        logits_BTV: the local logits, or a tensor that overrides `sum_of_cross_entropies`.
        shift_labels_BT: int64, the label that each token predicts; -100 is ignored.
        num_items: the number of supervised tokens that the sum is divided by.
        gradient_scale: the gradient, not the value, is multiplied by it.
        label_smoothing: as in torch's cross_entropy.
        weights_BT: by what the cross entropy of each token is multiplied. The number of tokens stays what it is.
        check: whether to report labels outside the vocabulary on all ranks, for which the host waits for the device.
            Otherwise cross_entropy fails on the rank that has them.
        problem: why this rank has no loss. It is raised, with `check` on all ranks.

    Backward: no collective. Each rank's gradient is that of its local tokens' share, so the SUM over the group's ranks of
    a parameter's gradient is the gradient of the value (times gradient_scale).

    Raises:
        ValueError: logits and labels do not fit each other, on all ranks with `check`, otherwise on those where they do
            not; with `check`, labels outside the vocabulary and num_items that differ, on all ranks.
    """
    problem = problem or misfit(logits_BTV, shift_labels_BT, num_items, weights_BT)
    if problem is not None:
        if not check:
            raise problem
        _raise_beside_losses(problem, logits_BTV, group)
    labels, vocabulary = shift_labels_BT.flatten().to(logits_BTV.device), logits_BTV.shape[-1]
    counts = [(labels != IGNORED_LABEL).sum().double()]
    if check:
        given = torch.as_tensor(-1 if num_items is None else num_items, dtype=torch.double, device=labels.device)
        low, high = given.remainder(_PART), given.div(_PART, rounding_mode="floor")
        counts += [torch.zeros_like(given), low, low.square(), high, high.square()]
        impossible = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocabulary))
        counts.append(impossible.sum().double())
        labels = labels.masked_fill(impossible, IGNORED_LABEL)  # cross_entropy would raise on this rank alone
    weights = None if weights_BT is None else weights_BT.flatten().to(logits_BTV.device)
    local = sum_of_cross_entropies(logits_BTV, labels, label_smoothing, weights)
    total, items, *checked = all_reduce(torch.stack([local.detach().double(), *counts]), group, "loss").unbind()
    if check:
        _raise_if_wrong(torch.stack(checked).tolist(), group, vocabulary)
    return _of_group(local, total, items if num_items is None else num_items, gradient_scale)


#: How many numbers `sequence_loss` sums over the ranks with `check`, and the place of the number of ranks with a problem.
_CHECKED_SUMS, _PROBLEMS = 8, 2
#: num_items is compared in two parts, so that sums of their squares over the ranks are exact in float64.
_PART = 2**22


def misfit(logits: Any, labels: Any, num_items: Any, weights: Any = None) -> Exception | None:
    """Why there is no loss of these arguments."""
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        found = [type(x).__name__ for x in (logits, labels)]
        return UlyssesTypeError(f"logits and shift_labels must be tensors, got {' and '.join(found)}.")
    if logits.shape[:-1] != labels.shape:
        return UlyssesValueError(
            f"logits {tuple(logits.shape)} and shift_labels {tuple(labels.shape)} must be this rank's "
            "[B, T, vocabulary] and [B, T]: take both from the same shard of shard_batch."
        )
    if weights is not None and not (isinstance(weights, Tensor) and weights.shape == labels.shape):
        shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        return UlyssesValueError(
            f"token_weights must be a tensor {tuple(labels.shape)} like shift_labels, got {shape}: one weight for each "
            "local token."
        )
    is_number = num_items.numel() == 1 if isinstance(num_items, Tensor) else isinstance(num_items, Real)
    if num_items is not None and not is_number:
        return UlyssesTypeError(f"num_items must be what handle.num_items(shards) returns, got {num_items!r}.")
    return None


def _raise_beside_losses(problem: Exception, logits: Any, group: SequenceGroup) -> NoReturn:
    """Raises a problem on all ranks, of which others are in the all-reduce of `sequence_loss`."""
    fallback = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    sums = torch.zeros(_CHECKED_SUMS, dtype=torch.double, device=getattr(logits, "device", fallback))
    sums[_PROBLEMS] = 1
    all_reduce(sums, group, "loss")
    raise_everywhere(problem, group)
    raise problem


def _raise_if_wrong(checked: list[float], group: SequenceGroup, vocabulary: int) -> None:
    """Raises on all ranks. `checked` are sums over them: ranks with a problem, both parts of num_items with their squares,
    and impossible labels.
    """
    problems, *parts, impossible = checked
    if problems > 0:
        raise_everywhere(None, group)
    if impossible > 0:
        raise UlyssesValueError(
            f"{int(impossible)} shift_labels of the batch are neither {IGNORED_LABEL} nor one of the {vocabulary} tokens of "
            "the vocabulary."
        )
    low, low_squares, high, high_squares = parts
    # Equal only if all ranks gave the same. Integers, so this is exact.
    if group.size * low_squares != low * low or group.size * high_squares != high * high:
        given = low + _PART * high
        raise UlyssesValueError(
            f"num_items differs between the ranks of the sequence-parallel group (their mean is {given / group.size:g}, and "
            "-1 stands for none): pass what handle.num_items(shards) returns, on every rank."
        )


def sum_of_losses(
    local: Tensor,
    shift_labels_BT: Tensor,
    group: SequenceGroup,
    num_items: int | Tensor | None = None,
    gradient_scale: float = 1.0,
) -> Tensor:
    """`sequence_loss` for losses that a fused kernel has summed over the local tokens.

    Args:
        local: the sum, a scalar with gradient.
    """
    items = (shift_labels_BT != IGNORED_LABEL).sum().to(local.device).double()
    total, items = all_reduce(torch.stack([local.detach().double(), items]), group, "loss").unbind()
    return _of_group(local, total, items if num_items is None else num_items, gradient_scale)


def _of_group(local: Tensor, total: Tensor, num_items: int | Tensor, gradient_scale: float) -> Tensor:
    items = torch.as_tensor(num_items, dtype=total.dtype, device=total.device).clamp(min=1)
    return with_value(local / items.to(local.dtype), (total / items).to(local.dtype), gradient_scale)


def with_value(share: Tensor, value: Tensor, gradient_scale: float) -> Tensor:
    """The value, whose gradient goes to `share`, multiplied by gradient_scale."""
    result: Tensor = _WithValue.apply(share, value, gradient_scale)
    return result


class _WithValue(torch.autograd.Function):
    """Forward: `value`. Backward: the gradient goes to `share`, scaled."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


def count_items(shift_labels: Sequence[Tensor], group: SequenceGroup, problem: Exception | None = None) -> int:
    """The number of supervised tokens in the local shards, summed over all ranks of the group.

    Args:
        problem: why this rank cannot count; it is raised on all ranks.
    """
    count = sum((labels != IGNORED_LABEL).sum() for labels in shift_labels)
    counts = gather_numbers(
        [int(count), int(problem is not None)], group
    )  # on whichever device the labels of a rank are
    if any(has_problem for _, has_problem in counts):
        raise_everywhere(problem, group)
    return sum(count for count, _ in counts)
