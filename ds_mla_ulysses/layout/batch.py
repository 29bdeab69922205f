"""Turns a batch of whole sequences into shards.

Letters: B batch · S tokens of the whole sequence as given · T local tokens after padding.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.agreement import gather_objects, raise_first, report_of
from ..comm.collectives import exchange_bytes
from ..comm.group import SequenceGroup
from ..errors import UlyssesTypeError, UlyssesValueError
from .shard import LAYOUT, SHIFT_LABELS, Shard, ShardLayout
from .split import pieces_of

IGNORED_LABEL = -100
#: Boundaries of packed documents that hold for the whole row. position_ids say the same.
_OF_WHOLE_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def shard_batch(
    batch: Mapping[str, Any], group: SequenceGroup | dist.ProcessGroup | None, *, check: bool = True
) -> Shard:
    """Returns this rank's shard of a batch that every rank of the group holds whole.

    Every tensor [B, S, ...] (or [1, S, ...]) is padded to a multiple of the number of ranks (of twice that number with the
    split "head_tail") and split along S; everything else is passed on. The padding is a document of its own, whose positions
    start at 0, with label -100 and attention_mask 0, so it changes no number. Labels are shifted before the split,
    exactly as transformers shifts them (token i predicts label i+1, the last token predicts nothing): shifting within
    a shard would lose the first label of every rank.

    Args:
        batch: `input_ids` (or `inputs_embeds`) [B, S], and any of `labels` or `shift_labels`, `position_ids`,
            `attention_mask` (two-dimensional), and further tensors.
        group: `handle.group`, which knows its split, or a torch process group, whose split is "contiguous".
        check: whether to compare checksums of the batch over the ranks and to report a bad batch on all of them. It
            costs two small all-gathers and a copy of the batch to the host.

    Returns:
        the Shard. Its inputs always have `position_ids`: positions in the whole sequence, 0..S-1 if none are given.

    Raises:
        ValueError: the ranks hold different batches, or one of them holds a bad one. With `check` it is raised on all
            ranks, otherwise only on a rank with a bad batch.
        TypeError: the batch is not a mapping, on the same ranks.
    """
    group = SequenceGroup.of(group)
    if check:
        _check_equal_batches(batch, group)
    return next(iter(_shards(_given(batch), [group.rank], group)))


def _given(batch: Any) -> dict[str, Any]:
    """The entries of a batch that are not None."""
    if not isinstance(batch, Mapping):
        raise UlyssesTypeError(f"batch must be a dict of tensors [B, S], got a {type(batch).__name__}.")
    return {name: x for name, x in batch.items() if x is not None}


def _check_equal_batches(batch: Any, group: SequenceGroup) -> None:
    """Raises ValueError or TypeError on all ranks if their batches differ or one of them is bad."""
    fingerprint: dict[str, Any] | None = None
    problem: Exception | None = None
    try:
        given = _given(batch)
        _shape(given)
        fingerprint = _fingerprint(given)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        problem = error
    answers = gather_objects(group, (report_of(problem), fingerprint))
    raise_first([report for report, _ in answers])
    first = answers[0][1]
    differing = [rank for rank, (_, other) in enumerate(answers) if other != first]
    if differing:
        names = [name for name in first if any(other.get(name) != first[name] for _, other in answers)]
        raise UlyssesValueError(
            f"ranks 0 and {differing[0]} of the sequence-parallel group hold different batches (they differ in "
            f"{names or 'their names'}). The ranks of a group share each sequence, so give them the same data, for "
            "example with a sampler that has num_replicas=handle.data_size and rank=handle.data_rank."
        )


def exchange_batches(
    batch: Mapping[str, Any] | None, group: SequenceGroup, device: torch.device, problem: str | None = None
) -> list[dict[str, Any] | None]:
    """The local shard of each rank's batch, in rank order; None for a rank that has no batch left.

    The batches of different ranks may differ in everything. The shards are those of `shard_batch`, as one dict each
    (see `Shard.as_batch`). If position_ids are given, the boundaries that transformers' collators make for
    FlashAttention are left out, since they say the same.

    Args:
        batch: the batch of whole sequences that this rank has read, None if there are no more.
        device: where the shards are returned.
        problem: why this rank could not read its batch.

    Raises:
        ValueError: on all ranks, if one of them holds a bad batch or a problem.
    """
    parcels: list[bytes] = [b""] * group.size
    if batch is not None and problem is None:
        try:
            parcels = _parcels(batch, group)
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other ranks wait for this one
            problem = f"its batch cannot be sent: {type(error).__name__}: {error}"
    answers = gather_objects(group, (problem, [len(parcel) for parcel in parcels]))
    raise_first([text for text, _ in answers])
    received = [lengths[group.rank] for _, lengths in answers]
    if not any(received):
        return [None] * group.size
    arrived = exchange_bytes(parcels, received, group, device)
    return [pickle.loads(parcel).to(device).as_batch() if parcel else None for parcel in arrived]


def _parcels(batch: Mapping[str, Any], group: SequenceGroup) -> list[bytes]:
    """The pickled shards of a batch, one for each rank."""
    on_host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items() if x is not None}
    if "position_ids" in on_host:
        on_host = {name: x for name, x in on_host.items() if name not in _OF_WHOLE_ROWS}

    def compact(x: Any) -> Any:
        """Without the whole tensor, which would be pickled with each slice of it."""
        return x.clone() if isinstance(x, Tensor) else x

    return [
        pickle.dumps(
            Shard({name: compact(x) for name, x in shard.inputs.items()}, compact(shard.shift_labels), shard.layout)
        )
        for shard in _shards(on_host, range(group.size), group)
    ]


def _shards(batch: Mapping[str, Any], ranks: Sequence[int], group: SequenceGroup) -> Iterator[Shard]:
    """The shards that `ranks` of the group take of a batch of whole sequences."""
    B, S = _shape(batch)
    whole = dict(batch)
    labels = whole.pop("labels", None)
    if labels is not None and SHIFT_LABELS not in whole:
        whole[SHIFT_LABELS] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
    if "position_ids" not in whole:
        device = whole["input_ids"].device if "input_ids" in whole else whole["inputs_embeds"].device
        whole["position_ids"] = torch.arange(S, device=device).expand(B, S)
    count = len(pieces_of(group))
    padded = {name: _pad(name, x, -S % count) if _is_split(x, B, S) else x for name, x in whole.items()}
    length = S + -S % count
    for rank in ranks:
        inputs = {
            name: _join([x.chunk(count, dim=1)[piece] for piece in pieces_of(group, rank)])
            if _is_split(whole[name], B, S)
            else x
            for name, x in padded.items()
        }
        layout = ShardLayout(group.split, group.size, rank, length, S, group.members)
        shift_labels = inputs.pop(SHIFT_LABELS, None)
        # The layout comes last: code that takes the first entry for the batch size has to find a tensor.
        yield Shard({**inputs, LAYOUT: layout}, shift_labels, layout)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _is_split(x: Any, B: int, S: int) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 2 and x.shape[0] in (1, B) and x.shape[1] == S


def _pad(name: str, x: Tensor, missing: int) -> Tensor:
    if not missing:
        return x
    shape = (x.shape[0], missing, *x.shape[2:])
    if name == "position_ids":
        tail = torch.arange(missing, device=x.device, dtype=x.dtype).expand(shape)
    else:
        tail = x.new_full(shape, IGNORED_LABEL if name == SHIFT_LABELS else 0)
    return torch.cat([x, tail], dim=1)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    if LAYOUT in batch:
        raise UlyssesValueError("the batch is a shard already: it has a layout. Give whole sequences.")
    name = next((n for n in ("input_ids", "inputs_embeds") if n in batch), None)
    if name is None:
        raise UlyssesValueError(f"the batch has neither input_ids nor inputs_embeds, only {sorted(batch)}.")
    tokens = batch[name]
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or 0 in tokens.shape:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise UlyssesValueError(f"{name} must be a non-empty tensor [B, S], got {shape}.")
    B, S = tokens.shape[:2]
    for name in ("labels", SHIFT_LABELS, "position_ids", "attention_mask"):
        x, allowed = batch.get(name), ((B, S), (1, S)) if name == "position_ids" else ((B, S),)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in allowed):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise UlyssesValueError(
                f"{name} must be [B, S] = [{B}, {S}] like input_ids, got {shape}."
                + (" Document and causal masks are made from position_ids: leave them out." if "mask" in name else "")
            )
    return B, S


def _fingerprint(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Shape, dtype and checksum of every tensor; equal batches have equal ones."""
    return {
        name: (tuple(x.shape), str(x.dtype), zlib.crc32(_bytes(x))) if isinstance(x, Tensor) else None
        for name, x in batch.items()
    }


def _bytes(x: Tensor) -> Any:
    return x.detach().cpu().reshape(-1).view(torch.uint8).numpy()
