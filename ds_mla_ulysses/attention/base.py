"""The base of the attention classes: the group, the checks of a call, the local attention and the way back.

Shape letters:
    B batch                             M query heads of this rank
    T tokens of this rank               K query and key width
    S tokens of the whole sequence      V value width
    H all query heads                   G all KV heads
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor

from ..comm.group import SequenceGroup
from ..comm.kept import attend_once
from ..errors import UlyssesValueError
from ..layout.exchange import HeadsToTokens
from ..layout.heads import local_query_heads
from ..planner.strategies import names_with_split, one_of
from .chunks import check_count


class SequenceAttention(DistributedAttention):
    """DeepSpeed's `DistributedAttention` without its exchanges, for subclasses that have exchanges of their own.

    Subclasses keep the signature of DeepSpeed's `forward` with its `batch_dim_idx` and `rotary_pos_emb`. They translate
    both at once with `_check_call`; everything inside takes `batch_first`.

    Args:
        local_attention: computes attention on this rank; each subclass documents what it receives.
        group: the sequence-parallel group: a SequenceGroup, a torch ProcessGroup, or None for a single rank.
        head_chunks: the number of chunks of local query heads that attend one after the other.

    Raises:
        ValueError: the group's split is not one of the class's `splits`, or head_chunks is not an int >= 1.
    """

    #: The splits of a sequence that the class supports.
    splits: tuple[str, ...] = ("contiguous",)

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        group: SequenceGroup | torch.distributed.ProcessGroup | None,
        head_chunks: int = 1,
    ) -> None:
        check_count(head_chunks)
        sequence_group = SequenceGroup.of(group)
        if sequence_group.split not in self.splits:
            raise UlyssesValueError(
                f"split={sequence_group.split!r} is for the strategy {one_of(names_with_split(sequence_group.split))}, whose "
                "queries stay on their rank. This class exchanges heads, so every rank already has the same work. Choose "
                "split='contiguous'."
            )
        super().__init__(local_attention, sequence_group.process_group)
        self.group, self.head_chunks = sequence_group, head_chunks

    def query_heads(self, heads: int) -> slice:
        """Returns the query heads, out of `heads`, that this rank attends with. Use it to slice per-head parameters.

        Raises:
            ValueError: the class exchanges heads and there are fewer heads than ranks.
        """
        return local_query_heads(heads, self.group.size, self.group.rank)

    def _check_call(self, batch_dim_idx: int, rotary_pos_emb: Any, **tensors: Tensor) -> bool:
        """Checks the arguments that DeepSpeed's signature adds, and that all tensors have one dtype.

        Returns:
            batch_first: whether the call's tensors are [B, T, ...] rather than [T, B, ...].
        """
        if batch_dim_idx not in (0, 1):
            raise UlyssesValueError(
                f"batch_dim_idx is 0 for [B, T, H, .] or 1 for [T, B, H, .], got {batch_dim_idx!r}."
            )
        if rotary_pos_emb is not None:
            raise UlyssesValueError("rotary_pos_emb must be None: apply RoPE to queries and keys before the call.")
        dtypes = {name: x.dtype for name, x in tensors.items()}
        if len(set(dtypes.values())) > 1:
            found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise UlyssesValueError(f"all tensors must have one dtype, got {found}: cast them before the call.")
        return batch_dim_idx == 0

    def attend_locally(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Calls the local attention and checks that its output has the rows and heads of q."""
        if getattr(self.local_attn, "keeps_itself", False):
            out = self.local_attn(q, k, v, *args, **kwargs)
        else:
            out = attend_once(self.local_attn, q, k, v, *args, **kwargs)
        if out.ndim != 4 or out.shape[:3] != q.shape[:3]:
            raise UlyssesValueError(
                f"local_attention must return the rows and heads of its q, {(*q.shape[:3], v.shape[3])}; got "
                f"{tuple(out.shape)}."
            )
        return out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        batch_first: bool,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Attends with the local heads and returns the output to the ranks of its tokens.

        Args:
            q, k, v: q_BSMK and its keys and values if batch_first, else S before B.
            heads: H.

        Returns:
            out_BTHV if batch_first, else out_TBHV; contiguous.
        """
        out = self.attend_locally(q, k, v, *args, **kwargs)
        if self.group.size == 1:
            return out.contiguous()
        out_SBMV = tokens_first(out, batch_first)
        return tokens_first(HeadsToTokens.apply(out_SBMV, heads, self.group, batch_first), batch_first)


def tokens_first(x: Tensor, batch_first: bool) -> Tensor:
    """Converts between the call's layout and [T, B, ...], the layout of the exchanges. It is its own inverse; a view."""
    return x.transpose(0, 1) if batch_first else x


def rows_of(per_head: Mapping[str, Tensor] | None, heads: slice) -> dict[str, Tensor]:
    """Returns the rows of some heads of each tensor in `per_head`, as keyword arguments of the local attention."""
    return {name: x[heads] for name, x in (per_head or {}).items()}


def check_grouped(q: Tensor, k: Tensor, v: Tensor, batch_first: bool) -> None:
    """Raises ValueError unless the shapes are q_BTHK, k_BTGK and v_BTGV (or T before B)."""
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape[:2] == q.shape[:2] and k.shape[3] == q.shape[3]) or (
        v.shape[:3] != k.shape[:3]
    ):
        rows = "[B, T" if batch_first else "[T, B"
        raise UlyssesValueError(
            f"q must be {rows}, H, K], k {rows}, G, K] and v {rows}, G, V]; got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}."
        )
