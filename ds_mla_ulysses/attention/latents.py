"""From MLA's latents and shared rope key to keys and values of some heads.

Letters: B batch · T this rank's tokens · S all tokens (T * ranks) · H all heads · M some of them · N non-positional
key width · R shared rope key width · K = N+R · V value width · P = N+V · L latent width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.collectives import accumulation_dtype
from ..layout.exchange import join_shared_key
from .base import by_token
from .chunks import ForChunks, recomputed

#: `expand(latent_BSL, heads) -> kv_BSMP` (or S before B, as the call has it): keys and values of those heads.
Expand = Callable[[Tensor, slice], Tensor]


@dataclass(frozen=True)
class Latents:
    """The widths of an MLA layer, and what is done with its latents. All tensors have one dtype.

    Attributes:
        nope_dim, rope_dim, value_dim: N, R and V.
    """

    nope_dim: int
    rope_dim: int
    value_dim: int

    def check(self, q: Tensor, latent: Tensor, k_shared: Tensor, batch_dim_idx: int) -> None:
        """Refuses shapes other than q_BTHK, latent_BTL, k_BTR (or T before B)."""
        K, rows = self.nope_dim + self.rope_dim, "[B, T" if batch_dim_idx == 0 else "[T, B"
        if q.ndim != 4 or q.shape[-1] != K or latent.ndim != 3 or latent.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"with expand, q must be {rows}, H, {K}] and the latent {rows}, L]; got q {tuple(q.shape)}, latent "
                f"{tuple(latent.shape)}."
            )
        self.check_shared(q, k_shared, batch_dim_idx)

    def check_shared(self, q: Tensor, k_shared: Tensor, batch_dim_idx: int) -> None:
        """Refuses a shared key that is not k_BTR (or k_TBR) with the rows of q."""
        wanted, rows = (*q.shape[:2], self.rope_dim), "[B, T" if batch_dim_idx == 0 else "[T, B"
        if k_shared.shape != wanted:
            raise ValueError(f"k_shared must be {rows}, {self.rope_dim}], {wanted}; got {tuple(k_shared.shape)}.")

    def expand(
        self, latent: Tensor, k_shared: Tensor, batch_dim_idx: int, heads: slice, expand: Expand
    ) -> tuple[Tensor, Tensor]:
        """k_BSMK, written once, and v_BSMV of those heads, or S before B."""
        kv = expand(latent, heads)
        wanted = (*latent.shape[:2], heads.stop - heads.start, self.nope_dim + self.value_dim)
        if kv.shape != wanted or kv.dtype != k_shared.dtype:
            raise ValueError(
                f"expand must return kv {wanted} in {k_shared.dtype}, got {tuple(kv.shape)} in {kv.dtype}."
            )
        rows = by_token(kv, batch_dim_idx), by_token(k_shared, batch_dim_idx)
        key, v_SBMV = _KeyAndValue.apply(*rows, self.nope_dim, batch_dim_idx == 0)
        return key, by_token(v_SBMV, batch_dim_idx)

    def attend_in_chunks(
        self,
        q: Tensor,
        latent: Tensor,
        k_shared: Tensor,
        batch_dim_idx: int,
        heads: Sequence[slice],
        expand: Expand,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """`attend(q, k, v)` of consecutive heads of q, part after part, whose keys and values are made for it and again
        in backward.

        Args:
            q: of the heads from heads[0].start on.
        """
        if len(heads) == 1:
            return attend(q, *self.expand(latent, k_shared, batch_dim_idx, heads[0], expand))

        def part(of: slice) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            return lambda q, latent, k_shared: attend(q, *self.expand(latent, k_shared, batch_dim_idx, of, expand))

        latents, keys = ForChunks.apply(len(heads), latent), ForChunks.apply(len(heads), k_shared)
        queries = q.split([of.stop - of.start for of in heads], dim=2)
        outs = [recomputed(part(of), *given) for of, *given in zip(heads, queries, latents, keys, strict=True)]
        return torch.cat(outs, dim=2)


class _KeyAndValue(torch.autograd.Function):
    """kv_SBMP and the shared key_SBR, which all have -> K of these heads, in the layout of the call, and v_SBMV, a view.

    Backward: kv's gradient is written once, in the layout of the call (slices of kv would each have one of full width,
    to be added up); the heads' gradient of the shared key is summed in fp32 (or wider) and rounded once.
    """

    @staticmethod
    def forward(ctx, kv_SBMP: Tensor, shared_SBR: Tensor, nope_dim: int, batch_first: bool) -> tuple[Tensor, Tensor]:
        ctx.batch_first, ctx.nope_dim = batch_first, nope_dim
        k_nope_SBMN, v_SBMV = kv_SBMP.split([nope_dim, kv_SBMP.shape[-1] - nope_dim], dim=-1)
        return join_shared_key(k_nope_SBMN, shared_SBR, batch_first), v_SBMV

    @staticmethod
    def backward(ctx, dk: Tensor, dv_SBMV: Tensor):
        N = ctx.nope_dim
        dk_SBMK = dk.transpose(0, 1) if ctx.batch_first else dk
        (S, B, M, _), V = dk_SBMK.shape, dv_SBMV.shape[-1]
        dkv = dk.new_empty(*((B, S) if ctx.batch_first else (S, B)), M, N + V)
        dkv_SBMP = dkv.transpose(0, 1) if ctx.batch_first else dkv
        dkv_SBMP[..., :N].copy_(dk_SBMK[..., :N])
        dkv_SBMP[..., N:].copy_(dv_SBMV)
        dshared_SBR = dk_SBMK[..., N:].sum(2, dtype=accumulation_dtype(dk.dtype)).to(dk.dtype)
        return dkv_SBMP, dshared_SBR, None, None
