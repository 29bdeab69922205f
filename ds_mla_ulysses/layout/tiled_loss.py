"""The sum of cross entropies, and its gradients, a tile of tokens at a time.

Whole logits cost 12 bytes per local token and entry of the vocabulary. Here the logits of one tile exist at a time: the
head makes them, they become the loss and, in the same memory, its gradient, and both are gone before the next tile.
Gradients of weights are summed over the tiles in fp32 or wider, and rounded once.

Letters: N local tokens · n tokens of a tile · D hidden width · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesTypeError, UlyssesValueError
from .batch import IGNORED_LABEL

#: With loss_tile="auto", a tile has as many tokens as give this many logits. A bf16 logit takes 10 bytes at the peak.
_AUTO_LOGITS = 2**28
#: How many elements `scaled` works on at a time.
_SCALED_AT_ONCE = 2**24

LossTile = int | str | None


def check_loss_tile(loss_tile: Any) -> None:
    """Raises ValueError or TypeError unless loss_tile is "auto", None or an int >= 1."""
    if loss_tile is None or (isinstance(loss_tile, str) and loss_tile == "auto"):
        return
    if type(loss_tile) is not int:
        raise UlyssesTypeError(
            f'loss_tile must be "auto", a number of tokens or None (whole logits), got {loss_tile!r}.'
        )
    if loss_tile < 1:
        raise UlyssesValueError(f"loss_tile must be a positive number of tokens, got {loss_tile}.")


def tokens_of_tile(loss_tile: int | str, vocabulary: int) -> int:
    """Returns how many tokens a tile has. "auto" gives a power of two: 2,048 for a vocabulary of 128,256."""
    if isinstance(loss_tile, int):
        return loss_tile
    return 1 << max(0, (_AUTO_LOGITS // vocabulary).bit_length() - 1)


def sum_of_cross_entropies(
    logits: Tensor, labels_N: Tensor, label_smoothing: float = 0.0, weights_N: Tensor | None = None
) -> Tensor:
    """Returns the cross entropies of the tokens, summed: a scalar in fp32, or in the logits' dtype if that is wider.

    Classes of tensors may override it by `__torch_function__`. Deferred logits do, and compute it in tiles.

    Args:
        logits: [..., V], N tokens.
        labels_N: int64; tokens with the label -100 count zero.
        label_smoothing: as in torch's cross_entropy.
        weights_N: by what the cross entropy of each token is multiplied.
    """
    if has_torch_function_unary(logits):
        result: Tensor = handle_torch_function(
            sum_of_cross_entropies, (logits,), logits, labels_N, label_smoothing, weights_N
        )
        return result
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).to(accumulation_dtype(logits.dtype)),
        labels_N,
        ignore_index=IGNORED_LABEL,
        reduction="sum" if weights_N is None else "none",
        label_smoothing=label_smoothing,
    )
    return losses if weights_N is None else (losses * weights_N.to(losses.dtype)).sum()


def entropies_and_hits(logits: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's entropy in fp32 or wider, and whether its label is the most likely token; without gradients.

    Tokens with the label -100 have entropy 0 and no hit. Classes of tensors may override it, as above.

    Args:
        logits: [..., V], N tokens.
        labels_N: int64.
    """
    if has_torch_function_unary(logits):
        result: tuple[Tensor, Tensor] = handle_torch_function(entropies_and_hits, (logits,), logits, labels_N)
        return result
    with torch.no_grad():
        logits_NV = logits.detach().flatten(0, -2)
        log_probs_NV = torch.log_softmax(logits_NV, 1, dtype=accumulation_dtype(logits.dtype))
        entropies_N = torch.special.entr(log_probs_NV.exp_()).sum(1)
        is_ignored_N = labels_N == IGNORED_LABEL
        return entropies_N.masked_fill(is_ignored_N, 0), (logits_NV.argmax(1) == labels_N) & ~is_ignored_N


@dataclass
class TiledSum:
    """A sum of cross entropies and its gradients, which are None where none was asked for.

    Attributes:
        value: scalar, in fp32 or wider.
        hidden: of the hidden states' shape and dtype.
        parameters: of each parameter, in fp32 or wider if there is more than one tile.
    """

    value: Tensor
    hidden: Tensor | None
    parameters: list[Tensor | None]


