"""What the attention classes share: the group, the checks of a call, the local attention and the way back.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · M this rank's query heads · V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from ..comm.group import SequenceGroup
from ..layout.exchange import HeadsToTokens
from ..layout.heads import HeadPartition


class SequenceAttention(DistributedAttention):
    """DeepSpeed's `DistributedAttention` without its exchanges, for classes that bring their own."""

    #: How the group's ranks may divide a sequence.
    splits: tuple[str, ...] = ("contiguous",)

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
    ) -> None:
        sequence_group = SequenceGroup.of(group)
        if sequence_group.split not in self.splits:
            raise ValueError(
                f"split={sequence_group.split!r} is for the strategy 'gather_kv', whose queries stay: exchanged by heads, "
                "every rank has the same work already. Choose split='contiguous'."
            )
        super().__init__(local_attention, sequence_group.process_group)
        self.group = sequence_group

    def query_heads(self, heads: int) -> slice:
        """The query heads, out of `heads`, that this rank computes: for parameters that belong to heads."""
        partition = HeadPartition(heads, self.group.size)
        return slice(partition.start(self.group.rank), partition.stop(self.group.rank))

    def _check_call(self, batch_dim_idx: int, rotary_pos_emb: Any, **tensors: Tensor) -> None:
        if batch_dim_idx not in (0, 1):
            raise ValueError(f"batch_dim_idx is 0 for [B, T, H, .] or 1 for [T, B, H, .], got {batch_dim_idx!r}.")
        if rotary_pos_emb is not None:
            raise ValueError("rotary_pos_emb must be None: apply rope to queries and keys before the call.")
        dtypes = {name: x.dtype for name, x in tensors.items()}
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise ValueError(f"all tensors travel in one dtype, got {found}: cast them before the call.")

    def attend_locally(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The local attention, whose output has to have the rows and heads of q."""
        out = self.local_attn(q, k, v, *args, **kwargs)
        if out.ndim != 4 or out.shape[:3] != q.shape[:3]:
            raise ValueError(
                f"local_attention must return the rows and heads of its q, {(*q.shape[:3], v.shape[3])}; got "
                f"{tuple(out.shape)}."
            )
        return out

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, batch_dim_idx: int, args: tuple, kwargs: dict[str, Any]
    ) -> Tensor:
        """Local attention of the own heads, in the layout of the call, and its output's way back: contiguous."""
        out = self.attend_locally(q, k, v, *args, **kwargs)
        if self.group.size == 1:
            return out.contiguous()
        out_SBMV = by_token(out, batch_dim_idx)
        return by_token(HeadsToTokens.apply(out_SBMV, heads, self.group, batch_dim_idx == 0), batch_dim_idx)


def by_token(x: Tensor, batch_dim_idx: int) -> Tensor:
    """The layout of the call <-> tokens first, as the exchange takes it: a view."""
    return x.transpose(0, 1) if batch_dim_idx == 0 else x


def check_grouped(q: Tensor, k: Tensor, v: Tensor, batch_dim_idx: int) -> None:
    """Refuses shapes that are not those of queries with their grouped keys and values."""
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3]) or (
        v.shape[:3] != k.shape[:3]
    ):
        rows = "[B, T" if batch_dim_idx == 0 else "[T, B"
        raise ValueError(
            f"q must be {rows}, H, K], k {rows}, G, K] and v {rows}, G, V]; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
