"""The expansion of MLA's latents and shared RoPE key into keys and values of some heads.

Shape letters:
    B batch                             N key width without position
    T tokens of this rank               R width of the shared RoPE key
    S tokens of the whole sequence      K = N + R, query and key width
    H all query heads                   V value width
    M some of the heads                 P = N + V, packed key and value of one head
                                        L latent width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from ..errors import UlyssesValueError
from ..layout.shared_key import join_shared_key
from .base import tokens_first
from .chunks import LocalChunks, attend_in_chunks, for_chunks

#: `expand(latent_BSL, heads) -> kv_BSMP` computes keys and values of a slice of the heads (S before B if the call has it so).
Expand = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class Latents:
    """The widths of an MLA layer and the operations on its latents. All tensors of a call have one dtype.

    Attributes:
        nope_dim, rope_dim, value_dim: N, R and V.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int

    def check(self, q: Tensor, latent: Tensor, k_shared: Tensor, batch_first: bool) -> None:
        """Raises ValueError unless the shapes are q_BTHK, latent_BTL and k_BTR (or T before B)."""
        K, rows = self.nope_dim + self.rope_dim, "[B, T" if batch_first else "[T, B"
        if q.ndim != 4 or q.shape[-1] != K or latent.ndim != 3 or latent.shape[:2] != q.shape[:2]:
            raise UlyssesValueError(
                f"with expand, q must be {rows}, H, {K}] and the latent {rows}, L]; got q {tuple(q.shape)}, latent "
                f"{tuple(latent.shape)}."
            )
        self.check_shared(q, k_shared, batch_first)

    def check_packed(self, q: Tensor, kv: Tensor, k_shared: Tensor, batch_first: bool) -> None:
        """Raises ValueError unless the shapes are q_BTHK, kv_BTHP and k_BTR (or T before B)."""
        N, R, V, rows = self.nope_dim, self.rope_dim, self.value_dim, "[B, T" if batch_first else "[T, B"
        for name, x, width in ("q", q, N + R), ("kv", kv, N + V):
            if x.ndim != 4 or x.shape[-1] != width or x.shape[:3] != q.shape[:3]:
                raise UlyssesValueError(
                    f"{name} must be {rows}, H, {width}] with the rows and heads of q (nope {N}, rope {R}, value {V}); "
                    f"got {name} {tuple(x.shape)}, q {tuple(q.shape)}."
                )
        self.check_shared(q, k_shared, batch_first)

    def check_shared(self, q: Tensor, k_shared: Tensor, batch_first: bool) -> None:
        """Raises ValueError unless the shared RoPE key is k_BTR (or k_TBR) with the rows of q."""
        wanted, rows = (*q.shape[:2], self.rope_dim), "[B, T" if batch_first else "[T, B"
        if k_shared.shape != wanted:
            raise UlyssesValueError(
                f"k_shared must be {rows}, {self.rope_dim}], {wanted}; got {tuple(k_shared.shape)}."
            )

    def expand(
        self, latent: Tensor, k_shared: Tensor, batch_first: bool, heads: slice, expand: Expand
    ) -> tuple[Tensor, Tensor]:
        """Computes keys and values of the given heads.

        Args:
            latent, k_shared: latent_BSL and k_BSR if batch_first, else S before B.

        Returns:
            k_BSMK, written once and contiguous, and v_BSMV, a view of the result of `expand`; or S before B.

        Raises:
            ValueError: `expand` returns another shape or dtype.
        """
        kv = expand(latent, heads)
        wanted = (*latent.shape[:2], heads.stop - heads.start, self.nope_dim + self.value_dim)
        if kv.shape != wanted or kv.dtype != k_shared.dtype:
            raise UlyssesValueError(
                f"expand must return kv {wanted} in {k_shared.dtype}, got {tuple(kv.shape)} in {kv.dtype}."
            )
        kv_SBMP, shared_SBR = tokens_first(kv, batch_first), tokens_first(k_shared, batch_first)
        key, v_SBMV = _KeyAndValue.apply(kv_SBMP, shared_SBR, self.nope_dim, batch_first)
        return key, tokens_first(v_SBMV, batch_first)

    def attend_in_chunks(
        self,
        q: Tensor,
        latent: Tensor,
        k_shared: Tensor,
        batch_first: bool,
        heads: Sequence[slice],
        expand: Expand,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Calls `attend(q, k, v)` on one head chunk after the other.

        If there are several chunks, each one's keys and values are freed after it and recomputed in backward.

        Args:
            q: the queries of all chunks; its first head is heads[0].start.
            latent, k_shared: as for `expand`.
            heads: consecutive head chunks.
        """
        if len(heads) == 1:
            return attend(q, *self.expand(latent, k_shared, batch_first, heads[0], expand))

        def of_chunk(of: slice, q: Tensor, latent: Tensor, k_shared: Tensor) -> Tensor:
            return attend(q, *self.expand(latent, k_shared, batch_first, of, expand))

        shared = zip(*(for_chunks(len(heads), x) for x in (latent, k_shared)), strict=True)
        return attend_in_chunks(LocalChunks([q], heads), shared, of_chunk)


class _KeyAndValue(torch.autograd.Function):
    """kv_SBMP and the shared RoPE key_SBR -> K of these heads, in the call's layout, and v_SBMV, a view.

    Backward: kv's gradient is written once, in the call's layout. (Slices of kv would each get a gradient of full width,
    and autograd would add them up.) The heads' gradients of the shared key are summed in fp32 (or wider) and rounded
    once.
    """

    @staticmethod
    def forward(
        ctx: Any, kv_SBMP: Tensor, shared_SBR: Tensor, nope_dim: int, batch_first: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.batch_first, ctx.nope_dim = batch_first, nope_dim
        k_nope_SBMN, v_SBMV = kv_SBMP.split([nope_dim, kv_SBMP.shape[-1] - nope_dim], dim=-1)
        return join_shared_key(k_nope_SBMN, shared_SBR, batch_first), v_SBMV

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv_SBMV: Tensor) -> tuple[Tensor, Tensor, None, None]:
        N = ctx.nope_dim
        dk_SBMK = dk.transpose(0, 1) if ctx.batch_first else dk
        (S, B, M, _), V = dk_SBMK.shape, dv_SBMV.shape[-1]
        dkv = dk.new_empty(*((B, S) if ctx.batch_first else (S, B)), M, N + V)
        dkv_SBMP = dkv.transpose(0, 1) if ctx.batch_first else dkv
        dkv_SBMP[..., :N].copy_(dk_SBMK[..., :N])
        dkv_SBMP[..., N:].copy_(dv_SBMV)
        dshared_SBR = dk_SBMK[..., N:].sum(2, dtype=accumulation_dtype(dk.dtype)).to(dk.dtype)
        return dkv_SBMP, dshared_SBR, None, None
