"""From a batch of whole sequences to this rank's part of it.

Letters: B batch · S tokens of the sequence as given · T tokens of this rank after padding.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import exchange_bytes
from ..comm.group import SequenceGroup, gather_objects, raise_first
from .split import mark_split, pieces_of

IGNORED_LABEL = -100
#: The key of a batch that is this rank's part; models parallelized with `by_batch` look for it.
SHARDED = "ulysses_sharded"
#: Boundaries of packed documents that hold for the whole row; position_ids tell the same.
_OF_WHOLE_ROWS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


def shard_batch(
    batch: Mapping[str, Any], group: SequenceGroup | dist.ProcessGroup | None, split: str | None = None
) -> dict[str, Any]:
    """This rank's tokens of a batch that every rank of the group has whole.

    Every tensor [B, S, ...] (or [1, S, ...]) is padded to a multiple of the ranks (of twice the ranks with the split
    "head_tail") and split along S; anything else is passed on. Padding is one more document (its positions start at 0), with label
    -100 and attention_mask 0, so it changes no number. Labels are shifted before the split, exactly
    as transformers shifts them (token i predicts label i+1, the last one nothing), and come back as
    `shift_labels` only: shifting within a shard would lose the first token of every rank.

    Args:
        batch: `input_ids` (or `inputs_embeds`) [B, S], and any of `labels` or `shift_labels`,
            `position_ids`, `attention_mask` (two-dimensional) and further tensors.
        group: `handle.group`, or a torch process group.
        split: which tokens a rank holds, as of `parallelize`; by default that of `handle.group`, and "contiguous" for
            a torch process group.

    Returns:
        A new dict with `position_ids` always in it: global ones, 0..S-1 where none are given.

    Raises:
        ValueError: on all ranks, if they hold different batches or one of them holds a bad one.
    """
    group = SequenceGroup.of(group)
    group = group if split is None else group.with_split(split)
    batch = {name: x for name, x in batch.items() if x is not None}
    try:
        _shape(batch)
        problem, print_of_batch = None, _fingerprint(batch)
    except ValueError as error:
        problem, print_of_batch = str(error), None
    said = gather_objects(group, (problem, print_of_batch))
    raise_first([text for text, _ in said])
    differing = [rank for rank, (_, other) in enumerate(said) if other != said[0][1]]
    if differing:
        names = [name for name in said[0][1] if any(other.get(name) != said[0][1][name] for _, other in said)]
        raise ValueError(
            f"ranks 0 and {differing[0]} of the sequence group hold different batches (they differ in "
            f"{names or 'their names'}): the ranks of a group share each sequence, so give them the same data, for "
            "example a sampler with num_replicas=handle.data_size and rank=handle.data_rank."
        )

    return next(iter(_parts(batch, [group.rank], group)))


def exchange_batches(
    batch: Mapping[str, Any] | None, group: SequenceGroup, device: torch.device, problem: str | None = None
) -> list[dict[str, Any] | None]:
    """This rank's part of each rank's own batch, in rank order; None for a rank that has no batch.

    The batches of different ranks may differ in everything. Parts are as `shard_batch` makes them, with
    `ulysses_sharded=True` in each. Boundaries that transformers' collators make for flash attention are
    left out if position_ids are given, which tell the same.

    Args:
        batch: this rank's batch of whole sequences, None if it has no more.
        device: where parts are returned.
        problem: what kept this rank from reading its batch.

    Raises:
        ValueError: on all ranks, if one of them holds a bad batch or a problem.
    """
    parts: list[bytes] = [b""] * group.size
    if batch is not None and problem is None:
        try:
            parts = _packed(batch, group)
        except ValueError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other ranks wait for this one
            problem = f"its batch cannot be sent: {type(error).__name__}: {error}"
    said = gather_objects(group, (problem, [len(part) for part in parts]))
    raise_first([text for text, _ in said])
    received = [lengths[group.rank] for _, lengths in said]
    if not any(received):
        return [None] * group.size
    arrived = exchange_bytes(parts, received, group, device)
    return [_received(part, device, group) if part else None for part in arrived]


def _packed(batch: Mapping[str, Any], group: SequenceGroup) -> list[bytes]:
    on_host = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items() if x is not None}
    if "position_ids" in on_host:
        on_host = {name: x for name, x in on_host.items() if name not in _OF_WHOLE_ROWS}
    # A slice would be pickled with all that it is a slice of.
    return [
        pickle.dumps({name: x.clone() if isinstance(x, Tensor) else x for name, x in part.items()})
        for part in _parts(on_host, range(group.size), group)
    ]


def _received(part: bytes, device: torch.device, group: SequenceGroup) -> dict[str, Any]:
    shard = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in pickle.loads(part).items()}
    mark_split(shard["position_ids"], group.split)
    return {**shard, SHARDED: True}


def _parts(batch: Mapping[str, Any], ranks: Sequence[int], group: SequenceGroup) -> Iterator[dict[str, Any]]:
    """The parts that `ranks` of the group take of a batch of whole sequences."""
    B, S = _shape(batch)
    whole = dict(batch)
    labels = whole.pop("labels", None)
    if labels is not None and "shift_labels" not in whole:
        whole["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED_LABEL)[:, 1:]
    if "position_ids" not in whole:
        device = whole["input_ids"].device if "input_ids" in whole else whole["inputs_embeds"].device
        whole["position_ids"] = torch.arange(S, device=device).expand(B, S)
    count = len(pieces_of(group))
    padded = {name: _pad(name, x, -S % count) if _is_split(x, S) else x for name, x in whole.items()}
    for rank in ranks:
        part = {
            name: _join([x.chunk(count, dim=1)[chunk] for chunk in pieces_of(group, rank)])
            if _is_split(whole[name], S)
            else x
            for name, x in padded.items()
        }
        mark_split(part["position_ids"], group.split)
        yield part


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _is_split(x: Any, S: int) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 2 and x.shape[1] == S


def _pad(name: str, x: Tensor, missing: int) -> Tensor:
    if not missing:
        return x
    shape = (x.shape[0], missing, *x.shape[2:])
    if name == "position_ids":
        tail = torch.arange(missing, device=x.device, dtype=x.dtype).expand(shape)
    else:
        tail = x.new_full(shape, IGNORED_LABEL if name == "shift_labels" else 0)
    return torch.cat([x, tail], dim=1)


def _shape(batch: Mapping[str, Any]) -> tuple[int, int]:
    name = next((n for n in ("input_ids", "inputs_embeds") if n in batch), None)
    if name is None:
        raise ValueError(f"the batch has neither input_ids nor inputs_embeds, only {sorted(batch)}.")
    tokens = batch[name]
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or 0 in tokens.shape:
        shape = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{name} must be a non-empty tensor [B, S], got {shape}.")
    B, S = tokens.shape[:2]
    for name in ("labels", "shift_labels", "position_ids", "attention_mask"):
        x, allowed = batch.get(name), ((B, S), (1, S)) if name == "position_ids" else ((B, S),)
        if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) not in allowed):
            shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
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
