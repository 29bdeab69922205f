"""The loss of sequences that ranks share, with the value and the gradient of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

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
) -> Tensor:
    """Cross entropy of the whole sequences, the same value on each rank of the group.

    With `num_items`, the sum over the group's tokens divided by it; without, their mean. A group
    without any supervised token has loss 0 and gradient 0. Computed in fp32, or in the logits' dtype
    if that is wider.

    Args:
        logits_BTV: this rank's logits; V is the vocabulary here.
        shift_labels_BT: int64, the label that each token predicts; -100 is ignored.
        num_items: supervised tokens that the sum is divided by.
        gradient_scale: the gradient, not the value, is multiplied by this.
        label_smoothing: as torch's cross_entropy has it.

    Backward: no collective. Each rank's gradient is that of its own tokens' share, so the SUM over the
    group's ranks of a parameter's gradient is the gradient of the value (times gradient_scale).

    Raises:
        ValueError: logits and labels do not fit each other (labels out of range: on all ranks).
    """
    if logits_BTV.shape[:-1] != shift_labels_BT.shape:
        raise ValueError(
            f"logits {tuple(logits_BTV.shape)} and shift_labels {tuple(shift_labels_BT.shape)} must be this rank's "
            "[B, T, vocabulary] and [B, T]: take both from the same shard of shard_batch."
        )
    labels, vocabulary = shift_labels_BT.flatten().to(logits_BTV.device), logits_BTV.shape[-1]
    # Raised below, on all ranks: cross_entropy would raise on one and leave the others waiting.
    impossible = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocabulary))
    labels = labels.masked_fill(impossible, IGNORED_LABEL)
    logits = logits_BTV.flatten(0, -2).to(accumulation_dtype(logits_BTV.dtype))
    own = torch.nn.functional.cross_entropy(
        logits, labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=label_smoothing
    )
    total = torch.stack([own.detach().double(), (labels != IGNORED_LABEL).sum().double(), impossible.sum().double()])
    if group.size > 1:
        dist.all_reduce(total, group=group.process_group)
    if total[2] > 0:
        raise ValueError(
            f"{int(total[2])} shift_labels of the batch are neither {IGNORED_LABEL} nor one of the {vocabulary} tokens of "
            "the vocabulary."
        )
    return _of_group(own, total[0], total[1] if num_items is None else num_items, gradient_scale)


def sum_of_losses(
    own: Tensor,
    shift_labels_BT: Tensor,
    group: SequenceGroup,
    num_items: int | Tensor | None = None,
    gradient_scale: float = 1.0,
) -> Tensor:
    """`sequence_loss` of losses that a fused kernel has summed over this rank's tokens.

    Args:
        own: the sum, a scalar with gradient.
    """
    total = torch.stack([own.detach().double(), (shift_labels_BT != IGNORED_LABEL).sum().to(own.device).double()])
    if group.size > 1:
        dist.all_reduce(total, group=group.process_group)
    return _of_group(own, total[0], total[1] if num_items is None else num_items, gradient_scale)


def _of_group(own: Tensor, total: Tensor, num_items: int | Tensor, gradient_scale: float) -> Tensor:
    items = torch.as_tensor(num_items, dtype=total.dtype, device=total.device).clamp(min=1)
    return _WithValue.apply(own / items.to(own.dtype), (total / items).to(own.dtype), gradient_scale)


class _WithValue(torch.autograd.Function):
    """Forward: `value`. Backward: the gradient goes to `share`, scaled."""

    @staticmethod
    def forward(ctx, share: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad * ctx.scale, None, None


def count_items(shift_labels: list[Tensor], group: SequenceGroup) -> int:
    """Supervised tokens in this rank's shards, summed over all ranks of the group."""
    device = shift_labels[0].device if shift_labels else torch.device("cpu")
    count = torch.zeros((), dtype=torch.long, device=device)
    for labels in shift_labels:
        count += (labels != IGNORED_LABEL).sum()
    if group.size > 1:
        dist.all_reduce(count, group=group.process_group)
    return int(count)
