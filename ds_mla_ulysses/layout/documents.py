"""Where the documents of a forward begin and end, from position ids and padding.

Local masks mean nothing once a rank's heads see the whole sequence. What replaces them is made here once per forward,
for the whole sequence, and is handed down with that forward.

Letters: B batch · T local tokens · S tokens of the whole sequence.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import gather_numbers, gather_objects, raise_first
from ..comm.collectives import gather_now
from ..comm.group import SequenceGroup
from ..errors import UlyssesValueError
from .split import in_order, local_runs, uneven


class Documents:
    """The documents of a batch of whole sequences: tokens attend causally within their own document.

    A new document starts where a position does not follow the one before it (transformers' rule), at every change
    between tokens and padding, and where an attention mask gives two tokens different numbers. A run of padding is one
    document, whatever its positions, but it attends to nothing: its output is what the kernel gives to a row without keys.

    Args:
        starts_BS: bool, True on the first token of each document; on any device.
        padding_BS: bool, True on padding; None if there is no padding.
        positions_BS: int64, the positions of all tokens, if they are known.
        begins: the indices of True in the flattened starts_BS, if the host knows them. Otherwise it waits for them.
        tokens: how many tokens of a row are not padding that sharding has added at the end; all of them by default.

    Attributes:
        boundaries: where documents begin in the flattened [B*S] tokens, and B*S at the end; on the host.
        segments: [(row, start, end), ...] of all documents, in order. The row is None if all rows are divided alike.
    """

    # Not a dataclass, whose fields torch.compile would guard on: that is one graph for each layout.
    def __init__(
        self,
        starts_BS: Tensor,
        padding_BS: Tensor | None = None,
        positions_BS: Tensor | None = None,
        begins: list[int] | None = None,
        tokens: int | None = None,
    ) -> None:
        self.starts_BS, self.padding_BS, self.positions_BS = starts_BS, padding_BS, positions_BS
        self.batch, self.length = starts_BS.shape
        self.tokens = self.length if tokens is None else tokens
        if begins is None:
            begins = starts_BS.flatten().nonzero().flatten().tolist()
        self.boundaries = [*begins, self.batch * self.length]
        rows: list[list[tuple[int, int]]] = [[] for _ in range(self.batch)]
        for begin, end in zip(begins, self.boundaries[1:], strict=True):
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
        """int32 [documents + 1]: the boundaries as varlen kernels take them, on the device."""
        return torch.tensor(self.boundaries, dtype=torch.int32, device=self.starts_BS.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(end - begin for _, begin, end in self.segments)

    @property
    def longest_position(self) -> Tensor:
        """int64 scalar: the highest position in the batch, padding included, on the device."""
        assert self.positions_BS is not None
        return self.positions_BS.max()

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
    def cache(self) -> dict[Any, Any]:
        """What is made once per forward from its documents or its positions, such as flex attention's block mask."""
        return {}


def to_host(x: Tensor) -> Any:
    """The tensor as an array on the host: the only wait of a forward for the device."""
    return x.cpu().numpy()


def find_documents(
    positions_BS: Tensor, numbers_BS: Tensor, flags: Tensor | None = None, tokens: int | None = None
) -> tuple[Documents, str | None, list[bool]]:
    """The documents, and what is wrong with the padding, if anything. The host waits for the device once.

    Args:
        positions_BS: int64, the positions of all tokens.
        numbers_BS: int64, 0 on padding; a document also begins where the numbers of two tokens differ.
        flags: bool [n], which the host shall read with the documents.
        tokens: see `Documents`.

    Returns:
        the documents, the problem or None, and the flags on the host.
    """
    B, S = positions_BS.shape
    padding_BS = numbers_BS == 0
    follows = torch.ones_like(padding_BS)
    follows[:, 1:] = positions_BS[:, 1:] == positions_BS[:, :-1] + 1
    starts = ~(follows | padding_BS)
    starts[:, 1:] |= numbers_BS[:, 1:] != numbers_BS[:, :-1]
    starts[:, 0] = True
    holes, before = _holes(positions_BS, padding_BS)
    about_padding = torch.stack([padding_BS.any(), holes.any()])
    to_read = [starts.flatten(), about_padding] if flags is None else [starts.flatten(), about_padding, flags]
    on_host = to_host(torch.cat(to_read))
    begins = on_host[: B * S].nonzero()[0].tolist()
    has_padding, has_holes, *flags_on_host = on_host[B * S :].tolist()
    documents = Documents(starts, padding_BS if has_padding else None, positions_BS, begins, tokens)
    problem = _describe_hole(positions_BS, holes, before) if has_holes else None
    return documents, problem, flags_on_host


def _holes(positions_BS: Tensor, padding_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Padding inside a document would cut it in two: a token behind padding has to restart its positions.

    Returns:
        bool [B, S-1], True where token i+1 goes on behind padding; int64 [B, S-1], the last token up to i, or -1.
    """
    index = torch.arange(positions_BS.shape[1], device=positions_BS.device).expand_as(positions_BS)
    before = index.masked_fill(padding_BS, -1).cummax(1).values[:, :-1]
    after_padding = ~padding_BS[:, 1:] & padding_BS[:, :-1] & (before >= 0)
    return after_padding & (positions_BS[:, 1:] > positions_BS.gather(1, before.clamp(min=0))), before


def _describe_hole(positions_BS: Tensor, holes: Tensor, before: Tensor) -> str:
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
    impossible_BT: Tensor | None = None,
    describe_impossible: Callable[[], str | None] = lambda: None,
    tokens: int | None = None,
) -> tuple[Documents, Tensor]:
    """The documents of whole sequences and the local positions, from each rank's local positions and padding.

    It takes one all-gather of a few integers, by which ranks agree that their inputs fit each other, and one of
    positions and padding. The host waits for the device once.

    Args:
        position_ids: int [B, T], [1, T] or [T], local; None on all ranks means 0..S-1.
        attention_mask: [B, T], 0 on padding; None means no padding. Values above 1 number the documents of a row, as some
            collators do. Four-dimensional masks are refused.
        shape: (B, T) of the inputs.
        problem: anything else that is wrong with the local inputs.
        alike: small values that have to be the same on all ranks, by what they say.
        impossible_BT: bool, a shape that broadcasts to [B, T]: True on local tokens that are not supported.
        describe_impossible: the sentence about the local ones among them, or None; called if any rank has some.
        tokens: how many of the S tokens are not padding that sharding has added; all of them by default.

    Returns:
        documents of [B, S]; positions int64 [B, T].

    Raises:
        ValueError: on all ranks, if shapes do not fit or differ between ranks, or any rank has a problem.
    """
    B, T = shape
    problem = problem or _problem(position_ids, attention_mask, B, T) or uneven(group, T)
    given = {"position_ids were given": position_ids is None, "an attention_mask was given": attention_mask is None}
    _agree(group, problem, (B, T), given | {"sharding padded the sequence": tokens} | dict(alike or {}))

    if position_ids is None:
        runs = [torch.arange(run.start, run.stop, device=device) for run in local_runs(group, T)]
        positions_BT = torch.cat(runs).expand(B, T)
    else:
        positions_BT = position_ids.to(device, torch.long).expand(B, T)
    if attention_mask is None:
        numbers_BT = torch.ones(B, T, dtype=torch.long, device=device)
    else:
        mask_BT = attention_mask.to(device)
        numbers_BT = mask_BT.to(torch.long).clamp(min=1).masked_fill(mask_BT == 0, 0)
    impossible_BT = torch.zeros_like(numbers_BT) if impossible_BT is None else impossible_BT.to(numbers_BT)
    # One gather for all; [ranks * T, B, 2], since ranks and tokens have to be adjacent.
    of_ranks = gather_now(torch.stack([positions_BT.T, (2 * numbers_BT + impossible_BT).T], dim=-1), group, "setup")
    positions_SB, state_SB = in_order(of_ranks, group).unbind(-1)
    documents, hole, (has_impossible,) = find_documents(
        positions_SB.T, (state_SB // 2).T, (state_SB % 2).any().unsqueeze(0), tokens
    )
    if hole is not None:
        raise UlyssesValueError(hole)
    if has_impossible:
        raise_first(gather_objects(group, describe_impossible()))
    return documents, positions_BT


def _agree(group: SequenceGroup, problem: str | None, shape: tuple[int, int], alike: dict[str, Any]) -> None:
    """Raises ValueError on all ranks if one has a problem, or if their shapes or other values differ.

    Integers travel. Only if something is wrong are the ranks asked what it is.
    """
    fingerprint = zlib.crc32(repr(list(alike.values())).encode())
    numbers = gather_numbers([problem is not None, *shape, fingerprint], group)
    if not any(has_problem for has_problem, *_ in numbers) and all(of_rank == numbers[0] for of_rank in numbers):
        return
    answers = gather_objects(group, (problem, shape, alike))
    raise_first([text for text, _, _ in answers])
    shapes = [of_rank for _, of_rank, _ in answers]
    if len(set(shapes)) > 1:
        raise UlyssesValueError(
            f"the ranks of a sequence-parallel group got inputs of different shapes {shapes}: give every rank its shard "
            "of the same batch, as handle.shard does."
        )
    for what in alike:
        if any(others[what] != alike[what] for _, _, others in answers):
            raise UlyssesValueError(f"{what} on some ranks of the sequence-parallel group and not on others.")


def _problem(position_ids: Tensor | None, attention_mask: Tensor | None, B: int, T: int) -> str | None:
    for name, x in (("position_ids", position_ids), ("attention_mask", attention_mask)):
        if x is not None and not isinstance(x, Tensor):
            wrapper = (
                " A model around the text model makes it: parallelize the text model." if isinstance(x, dict) else ""
            )
            return f"{name} must be a tensor [{B}, {T}], got {type(x).__name__}.{wrapper}"
    if position_ids is not None and tuple(position_ids.shape) not in ((T,), (1, T), (B, T)):
        return (
            f"position_ids must be this rank's [{B}, {T}], got {tuple(position_ids.shape)}: take them from the shard."
        )
    if attention_mask is not None and tuple(attention_mask.shape) != (B, T):
        return (
            f"attention_mask must be this rank's two-dimensional [{B}, {T}] (0 on padding), got "
            f"{tuple(attention_mask.shape)}. Causal and document masks are made from position_ids: leave them out."
        )
    return None
