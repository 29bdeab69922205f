"""The differentiable exchange of `exchange` in head chunks: each rank computes one chunk of its heads after the other.

Every chunk has an all-to-all of its own, and the next chunk's is under way while a chunk is computed. The data of a chunk
is read from tensors with all heads and written into tensors with all heads, without a copy in between.

In backward, the gradients of the output travel first, those of all chunks, so that the gradient with all heads is free
before a chunk is computed. Each chunk then frees its part. The gradients of the inputs travel last. The results of one
chunk's exchange can therefore not be outputs of the function that has the gradients of all chunks. Stand-ins connect them
in the autograd graph: a stand-in has the shape of the tensor, and its elements are one number that nobody reads.

Shape letters:
    P ranks                             H all heads of a block
    T tokens of this rank               M heads of this rank in one chunk
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
from .exchange import start_tokens_to_heads, tokens_to_heads, write_chunk
from .heads import chunks_of_rank
from .wire import empty_blocks


class ChunkedExchange:
    """x_BTHD -> x_BSMD for one head chunk after the other, and outputs x_BSMD -> x_BTHD for all of them.

    All tensors are [B, T, ...] if batch_first, else [T, B, ...]. Call `take` and `put` for the first chunk, then for the
    second one, and so on, and `output` at the end. The exchange of the first chunk starts at once.

    Backward: one all-to-all for each chunk of the output, then the backward of the chunks, then one all-to-all for each
    chunk of the tensors.

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
        self._blocks_TBHD = [x.transpose(0, 1) if batch_first else x for x in tensors]
        self._group, self._batch_first = group, batch_first
        self._rows = self._blocks_TBHD[0].shape[:3]
        self.heads = chunks_of_rank(self._rows[2], group.size, count, group.rank)
        stand_ins = _Chunks.apply(group, self.heads, batch_first, *self._blocks_TBHD)
        n = len(tensors)
        self._stand_ins = [stand_ins[c * n : (c + 1) * n] for c in range(count)]
        self._pending = self._start(0)
        self._out: Tensor | None = None
        self._sent: list[Tensor] = []

    def _start(self, chunk: int) -> Tensor | None:
        if chunk == len(self.heads):
            self._blocks_TBHD = []  # nothing is left to send
            return None
        return start_tokens_to_heads(self._blocks_TBHD, self._rows[2], self._group, chunk, len(self.heads))

    def take(self, chunk: int) -> list[Tensor]:
        """Starts the exchange of the next chunk, waits for this one, and returns x_BSMD of each tensor."""
        pending, self._pending = self._pending, self._start(chunk + 1)
        arrived_SBMD = _Arrived.apply(pending, *self._stand_ins[chunk])
        return [x.transpose(0, 1) if self._batch_first else x for x in arrived_SBMD]

    def put(self, chunk: int, out: Tensor) -> None:
        """Returns the output of a chunk, x_BSMD, to the ranks of its tokens."""
        if self._out is None:
            T, B, H = self._rows
            self._out = empty_blocks(out, T, B, [H], [out.shape[3]], self._batch_first)[0]
        out_SBMD, to_TBHD = (x.transpose(0, 1) if self._batch_first else x for x in (out, self._out))
        write_chunk([out_SBMD.detach()], [to_TBHD.detach()], self._group, "forward", chunk, len(self.heads))
        self._sent.append(_Sent.apply(out_SBMD))

    def output(self) -> Tensor:
        """Returns the output of all chunks, x_BTHD; contiguous."""
        return _Returned.apply([self._out], self._group, self._batch_first, *self._sent)


def _stand_in(like: Tensor, *shape: int) -> Tensor:
    """Returns a tensor of that shape, whose elements are one number."""
    return like.new_zeros(()).expand(shape)


class _Chunks(torch.autograd.Function):
    """Blocks x_TBHD -> a stand-in for x_SBMD of each chunk and block, chunk after chunk.

    Backward: one all-to-all for each chunk.
    """

    @staticmethod
    def forward(
        ctx: Any, group: SequenceGroup, heads: Sequence[slice], batch_first: bool, *blocks_TBHD: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.chunks, ctx.batch_first = group, len(heads), batch_first
        ctx.heads = blocks_TBHD[0].shape[2]
        T, B = blocks_TBHD[0].shape[:2]
        shapes = [(T * group.size, B, of.stop - of.start) for of in heads]
        return tuple([_stand_in(x, *shape, x.shape[3]) for shape in shapes for x in blocks_TBHD])

    @staticmethod
    def backward(ctx: Any, *grads_SBMD: Tensor) -> tuple[Any, ...]:
        n = len(grads_SBMD) // ctx.chunks
        (S, B), widths = grads_SBMD[0].shape[:2], [x.shape[3] for x in grads_SBMD[:n]]
        out = empty_blocks(grads_SBMD[0], S // ctx.group.size, B, [ctx.heads] * n, widths, ctx.batch_first)
        out_TBHD = [x.transpose(0, 1) for x in out] if ctx.batch_first else out
        for c in range(ctx.chunks):
            write_chunk(grads_SBMD[c * n : (c + 1) * n], out_TBHD, ctx.group, "backward", c, ctx.chunks)
        return None, None, None, *out_TBHD


class _Arrived(torch.autograd.Function):
    """A chunk that is under way -> its x_SBMD of each block. Backward: the gradients, for the stand-ins."""

    @staticmethod
    def forward(ctx: Any, pending_SBW: Tensor, *stand_ins_SBMD: Tensor) -> tuple[Tensor, ...]:
        shapes = [x.shape[2:] for x in stand_ins_SBMD]
        parts = wait(pending_SBW).split([shape.numel() for shape in shapes], dim=-1)
        return tuple([x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads_SBMD: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads_SBMD


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
