"""The batches that are compared, and the numbers of one process for them.

Letters: B batch · S tokens of the whole sequence · V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..hf.wrappers import PREFIX_TYPES

#: Ids of tokens are below it, in a vocabulary of `recipe.VOCABULARY`; ids of images and other media may lie above.
TEXT_VOCABULARY = 90
_LENGTH = 44
_IGNORED = -100
#: Arguments of models of images and text that say which tokens are text: all of them.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Case:
    """A batch of whole sequences.

    Attributes:
        batch: input_ids, labels, position_ids [B, S], and an attention_mask [B, S] if there is padding.
        documents: row, first and last token (exclusive) of each document.
    """

    batch: dict[str, Tensor]
    documents: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Numbers:
    """What one process gets for a batch.

    Attributes:
        loss: the mean over supervised tokens.
        logits: for each document, [S of the document, V].
        gradients: of each parameter that has one.
    """

    loss: Tensor
    logits: list[Tensor]
    gradients: dict[str, Tensor]


def make_case(name: str) -> Case:
    """Returns one of `request.CASES`, two rows of tokens.

    Labels are those that a Trainer's collator makes, without the first token of each document: no document predicts the
    next one.
    """
    generator = torch.Generator().manual_seed(3)
    length = _LENGTH - (name == "right")  # not a multiple of the ranks, so that shards are padded too
    documents = [(0, 0, length), (1, 0, length)]
    if name == "packed":
        documents = [(0, 0, 7), (0, 7, 30), (0, 30, length), (1, 0, 20), (1, 20, length)]
    elif name == "left":
        documents[1] = (1, 9, length)
    elif name == "right":
        documents[1] = (1, 0, length - 13)
    input_ids = torch.randint(3, TEXT_VOCABULARY, (2, length), generator=generator)
    position_ids, labels = torch.zeros(2, length, dtype=torch.long), torch.full((2, length), _IGNORED)
    attention_mask = torch.zeros(2, length, dtype=torch.long)
    for row, first, last in documents:
        position_ids[row, first:last] = torch.arange(last - first)
        labels[row, first + 1 : last] = input_ids[row, first + 1 : last]
        attention_mask[row, first:last] = 1
    batch = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
    if name in ("left", "right"):
        batch["attention_mask"] = attention_mask
        position_ids.copy_((attention_mask.cumsum(1) - 1).clamp(min=0))
    return Case(batch, tuple(documents))


def more_inputs(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Returns what a model of images and text takes beside text, for text alone."""
    config: Any = model.config
    if not hasattr(config, "vision_config") or config.model_type in PREFIX_TYPES:
        return {}
    taken = inspect.signature(model.forward).parameters
    return {name: torch.zeros_like(case.batch["input_ids"]) for name in _TOKEN_TYPES if name in taken}


def reference(model: nn.Module, case: Case) -> Numbers:
    """Computes the numbers of one process.

    Each document runs alone, so that no mask of transformers is trusted. If RoPE takes its frequencies from the longest
    position of a call, a document alone has others, and transformers' own packed or padded forward is the reference.
    """
    model.zero_grad(set_to_none=True)
    whole = depends_on_longest(model)
    found = (_whole_logits if whole else _logits_alone)(model, case)
    labels = case.batch["labels"]
    total, items = torch.zeros((), dtype=found[0].dtype), 0
    for (row, first, last), logits in zip(case.documents, found, strict=True):
        targets = labels[row, first + 1 : last]
        total = total + nn.functional.cross_entropy(logits[:-1], targets, ignore_index=_IGNORED, reduction="sum")
        items += int((targets != _IGNORED).sum())
    loss = total / items
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Numbers(loss.detach(), [logits.detach() for logits in found], gradients)


def depends_on_longest(model: nn.Module) -> bool:
    """Whether some RoPE takes its frequencies from the longest position of a call."""
    types = [getattr(module, "rope_type", None) for module in model.modules()]
    named = [found for x in types for found in (x.values() if isinstance(x, dict) else [x])]
    return any(isinstance(x, str) and ("dynamic" in x or x == "longrope") for x in named)


def _logits_alone(model: nn.Module, case: Case) -> list[Tensor]:
    takes_positions = _takes_positions(model)
    more = more_inputs(model, case)
    found = []
    for row, first, last in case.documents:
        inputs = {"input_ids": case.batch["input_ids"][row : row + 1, first:last]}
        inputs |= {name: x[row : row + 1, first:last] for name, x in more.items()}
        if takes_positions:
            inputs["position_ids"] = torch.arange(last - first).unsqueeze(0)
        found.append(_call(model, inputs)[0])
    return found


def _whole_logits(model: nn.Module, case: Case) -> list[Tensor]:
    inputs = {name: x for name, x in case.batch.items() if name != "labels"} | more_inputs(model, case)
    logits = _call(model, inputs)
    return [logits[row, first:last] for row, first, last in case.documents]


def _call(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    more: dict[str, Any] = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    call: Callable[..., Any] = model
    logits: Tensor = call(**inputs, **more).logits
    return logits


def _takes_positions(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "position_ids" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
