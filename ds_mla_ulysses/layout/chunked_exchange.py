"""The differentiable exchange of `exchange` in head chunks: each rank computes one chunk of its heads after the other.

Every chunk has an all-to-all of its own, and the next chunk's is under way while a chunk is computed. The data of a chunk
is read from tensors with all heads, and the output is written into a tensor with all heads, without a copy in between.

In backward, the gradients of the output travel first, those of all chunks, so that the gradient with all heads is free
before a chunk is computed. Each chunk then frees its part, and its gradients of the inputs travel right after it. In the
end they are put together, one input after the other.

In the autograd graph, functions of all chunks and functions of one chunk are therefore connected by stand-ins: a stand-in
has the shape of the tensor whose gradient it gets, and its elements are one number that nobody reads.

Shape letters:
    P ranks                             H all heads of a block
    T tokens of this rank               M heads of this rank in one chunk, h those of all ranks
    S = P*T, tokens of the sequence     D width of a head
    B batch                             W = sum of M*D over the blocks, one token on the wire
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import wait
from ..comm.group import SequenceGroup
from .exchange import heads_to_tokens, start_tokens_to_heads, tokens_to_heads, write_chunk
from .heads import chunks_of_rank
from .wire import empty_blocks


class ChunkedExchange:
    """x_BTHD -> x_BSMD for one head chunk after the other, and outputs x_BSMD -> x_BTHD for all of them.

    All tensors are [B, T, ...] if batch_first, else [T, B, ...]. Call `take` and `put` for the first chunk, then for the
    second one, and so on, and `output` at the end. The exchange of the first chunk starts at once.

    Backward: one all-to-all for each chunk of the output, then the backward of one chunk after the other, each followed by
    one all-to-all of its gradients.

    Args:
        tensors: x_BTHD (or x_TBHD) of one dtype with the same T, B and H, any strides.
        group: a group of several ranks.
        count: the number of chunks.

    Attributes:
        heads: this rank's chunks, slices of all heads.

    Raises:
        ValueError: a rank has fewer heads than chunks.
    """

    def __init__(self, tensors: Sequence[Tensor], group: SequenceGroup, count: int, batch_first: bool) -> None:
        self._group, self._batch_first = group, batch_first
        self._blocks_TBHD = list(map(self._tokens_first, tensors))
        self._rows = self._blocks_TBHD[0].shape[:3]
        self.heads = chunks_of_rank(self._rows[2], group.size, count, group.rank)
        of_ranks = [chunks_of_rank(self._rows[2], group.size, count, rank) for rank in range(group.size)]
        sizes = [[chunk.stop - chunk.start for chunk in of_rank] for of_rank in of_ranks]
        # The stand-ins of each chunk: one for each tensor.
        self._stand_ins = list(zip(*(_Split.apply(x, sizes) for x in tensors), strict=True))
        self._pending = self._start(0)
        self._out: Tensor | None = None
        self._sent: list[Tensor] = []

    def _tokens_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self._batch_first else x

    def _start(self, chunk: int) -> Tensor | None:
        if chunk == len(self.heads):
            self._blocks_TBHD = []  # nothing is left to send
            return None
        return start_tokens_to_heads(self._blocks_TBHD, self._rows[2], self._group, chunk, len(self.heads))

    def take(self, chunk: int) -> list[Tensor]:
        """Starts the exchange of the next chunk, waits for this one, and returns x_BSMD of each tensor."""
        pending, self._pending = self._pending, self._start(chunk + 1)
        local = self.heads[chunk].stop - self.heads[chunk].start
        stand_ins_TBhD = map(self._tokens_first, self._stand_ins[chunk])
        arrived_SBMD = _Arrived.apply(pending, local, self._group, self._batch_first, *stand_ins_TBhD)
        return list(map(self._tokens_first, arrived_SBMD))

    def put(self, chunk: int, out: Tensor) -> None:
        """Returns the output of a chunk, x_BSMD, to the ranks of its tokens."""
        if self._out is None:
            T, B, H = self._rows
            self._out = empty_blocks(out, T, B, [H], [out.shape[3]], self._batch_first)[0]
        out_SBMD, to_TBHD = map(self._tokens_first, (out, self._out))
        write_chunk([out_SBMD.detach()], [to_TBHD.detach()], self._group, "forward", chunk, len(self.heads))
        self._sent.append(_Sent.apply(out_SBMD))

    def output(self) -> Tensor:
        """Returns the output of all chunks, x_BTHD; contiguous."""
        return _Returned.apply([self._out], self._group, self._batch_first, *self._sent)


def _stand_in(like: Tensor, *shape: int) -> Tensor:
    """Returns a tensor of that shape, whose elements are one number."""
    return like.new_zeros(()).expand(shape)


class _Split(torch.autograd.Function):
    """x_BTHD (or T before B) -> a stand-in for x_BThD of each chunk, the h heads that all ranks have in it.

    Backward: one tensor with the gradients of all chunks.

    Args:
        sizes: the number of heads of each chunk of each rank, sizes[rank][chunk].
    """

    @staticmethod
    def forward(ctx: Any, x_BTHD: Tensor, sizes: list[list[int]]) -> tuple[Tensor, ...]:
        ctx.sizes = sizes
        B, T, _, D = x_BTHD.shape
        return tuple([_stand_in(x_BTHD, B, T, sum(of_ranks), D) for of_ranks in zip(*sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads_BThD: Tensor) -> tuple[Tensor, None]:
        pieces = [x.split(of_ranks, 2) for x, of_ranks in zip(grads_BThD, zip(*ctx.sizes, strict=True), strict=True)]
        return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank], 2), None


class _Arrived(torch.autograd.Function):
    """A chunk that is under way and the stand-ins x_TBhD of its blocks -> x_SBMD of each block.

    Backward: one all-to-all.
    """

    @staticmethod
    def forward(
        ctx: Any, pending_SBW: Tensor, local: int, group: SequenceGroup, batch_first: bool, *stand_ins_TBhD: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.batch_first, ctx.heads = group, batch_first, [x.shape[2] for x in stand_ins_TBhD]
        widths = [x.shape[3] for x in stand_ins_TBhD]
        parts = wait(pending_SBW).split([local * width for width in widths], dim=-1)
        return tuple([x.unflatten(-1, (local, width)) for x, width in zip(parts, widths, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads_SBMD: Tensor) -> tuple[Tensor | None, ...]:
        # Of the h heads that all ranks have in the chunk, HeadPartition gives each rank those of its chunk.
        grads = heads_to_tokens(grads_SBMD, ctx.heads, ctx.heads[0], ctx.group, "backward", ctx.batch_first)
        return None, None, None, None, *grads


class _Sent(torch.autograd.Function):
    """The output x_SBMD of a chunk, which has been sent -> its stand-in. Backward: the gradient of the stand-in."""

    @staticmethod
    def forward(ctx: Any, x_SBMD: Tensor) -> Tensor:
        return _stand_in(x_SBMD, *x_SBMD.shape)

    @staticmethod
    def backward(ctx: Any, grad_SBMD: Tensor) -> Tensor:
        return grad_SBMD


class _Returned(torch.autograd.Function):
    """The output of all chunks and the stand-ins of each chunk's x_SBMD -> the output, as a function of the stand-ins.

    Backward: one all-to-all for each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, out: list[Tensor], group: SequenceGroup, batch_first: bool, *stand_ins_SBMD: Tensor
    ) -> Tensor:
        ctx.group, ctx.batch_first = group, batch_first
        ctx.chunk_heads = [x.shape[2] for x in stand_ins_SBMD]
        return out.pop()  # in a list, because the output must not be a tensor that was given

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_TBHD, chunks = grad.transpose(0, 1) if ctx.batch_first else grad, len(ctx.chunk_heads)
        found_SBW = [
            tokens_to_heads([grad_TBHD], grad_TBHD.shape[2], ctx.group, "backward", c, chunks) for c in range(chunks)
        ]
        grads = [x.unflatten(-1, (m, -1)) for x, m in zip(found_SBW, ctx.chunk_heads, strict=True)]
        return None, None, None, *grads
