"""The loss of sequences that ranks share, with the value and the gradient of one process.

Letters: B batch · T local tokens · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import all_reduce
from ..comm.collectives import accumulation_dtype
from ..comm.group import SequenceGroup
from .batch import IGNORED_LABEL


def sequence_loss(
    logits_BTV: Tensor,
    shift_labels_BT: Tensor,
    group: SequenceGroup,
    num_items: int | Tensor | None = None,
    gradient_scale: float = 1.0,
    label_smoothing: float = 0.0,
    *,
    check: bool = True,
) -> Tensor:
    """Cross entropy of the whole sequences, the same value on each rank of the group.

    With `num_items`, it is the sum over the group's tokens divided by it; without, their mean. A group without any
    supervised token has loss 0 and gradient 0. It is computed in fp32, or in the logits' dtype if that is wider.

    Args:
        logits_BTV: the local logits.
        shift_labels_BT: int64, the label that each token predicts; -100 is ignored.
        num_items: the number of supervised tokens that the sum is divided by.
        gradient_scale: the gradient, not the value, is multiplied by it.
        label_smoothing: as in torch's cross_entropy.
        check: whether to report labels outside the vocabulary on all ranks, for which the host waits for the device.
            Otherwise cross_entropy fails on the rank that has them.

    Backward: no collective. Each rank's gradient is that of its local tokens' share, so the SUM over the group's ranks of
    a parameter's gradient is the gradient of the value (times gradient_scale).

    Raises:
        ValueError: logits and labels do not fit each other; with `check`, labels outside the vocabulary, on all ranks.
    """
    if logits_BTV.shape[:-1] != shift_labels_BT.shape:
        raise ValueError(
            f"logits {tuple(logits_BTV.shape)} and shift_labels {tuple(shift_labels_BT.shape)} must be this rank's "
            "[B, T, vocabulary] and [B, T]: take both from the same shard."
        )
    labels, vocabulary = shift_labels_BT.flatten().to(logits_BTV.device), logits_BTV.shape[-1]
    counts = [(labels != IGNORED_LABEL).sum().double()]
    if check:
        given = torch.as_tensor(-1 if num_items is None else num_items, dtype=torch.double, device=labels.device)
        counts += [given, given.square()]
        impossible = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocabulary))
        counts.append(impossible.sum().double())
        labels = labels.masked_fill(impossible, IGNORED_LABEL)  # cross_entropy would raise on this rank alone
    logits = logits_BTV.flatten(0, -2).to(accumulation_dtype(logits_BTV.dtype))
    local = torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing
    )
    total, items, *checked = all_reduce(torch.stack([local.detach().double(), *counts]), group, "loss").unbind()
    if check:
        _raise_if_wrong(torch.stack(checked).tolist(), group, vocabulary)
    return _of_group(local, total, items if num_items is None else num_items, gradient_scale)


def _raise_if_wrong(checked: list[float], group: SequenceGroup, vocabulary: int) -> None:
    """Raises ValueError on all ranks. `checked` are sums over them: num_items, its square, and impossible labels."""
    given, squares, impossible = checked
    if impossible > 0:
        raise ValueError(
            f"{int(impossible)} shift_labels of the batch are neither {IGNORED_LABEL} nor one of the {vocabulary} tokens of "
            "the vocabulary."
        )
    if group.size * squares != given * given:  # integers, so this is exact; equal only if all ranks gave the same
        raise ValueError(
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
    return _WithValue.apply(local / items.to(local.dtype), (total / items).to(local.dtype), gradient_scale)


class _WithValue(torch.autograd.Function):
    """Forward: `value`. Backward: the gradient goes to `share`, scaled."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


def count_items(shift_labels: Sequence[Tensor], group: SequenceGroup) -> int:
    """The number of supervised tokens in the local shards, summed over all ranks of the group."""
    device = shift_labels[0].device if shift_labels else torch.device("cpu")
    count = torch.zeros((), dtype=torch.long, device=device)
    for labels in shift_labels:
        count += (labels != IGNORED_LABEL).sum()
    return int(all_reduce(count, group, "setup"))
