"""Collectives: plain functions over torch's, and registered operators for those that stay pending.

The functions `start_*` return at once with a *pending* tensor, which nothing may read before `wait`. They are called only
inside registered operators (here and in `layout`), because there no compiler can move a read in front of the wait or
reuse the memory of a buffer that is still being sent.

Shape letters:
    P ranks                             B batch
    T tokens of this rank               R width
    S = P*T, tokens of the sequence
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from . import traffic
from .group import SequenceGroup

_functional = torch.ops._c10d_functional


def start_all_gather(x: Tensor, size: int, group: str, direction: str) -> Tensor:
    """Starts gathering x over the ranks along dim 0. The caller must not write to x before the wait."""
    traffic.record("all_gather", direction, x.nbytes * (size - 1))
    return _functional.all_gather_into_tensor(x, size, group)


def start_all_to_all(
    wire: Tensor, received: list[int], sent: list[int], rank: int, group: str, direction: str
) -> Tensor:
    """Starts the exchange of a flat buffer: `sent[p]` elements of it go to rank p, `received[p]` elements come from it."""
    _record_all_to_all(wire, sent, rank, direction)
    return _functional.all_to_all_single(wire, received, sent, group)


def all_to_all(
    out: Tensor, wire: Tensor, received: list[int], sent: list[int], rank: int, group: str, direction: str
) -> None:
    """Exchanges flat buffers: `sent[p]` elements of wire go to rank p, `received[p]` elements from it arrive in out."""
    _record_all_to_all(wire, sent, rank, direction)
    process_group = _resolve_process_group(group)  # type: ignore[arg-type]  # a plain string in older releases
    dist.all_to_all_single(out, wire, received, sent, group=process_group)


def _record_all_to_all(wire: Tensor, sent: list[int], rank: int, direction: str) -> None:
    traffic.record("all_to_all", direction, (sum(sent) - sent[rank]) * wire.element_size())


def wait(pending: Tensor) -> Tensor:
    """Waits until a pending tensor has arrived: the host on a CPU, the current stream on a GPU."""
    return _functional.wait_tensor(pending)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns fp32, or the dtype itself if it is wider."""
    return torch.promote_types(dtype, torch.float32)


def gather_now(x: Tensor, group: SequenceGroup, direction: str) -> Tensor:
    """Gathers x, which has the same shape on every rank, along dim 0 and waits for it. Not differentiable."""
    if group.size == 1:
        return x
    return wait(start_all_gather(x.contiguous(), group.size, group.name, direction))


def gather_to(x: Tensor, owner: int, group: SequenceGroup, direction: str) -> list[Tensor] | None:
    """Gathers x, whose shape is the same on every rank, on one rank of the group; not differentiable.

    Returns:
        x of all ranks in rank order on the owner, None on the other ranks.
    """
    if group.size == 1:
        return [x]
    x = x.contiguous()
    traffic.record("gather", direction, 0 if owner == group.rank else x.nbytes)
    gathered = [torch.empty_like(x) for _ in range(group.size)] if owner == group.rank else None
    dist.gather(x, gathered, group=group.process_group, group_dst=owner)
    return gathered


def exchange_bytes(parts: list[bytes], received: list[int], group: SequenceGroup, device: torch.device) -> list[bytes]:
    """Sends parts[p] to rank p.

    Args:
        parts: the bytes for each rank.
        received: the number of bytes that come from each rank.
        device: the device of the buffers, which the group's backend has to support.

    Returns:
        The bytes from each rank.
    """
    if group.size == 1:
        return list(parts)
    sent = [len(part) for part in parts]
    wire = torch.frombuffer(bytearray(b"".join(parts)) or bytearray(1), dtype=torch.uint8)[: sum(sent)].to(device)
    out = wire.new_empty(sum(received))
    all_to_all(out, wire, received, sent, group.rank, group.name, "setup")
    return [part.cpu().numpy().tobytes() for part in out.split(received)]


@torch.library.custom_op("ds_mla_ulysses::gather_start", mutates_args=())
def gather_start(x_TBR: Tensor, size: int, group: str) -> Tensor:
    """Starts gathering x over the sequence.

    Returns:
        *pending* [S, B, R], for an operator that waits inside.
    """
    # The copy is sent, because a compiler may reuse the memory of x while the collective is under way.
    return start_all_gather(x_TBR.clone(memory_format=torch.contiguous_format), size, group, "forward")


@gather_start.register_fake
def _fake_gather_start(x_TBR: Tensor, size: int, group: str) -> Tensor:
    return x_TBR.new_empty(x_TBR.shape[0] * size, *x_TBR.shape[1:])


@torch.library.custom_op("ds_mla_ulysses::sum_over_ranks", mutates_args=())
def sum_over_ranks(pending_SBR: Tensor, size: int) -> Tensor:
    """Waits for every rank's partial sums of this rank's tokens, adds them in fp32 (or wider) and rounds once.

    Args:
        pending_SBR: the partial sums [T, B, R] of each rank, one after the other.

    Returns:
        [T, B, R].
    """
    parts = wait(pending_SBR).unflatten(0, (size, -1))
    return parts.sum(0, dtype=accumulation_dtype(parts.dtype)).to(parts.dtype)


@sum_over_ranks.register_fake
def _fake_sum_over_ranks(pending_SBR: Tensor, size: int) -> Tensor:
    return pending_SBR.new_empty(pending_SBR.shape[0] // size, *pending_SBR.shape[1:])
