"""The arguments of a sequence-parallel forward: which are refused, and why.

A problem on one rank has to be raised on all of them, or the others would wait for it. So these functions return a
sentence, which goes along with the exchange that each forward makes (`layout.documents.gather_documents`).

Letters: B batch · T local tokens · D hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import SequenceGroup
from ..layout.shard import LAYOUT, SHIFT_LABELS, ShardLayout
from .arguments import MEDIA, is_given

_NO_ATTENTIONS = "output_attentions is not supported under sequence parallelism."
NO_LABELS = (
    "labels cannot be given to a parallelized model, which would shift them within this rank's shard: shard the batch "
    "with its labels (handle.shard) and compute the loss with handle.loss(logits, shard)."
)
_NO_MEDIA = (
    "{} are not supported under sequence parallelism: only text is. Run the model with images or sounds without a layout, "
    "under torch.no_grad() or inside `with handle.plain():`."
)
_LOGITS = "logits_to_keep would keep the last tokens of every rank's shard: leave it out and slice the result."
_REFUSED = {
    ("cache", "past_key_values"): (
        "cache and past_key_values are not supported under sequence parallelism: leave them out, or generate from whole "
        "sequences without a layout."
    ),
    ("cu_seq_lens_q", "cu_seq_lens_k"): (
        "cu_seq_lens_q/k do not fit a shard of a sequence: mark documents by position_ids instead."
    ),
    ("output_attentions",): _NO_ATTENTIONS,
}


def problem_of_model(given: Mapping[str, Any]) -> str | None:
    """Why the arguments of the whole model would be wrong on a shard; None if they are right."""
    # With shift_labels, a model's own loss is that of its local tokens, from which the Trainer makes the group's.
    if is_given(given.get("labels")) and given.get(SHIFT_LABELS) is None:
        return NO_LABELS
    for name in MEDIA:
        if is_given(given.get(name)):
            return _NO_MEDIA.format(name)
    if is_given(given.get("logits_to_keep")):
        return _LOGITS
    return _problem_of_forward(given)


def find_problem(text_model: Any, given: Mapping[str, Any], layout: Any, group: SequenceGroup) -> str | None:
    """Why the arguments of the text model would be wrong on a shard; None if they are right."""
    problem = _problem_of_forward(given)
    if problem is None and getattr(text_model.config, "output_attentions", False):
        return _NO_ATTENTIONS
    tokens = tokens_of(given)
    return problem if tokens is None else problem or _problem_of_layout(layout, group, tokens.shape[1])


def _problem_of_forward(given: Mapping[str, Any]) -> str | None:
    for names, problem in _REFUSED.items():
        if any(is_given(given.get(name)) for name in names):
            return problem
    return _problem_of_tokens(given.get("input_ids"), given.get("inputs_embeds"))


def tokens_of(given: Mapping[str, Any]) -> Tensor | None:
    """The input_ids [B, T] or inputs_embeds [B, T, D] that were given; None if they are not what a model takes."""
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    tokens: Any = embeds if ids is None else ids
    return tokens if _problem_of_tokens(ids, embeds) is None else None


def _problem_of_tokens(ids: Any, embeds: Any) -> str | None:
    """Why the tokens would stop this rank in the embedding, which the other ranks would not notice."""
    if (ids is None) == (embeds is None):
        return "give exactly one of input_ids and inputs_embeds."
    for name, x, wanted in (("input_ids", ids, 2), ("inputs_embeds", embeds, 3)):
        if x is not None and (not isinstance(x, Tensor) or x.ndim != wanted or 0 in x.shape):
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            return f"{name} must be this rank's [B, T{', D' if wanted == 3 else ''}] tokens, got {found}."
    return None


def impossible_tokens(text_model: nn.Module, ids: Tensor) -> Tensor | None:
    """bool [B, T], True on tokens that the embedding does not have. The host does not wait for it."""
    table = embeddings_of(text_model)
    return (ids < 0) | (ids >= table.num_embeddings) if isinstance(table, nn.Embedding) else None


def clamp_tokens(text_model: nn.Module, ids: Tensor) -> Tensor:
    """The tokens, or the nearest ones that the embedding has. The host does not wait for it."""
    table = embeddings_of(text_model)
    return ids.clamp(0, table.num_embeddings - 1) if isinstance(table, nn.Embedding) else ids


def problem_of_impossible_tokens(text_model: nn.Module, ids: Tensor) -> str | None:
    """The sentence about the first of them; None if there are none."""
    wrong = impossible_tokens(text_model, ids)
    if wrong is None or not wrong.any():
        return None
    found, size = int(ids[wrong][0]), embeddings_of(text_model).num_embeddings
    return f"input_ids has {found}, which is outside the vocabulary of {size}."


def _problem_of_layout(layout: Any, group: SequenceGroup, tokens: int) -> str | None:
    """Why the layout is not that of the group, or of so many local tokens."""
    if not isinstance(layout, ShardLayout):
        return (
            f"{LAYOUT} must be the layout of a shard, as handle.shard(batch) makes it, got a {type(layout).__name__}."
        )
    problem = problem_of_group(layout, group)
    if problem is not None:
        return problem
    if tokens * layout.ranks != layout.length:
        return (
            f"the inputs have {tokens} tokens on this rank, but the shard's layout says {layout.length // layout.ranks} of "
            f"{layout.length}: give the model shard.inputs as they are, not truncated and not those of another batch."
        )
    return None


def problem_of_group(layout: ShardLayout, group: SequenceGroup) -> str | None:
    """Why the layout is not that of this rank in the group."""
    if (layout.kind, layout.ranks, layout.rank) != (group.split, group.size, group.rank):
        return (
            f"the batch was sharded as {layout}, but the model has split={group.split!r} and this is rank {group.rank} of "
            f"{group.size}: shard batches with handle.shard(batch), on each rank its own."
        )
    if layout.members and group.members and layout.members != group.members:
        return (
            f"the batch was sharded for the group of ranks {list(layout.members)}, but this rank shares the model's sequences "
            f"with the group of ranks {list(group.members)}: shard batches with handle.shard(batch) of this model's handle."
        )
    return None


def embeddings_of(text_model: Any) -> Any:
    """The table of the text model's token embeddings."""
    return text_model.get_input_embeddings()


def is_recomputation() -> bool:
    """Whether a non-reentrant checkpoint recomputes a forward now, which has been permitted when it first ran."""
    try:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    except AttributeError:  # another torch: then the forward is refused
        return False
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")
