"""Collectives as plain functions over torch's, and registered operators where one is left pending.

`start_*` returns at once with a *pending* tensor: nothing may read it before `wait`. They are called
inside registered operators only (here and in `layout.exchange`), where no compiler can move a read
in front of the wait or reuse the memory of a buffer that is still being sent.

Letters: P ranks · T this rank's tokens · S = P*T · B batch · R width.
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
    """Starts gathering x over the ranks along dim 0. x must not be written before the wait."""
    traffic.record("all_gather", direction, x.nbytes * (size - 1))
    return _functional.all_gather_into_tensor(x, size, group)


def start_all_to_all(
    wire: Tensor, received: list[int], sent: list[int], rank: int, group: str, direction: str
) -> Tensor:
    """Starts the exchange of a flat buffer: `sent[p]` elements of it to rank p, `received[p]` from it, in that order."""
    _record_all_to_all(wire, sent, rank, direction)
    return _functional.all_to_all_single(wire, received, sent, group)


def all_to_all(
    out: Tensor, wire: Tensor, received: list[int], sent: list[int], rank: int, group: str, direction: str
) -> None:
    """Exchanges flat buffers: `sent[p]` elements of wire to rank p, `received[p]` from it into out."""
    _record_all_to_all(wire, sent, rank, direction)
    dist.all_to_all_single(out, wire, received, sent, group=_resolve_process_group(group))


def _record_all_to_all(wire: Tensor, sent: list[int], rank: int, direction: str) -> None:
    traffic.record("all_to_all", direction, (sum(sent) - sent[rank]) * wire.element_size())


def wait(pending: Tensor) -> Tensor:
    """Blocks (or makes the stream wait) until a pending tensor has arrived."""
    return _functional.wait_tensor(pending)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)


def gather_now(x: Tensor, group: SequenceGroup, direction: str) -> Tensor:
    """x of all ranks, concatenated along dim 0; not differentiable; x has the same shape on every rank."""
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
    """Sends parts[p] to rank p; what each rank sent here, of which `received[p]` bytes come from rank p.

    Args:
        device: where the group's backend takes its buffers from.
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
    """Starts gathering x over the sequence: *pending* [S, B, R], for an operator that waits inside."""
    # The copy is the buffer that is sent: a compiler may reuse the memory of x while it is on its way.
    return start_all_gather(x_TBR.clone(memory_format=torch.contiguous_format), size, group, "forward")


@gather_start.register_fake
def _(x_TBR: Tensor, size: int, group: str) -> Tensor:
    return x_TBR.new_empty(x_TBR.shape[0] * size, *x_TBR.shape[1:])


@torch.library.custom_op("ds_mla_ulysses::sum_over_ranks", mutates_args=())
def sum_over_ranks(pending_SBR: Tensor, size: int) -> Tensor:
    """Waits for what each rank sent of this rank's tokens, sums the ranks in fp32 (or wider), rounds once: [T, B, R]."""
    parts = wait(pending_SBR).unflatten(0, (size, -1))
    return parts.sum(0, dtype=accumulation_dtype(parts.dtype)).to(parts.dtype)


@sum_over_ranks.register_fake
def _(pending_SBR: Tensor, size: int) -> Tensor:
    return pending_SBR.new_empty(pending_SBR.shape[0] // size, *pending_SBR.shape[1:])