def tiled_sum_of_cross_entropies(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels_N: Tensor,
    tile: int,
    parameters: Sequence[Tensor] = (),
    *,
    hidden_gradient: bool = True,
    label_smoothing: float = 0.0,
    weights_N: Tensor | None = None,
) -> TiledSum:
    """Computes `sum_of_cross_entropies(head(hidden), ...)` and its gradients without whole logits.

    Nothing is recorded for autograd.

    Args:
        head: makes logits [..., n, V] of hidden states [..., n, D], each token by itself. It may use autograd.
        hidden: [..., D], N tokens.
        labels_N, label_smoothing, weights_N: as for `sum_of_cross_entropies`.
        tile: how many tokens are computed at a time; the last tile may have fewer.
        parameters: tensors that `head` uses, whose gradients are wanted.
        hidden_gradient: whether the gradient of `hidden` is wanted.
    """
    tokens_ND = hidden.detach().flatten(0, -2)
    leading = (1,) * (hidden.ndim - 2)
    value: Tensor | None = None
    grad_ND = torch.empty_like(tokens_ND) if hidden_gradient else None
    sums: list[Tensor | None] = [None] * len(parameters)
    has_gradient = hidden_gradient or bool(parameters)
    for start in range(0, len(tokens_ND), tile):
        here = slice(start, start + tile)
        tile_nD = tokens_ND[here].detach().requires_grad_(hidden_gradient)
        with torch.set_grad_enabled(has_gradient):
            logits = head(tile_nD.unflatten(0, (*leading, -1)))
        loss, grad_nV = _cross_entropy(
            logits.detach().flatten(0, -2),
            labels_N[here],
            label_smoothing,
            None if weights_N is None else weights_N[here],
            gradient=has_gradient,
        )
        value = loss if value is None else value + loss
        if grad_nV is None:
            continue
        wanted = [tile_nD, *parameters] if hidden_gradient else list(parameters)
        grads: list[Tensor | None] = list(
            torch.autograd.grad(logits, wanted, grad_nV.view_as(logits), allow_unused=True)
        )
        del logits, grad_nV
        if grad_ND is not None:
            of_tile = grads.pop(0)
            assert of_tile is not None  # the head uses its argument
            grad_ND[here] = of_tile
        for i in range(len(sums)):
            sums[i] = _added(sums[i], grads[i])
            grads[i] = None  # so that one gradient of a tile exists at a time
    if value is None:  # no tokens
        value = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    return TiledSum(value, None if grad_ND is None else grad_ND.view_as(hidden), sums)


def _added(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    """The sum, in fp32 or wider if there are two summands; `total` is changed in place."""
    if total is None or grad is None:
        return grad if total is None else total
    return total.to(accumulation_dtype(total.dtype)).add_(grad)


def _cross_entropy(
    logits_nV: Tensor, labels_n: Tensor, label_smoothing: float, weights_n: Tensor | None, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum of the cross entropies in fp32 or wider, and its gradient in the logits' dtype."""
    wide, vocabulary = accumulation_dtype(logits_nV.dtype), logits_nV.shape[1]
    log_probs_nV = torch.log_softmax(logits_nV, 1, dtype=wide)
    nll_loss = torch.nn.functional.nll_loss
    is_ignored_n = labels_n == IGNORED_LABEL
    smoothing = label_smoothing / vocabulary
    if weights_n is None:
        loss = (1 - label_smoothing) * nll_loss(log_probs_nV, labels_n, ignore_index=IGNORED_LABEL, reduction="sum")
        weights_n = log_probs_nV.new_ones(len(labels_n))
    else:
        losses_n = nll_loss(log_probs_nV, labels_n, ignore_index=IGNORED_LABEL, reduction="none")
        weights_n = weights_n.to(wide)
        loss = (1 - label_smoothing) * (losses_n * weights_n).sum()
    if smoothing:
        loss = loss - smoothing * (log_probs_nV.sum(1) * weights_n).masked_fill(is_ignored_n, 0).sum()
    if not gradient:
        return loss, None
    # softmax(z) - (1 - s) onehot - s / V, in the memory of the logarithms, and 0 where labels are ignored.
    grad_nV = log_probs_nV.exp_()
    label_n1 = labels_n.masked_fill(is_ignored_n, 0).unsqueeze(1)
    grad_nV.scatter_add_(1, label_n1, grad_nV.new_full(label_n1.shape, label_smoothing - 1))
    if smoothing:
        grad_nV.sub_(smoothing)
    grad_nV.mul_(weights_n.unsqueeze(1))
    grad_nV.masked_fill_(is_ignored_n.unsqueeze(1), 0)  # also where the logits are not finite
    return loss, grad_nV.to(logits_nV.dtype)


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `x * factor` in another dtype, multiplied in fp32 or wider.

    A bf16 tensor times a scalar tensor would round the scalar to bf16. A few elements are widened at a time.

    Args:
        factor: scalar.
    """
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    wide = torch.promote_types(accumulation_dtype(x.dtype), factor.dtype)
    parts = (y.flatten().split(_SCALED_AT_ONCE) for y in (x.contiguous(), out))
    for part, result in zip(*parts, strict=True):
        result.copy_(part.to(wide) * factor)
    return out
