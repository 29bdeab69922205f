"""The dense attention calls that MoBA makes whatever the gate picks: current blocks and dense documents.

Letters: T queries · S keys · D any width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from .boundaries import Document

#: The CPU kernel does not skip masked scores within about this many keys. Longer current blocks are therefore halved
#: until they are this short: two causal halves, and the second half's attention to the first. The halves save little
#: in blocks above the second number.
_LONGEST_WHOLE, _LONGEST_HALVED = 256, 1024


@dataclass(frozen=True)
class DenseCall:
    """One call that computes `count` attentions of equal shape.

    The i-th attention has `queries` queries from index q + i * q_step on, and `keys` keys from index k + i * k_step on.
    """

    q: int
    k: int
    queries: int
    keys: int
    count: int = 1
    q_step: int = 0
    k_step: int = 0

    def queries_of(self, x_TD: Tensor) -> Tensor:
        """Returns a view [count, queries, ...] of a tensor over all queries."""
        return _windows(x_TD, self.q, self.q_step, self.count, self.queries)

    def keys_of(self, x_SD: Tensor) -> Tensor:
        """Returns a view [count, keys, ...] of a tensor over all keys."""
        return _windows(x_SD, self.k, self.k_step, self.count, self.keys)

    def is_all(self, queries: int, keys: int) -> bool:
        """Returns whether the call covers all queries and all keys in order, each exactly once."""
        return (
            (self.q, self.k) == (0, 0)
            and (self.count * self.queries, self.count * self.keys) == (queries, keys)
            and (self.count == 1 or (self.q_step, self.k_step) == (self.queries, self.keys))
        )


def _windows(x: Tensor, start: int, step: int, count: int, size: int) -> Tensor:
    stride = x.stride(0)
    return x.as_strided(
        (count, size, *x.shape[1:]), (step * stride, stride, *x.stride()[1:]), x.storage_offset() + start * stride
    )


@dataclass
class DenseCalls:
    """The dense calls of all documents.

    Attributes:
        causal: calls with as many keys as queries. Together they cover every query once.
        past: calls without a mask, which attend some of those queries to more keys.
    """

    causal: list[DenseCall] = field(default_factory=list)
    past: list[DenseCall] = field(default_factory=list)

    def add_causal(self, q: int, k: int, length: int) -> None:
        """Adds causal attention of `length` tokens."""
        _append(self.causal, DenseCall(q, k, length, length))

    def add_past(self, q: int, k: int, queries: int, keys: int) -> None:
        """Adds attention without a mask, unless it would be empty."""
        if queries and keys:
            _append(self.past, DenseCall(q, k, queries, keys))

    def add_current_block(self, q: int, k: int, length: int) -> None:
        """Adds causal attention of `length` tokens, in halves if that saves work."""
        if not _LONGEST_WHOLE < length <= _LONGEST_HALVED:
            return self.add_causal(q, k, length)
        half = length // 2
        self.add_current_block(q, k, half)
        self.add_current_block(q + half, k + half, length - half)
        self.add_past(q + half, k, length - half, half)


def _append(calls: list[DenseCall], new: DenseCall) -> None:
    """Merges the new call into the last one of its shape if the steps agree, and appends it otherwise."""
    for i in reversed(range(len(calls))):
        last = calls[i]
        if (last.queries, last.keys) == (new.queries, new.keys):
            steps = new.q - last.q, new.k - last.k
            if last.count > 1:
                fits = steps == (last.count * last.q_step, last.count * last.k_step)
                steps = last.q_step, last.k_step
            else:
                fits = steps[0] >= new.queries and steps[1] >= new.keys  # written memory must not overlap
            if fits:
                calls[i] = replace(last, count=last.count + 1, q_step=steps[0], k_step=steps[1])
                return
            break
    calls.append(new)


def dense_calls(documents: Sequence[Document], block_size: int, top_k: int) -> DenseCalls:
    """Returns the dense calls of all documents, in an order that depends on nothing but the arguments."""
    calls = DenseCalls()
    for doc in documents:
        q, k, end = doc.q, doc.k + doc.offset, doc.k + doc.keys
        if doc.is_dense(block_size, top_k):
            calls.add_causal(q, k, doc.queries)
            calls.add_past(q, doc.k, doc.queries, doc.offset)
            continue
        inside = doc.offset % block_size
        if inside:  # the queries begin inside a block
            length = min(block_size - inside, doc.queries)
            calls.add_current_block(q, k, length)
            calls.add_past(q, k - inside, length, inside)
            q, k = q + length, k + length
        while k < end:
            length = min(block_size, end - k)
            calls.add_current_block(q, k, length)
            q, k = q + length, k + length
    return calls
