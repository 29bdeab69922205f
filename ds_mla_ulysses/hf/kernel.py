"""The local attention: the Hugging Face function that the user chose, on whole sequences of the own heads.

Letters: B batch · S all tokens · M own heads · K key width · V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.documents import Documents

#: Arguments of attention functions that change the result and that this exchange does not carry.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")


class LocalKernel:
    """Calls one Hugging Face attention function with documents in the form that it takes.

    sdpa: one causal call per document, so that no S x S mask ever exists. flash: cu_seqlens. flex: a
    block mask. eager: an explicit mask, quadratic in S.

    Args:
        module: the attention module; only looked at.
        config: the config that names the implementation (the module's own may name another).
        function: the attention function of that implementation.
    """

    def __init__(self, module: nn.Module, config: Any, function: Callable[..., tuple[Tensor, Any]]) -> None:
        self.module, self.function = _StandIn(module, config), function
        name = config._attn_implementation
        forms = {"sdpa": self._per_document, "eager": self._eager, "flex_attention": self._flex}
        self._attend = self._varlen if "flash" in name else forms.get(name)
        if self._attend is None:
            raise ValueError(
                f"attn_implementation={name!r} is not supported: load the model with 'sdpa', 'flash_attention_2', "
                "'flash_attention_3', 'flash_attention_4', 'flex_attention' or 'eager'."
            )

    def check(self, dropout: float = 0.0, is_causal: bool | None = None, **kwargs: Any) -> None:
        """Raises ValueError for arguments that would be dropped in silence. Before any collective."""
        if dropout:
            raise ValueError(
                f"attention dropout ({dropout}) would differ from one process, since every rank draws its own numbers: "
                "set config.attention_dropout = 0.0."
            )
        if is_causal is False:
            raise ValueError("attention that is not causal is not supported under sequence parallelism.")
        for name in _REFUSED:
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is not supported under sequence parallelism: load the model without it.")

    # Documents are Python numbers: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, documents: Documents, scaling: float | None) -> Tensor:
        """q_BSMK, k_BSMK, v_BSMV -> out_BSMV."""
        return self._attend(*(x.transpose(1, 2) for x in (q, k, v)), documents, scaling)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """The unpatched call, [B, H, S, .] as Hugging Face hands them."""
        return self.function(self.module, q, k, v, attention_mask, **kwargs)

    def _call(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None, **kwargs: Any) -> Tensor:
        return self.plain(q, k, v, mask, dropout=0.0, scaling=scaling, **kwargs)[0]

    def _per_document(self, q, k, v, documents: Documents, scaling):
        if documents.one_per_row:
            return self._call(q, k, v, None, scaling, is_causal=True)
        rows: dict[int | None, list[Tensor]] = {}
        for row, start, end in documents.segments:
            part = (x[slice(None) if row is None else slice(row, row + 1), :, start:end] for x in (q, k, v))
            rows.setdefault(row, []).append(self._call(*part, None, scaling, is_causal=True))
        return _without_padding(torch.cat([torch.cat(parts, dim=1) for parts in rows.values()]), documents)

    def _eager(self, q, k, v, documents: Documents, scaling):
        mask = torch.zeros_like(documents.allowed_B1SS, dtype=q.dtype)
        # Eager functions take the softmax in fp32, where the lowest fp64 number is -inf and an empty row NaN.
        lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
        mask.masked_fill_(~documents.allowed_B1SS, lowest)
        return self._call(q, k, v, mask, scaling)

    def _varlen(self, q, k, v, documents: Documents, scaling):
        if documents.one_per_row:
            return self._call(q, k, v, None, scaling, is_causal=True)
        lengths = {"cu_seq_lens_q": documents.cu_seqlens, "cu_seq_lens_k": documents.cu_seqlens}
        longest = {"max_length_q": documents.longest, "max_length_k": documents.longest}
        return _without_padding(self._call(q, k, v, None, scaling, is_causal=True, **lengths, **longest), documents)

    def _flex(self, q, k, v, documents: Documents, scaling):
        from torch.nn.attention.flex_attention import create_block_mask

        if "flex" not in documents.kernel_cache:
            ids_BS = documents.ids_BS

            def same_document(b, h, i, j):
                return (i >= j) & (ids_BS[b, i] == ids_BS[b, j]) & (ids_BS[b, j] > 0)

            documents.kernel_cache["flex"] = create_block_mask(
                same_document, documents.batch, None, documents.length, documents.length, device=q.device
            )
        return self._call(q, k, v, documents.kernel_cache["flex"], scaling)


def _without_padding(out_BSMV: Tensor, documents: Documents) -> Tensor:
    """Zeros on padding, as sdpa and flash attention give to a row without keys."""
    if documents.padding_BS is None:
        return out_BSMV
    return out_BSMV.masked_fill(documents.padding_BS.unflatten(1, (-1, 1, 1)), 0)


class _StandIn:
    """The attention module as an attention function sees it, with the config that names its own kernel."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self._module, self.config = module, config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
