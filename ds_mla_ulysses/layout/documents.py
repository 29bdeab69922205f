"""Where the documents of a forward begin and end, from position ids and padding.

Local masks mean nothing once heads see the whole sequence. What is needed instead is made here once
per forward, for the whole sequence, and travels with that forward.

Letters: B batch · T this rank's tokens · S all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import gather_now
from ..comm.group import SequenceGroup, gather_objects, raise_first
from .split import in_order, local_runs, marked_split, pieces_of, uneven


class Documents:
    """Documents of a batch of whole sequences: tokens attend causally within their own document.

    A new document starts where a position does not follow the one before it (transformers' rule), and
    at every change between tokens and padding. A run of padding is divided as one document, whatever
    its positions, but attends to nothing: its output is what the kernel gives to a row without keys.

    Args:
        starts_BS: bool, True on the first token of each document; on any device.
        padding_BS: bool, True on padding; None where there is none.

    Attributes:
        segments: [(row, start, end), ...] of all documents, in order. One device synchronisation, at
            construction. Row is None where all rows are divided alike.
    """

    # Not a dataclass: torch.compile would guard on every field, which makes a graph per layout.
    def __init__(self, starts_BS: Tensor, padding_BS: Tensor | None = None) -> None:
        self.starts_BS, self.padding_BS = starts_BS, padding_BS
        self.batch, self.length = starts_BS.shape
        begins = starts_BS.flatten().nonzero().flatten().tolist()
        ends = [*begins[1:], self.batch * self.length]
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.batch)]
        for begin, end in zip(begins, ends, strict=True):
            row = begin // self.length
            rows[row].append((begin - row * self.length, end - row * self.length))
        self.segments: list[tuple[int | None, int, int]]
        if all(row == rows[0] for row in rows):
            self.segments = [(None, begin, end) for begin, end in rows[0]]
        else:
            self.segments = [(i, begin, end) for i, row in enumerate(rows) for begin, end in row]

    @property
    def one_per_row(self) -> bool:
        """Whether plain causal attention is right."""
        return self.segments == [(None, 0, self.length)] and self.padding_BS is None

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """int32 [documents + 1]: boundaries in the flattened [B*S] tokens, as varlen kernels take them."""
        begins = self.starts_BS.flatten().nonzero().flatten()
        return torch.nn.functional.pad(begins, (0, 1), value=self.batch * self.length).to(torch.int32)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - begin for _, begin, end in self.segments)

    @cached_property
    def ids_BS(self) -> Tensor:
        """int64 [B, S]: the number of each token's document within its row, from 1; 0 on padding."""
        ids = self.starts_BS.cumsum(1)
        return ids if self.padding_BS is None else ids.masked_fill(self.padding_BS, 0)

    def allowed_B1TS(self, first_query: int = 0, queries: int | None = None) -> Tensor:
        """bool [B, 1, T, S]: which keys the T queries from the first one on (all by default) may see.

        For eager attention only, since it is as large as the scores.
        """
        last = self.length if queries is None else first_query + queries
        query, key = self.ids_BS[:, first_query:last].unsqueeze(2), self.ids_BS.unsqueeze(1)
        return ((query == key) & (key > 0)).tril(first_query).unsqueeze(1)

    @cached_property
    def cache(self) -> dict:
        """What is made once per forward of its documents or its positions (flex attention's block mask)."""
        return {}


def find_documents(positions_BS: Tensor, padding_BS: Tensor) -> tuple[Documents, str | None]:
    """The documents, and what is wrong with the padding, if anything.

    Args:
        positions_BS: int, positions of all tokens.
        padding_BS: bool, True on padding.
    """
    follows = torch.ones_like(padding_BS)
    follows[:, 1:] = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    starts = ~(follows | padding_BS)
    starts[:, 1:] |= padding_BS[:, 1:] != padding_BS[:, :-1]
    starts[:, 0] = True
    if not padding_BS.any():
        return Documents(starts), None
    return Documents(starts, padding_BS), _hole(positions_BS, padding_BS)


def _hole(positions_BS: Tensor, padding_BS: Tensor) -> str | None:
    """Padding inside a document would cut it in two: a token behind padding has to restart its positions."""
    index = torch.arange(positions_BS.shape[1], device=positions_BS.device).expand_as(positions_BS)
    before = index.masked_fill(padding_BS, -1).cummax(1).values[:, :-1]  # the last token up to the one before
    after_padding = ~padding_BS[:, 1:] & padding_BS[:, :-1] & (before >= 0)
    holes = after_padding & (positions_BS[:, 1:] > positions_BS.gather(1, before.clamp(min=0)))
    if not holes.any():
        return None
    row, i = holes.nonzero()[0].tolist()
    return (
        f"attention_mask has padding inside a document (row {row}, before token {i + 1}, whose position "
        f"{int(positions_BS[row, i + 1])} goes on from {int(positions_BS[row, before[row, i]])}): pad on the left or "
        "the right, or restart position_ids behind the padding. (generate, given no mask, makes one of the pad tokens.)"
    )


def gather_documents(
    position_ids: Tensor | None,
    attention_mask: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    group: SequenceGroup,
    problem: str | None = None,
    alike: Mapping[str, Any] | None = None,
) -> tuple[Documents, Tensor]:
    """Documents of the whole sequence and this rank's positions, from what each rank has of its own tokens.

    Args:
        position_ids: int [B, T], [1, T] or [T], this rank's tokens; None on all ranks: 0..S-1.
        attention_mask: [B, T], 0 on padding; None: no padding. Four-dimensional masks are refused.
        shape: (B, T) of the inputs.
        problem: what else is wrong with this rank's inputs.
        alike: by what they say, small values that have to be the same on all ranks.

    Returns:
        documents of [B, S]; positions int64 [B, T].

    Raises:
        ValueError: on all ranks, if shapes do not fit or differ between ranks, or positions are those of another split.
    """
    B, T = shape
    noted = marked_split(position_ids)
    problem = problem or _problem(position_ids, attention_mask, B, T)
    if problem is None and noted not in (None, group.split) and group.size > 1:
        problem = _is_of(noted, group)
    problem = problem or uneven(group, T)
    alike = {"position_ids were given": position_ids is None, "an attention_mask was given": attention_mask is None} | (
        dict(alike) if alike else {}
    )
    said = gather_objects(group, (problem, (B, T), noted, *alike.values()))
    problems, shapes, notes, *differing = zip(*said, strict=True)
    raise_first(problems)
    if len(set(shapes)) > 1:
        raise ValueError(
            f"the ranks of a sequence group got inputs of different shapes {list(shapes)}: give every rank its part of "
            "the same batch, as shard_batch does."
        )
    for what, answers in zip(alike, differing, strict=True):
        if len(set(answers)) > 1:
            raise ValueError(f"{what} on some ranks of the sequence group and not on others.")

    if position_ids is None:
        runs = [torch.arange(run.start, run.stop, device=device) for run in local_runs(group, T)]
        positions_BT = torch.cat(runs).expand(B, T)
    else:
        positions_BT = position_ids.to(device=device, dtype=torch.long).expand(B, T)
    padding_BT = torch.zeros_like(positions_BT) if attention_mask is None else (attention_mask == 0).to(device)
    # One gather for both; [ranks * T, B, 2], since ranks and tokens have to be adjacent.
    mine = torch.stack([positions_BT.T, padding_BT.T.to(torch.long)], dim=-1)
    of_ranks = gather_now(mine, group, "setup")
    positions_SB, padding_SB = in_order(of_ranks, group).unbind(-1)
    documents, problem = find_documents(positions_SB.T, padding_SB.T.bool())
    if group.split == "head_tail" and group.size > 1 and not any(notes) and position_ids is not None:
        problem = _other_split(of_ranks, group) or problem
    if problem is not None:
        raise ValueError(problem)
    return documents, positions_BT


def _other_split(of_ranks: Tensor, group: SequenceGroup) -> str | None:
    """Finds positions of consecutive tokens where they should be of head and tail, if nothing was noted on them.

    That is where documents are cut off as chunks meet, and would not be in the other order.

    Args:
        of_ranks: [S, B, 2], positions and padding as the ranks hold them, one rank after the other.
    """
    chunks = len(pieces_of(group))
    width = of_ranks.shape[0] // chunks
    begins = torch.arange(width, chunks * width, width, device=of_ranks.device)

    def cuts(in_sequence: Tensor) -> Tensor:
        positions_SB, padding_SB = in_sequence.unbind(-1)
        cut = (positions_SB[begins] != positions_SB[begins - 1] + 1) & (positions_SB[begins] != 0)
        return (cut & (padding_SB[begins] + padding_SB[begins - 1] == 0)).sum()

    here, otherwise = torch.stack([cuts(in_order(of_ranks, group)), cuts(of_ranks)]).tolist()
    return _is_of("contiguous", group) if here and not otherwise else None


def _is_of(split: str, group: SequenceGroup) -> str:
    return (
        f"position_ids are those of a batch with split={split!r}, but the model has split={group.split!r}: shard "
        "batches by shard_batch(batch, handle.group, split=handle.split)."
    )


def _problem(position_ids: Tensor | None, attention_mask: Tensor | None, B: int, T: int) -> str | None:
    for name, x in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if x is not None and not isinstance(x, Tensor):
            return f"{name} must be a tensor [{B}, {T}], got {type(x).__name__}."
    if position_ids is not None and tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        return f"position_ids must be this rank's [{B}, {T}], got {tuple(position_ids.shape)}: see shard_batch."
    if attention_mask is not None and tuple(attention_mask.shape) != (B, T):
        return (
            f"attention_mask must be this rank's two-dimensional [{B}, {T}] (0 on padding), got "
            f"{tuple(attention_mask.shape)}. Causal and document masks are made from position_ids: leave them out."
        )
    return None
