"""The local attention: the Hugging Face function that the user chose, on whole sequences of the own heads.

Letters: B batch · S all tokens · M own query heads · G own key-value heads · K key width · V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layout.documents import Documents

#: Arguments of attention functions that change the result and that this exchange does not carry.
_REFUSED = ("position_bias", "head_mask", "indices", "block_indices")
#: Queries that share one mask where a window has to be masked: the mask is this by window + this.
_WINDOW_BLOCK = 256


class LocalKernel:
    """Calls one Hugging Face attention function with documents and window in the form that it takes.

    sdpa: one causal call per document, so that no S x S mask ever exists; with a window, one call per
    block of queries. flash: cu_seqlens. flex: a block mask. eager: an explicit mask, quadratic in S.

    Args:
        module: the attention module; only looked at.
        config: the config that names the implementation (the module's own may name another).
        function: the attention function of that implementation.
    """

    def __init__(self, module: nn.Module, config: Any, function: Callable[..., tuple[Tensor, Any]]) -> None:
        self.module, self.config, self.function = module, config, function
        name = config._attn_implementation
        forms = {"sdpa": self._per_document, "eager": self._eager, "flex_attention": self._flex}
        self._attend = self._varlen if "flash" in (name or "") else forms.get(name)
        if self._attend is None:
            raise ValueError(
                f"attn_implementation={name!r} is not supported: load the model with 'sdpa', 'flash_attention_2', "
                "'flash_attention_3', 'flash_attention_4', 'flex_attention' or 'eager'."
            )

    def settings(
        self,
        documents: Documents,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `__call__` needs of a call's keyword arguments, the documents among it.

        Raises:
            ValueError: for those that would be dropped in silence. Before any collective.
        """
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
        if kwargs.get("s_aux") is not None and self.config._attn_implementation == "sdpa":
            raise ValueError(
                "attention sinks (s_aux) would be lost in sdpa: load the model with attn_implementation='eager', or name "
                "'eager' in MoBAConfig.dense."
            )
        passed_on = {name: kwargs[name] for name in ("softcap", "s_aux") if kwargs.get(name) is not None}
        return {"documents": documents, "scaling": scaling, "window": sliding_window, **passed_on}

    # Documents are Python numbers: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        documents: Documents,
        scaling: float | None,
        window: int | None = None,
        **settings: Any,
    ) -> Tensor:
        """q_BSMK, k_BSGK, v_BSGV -> out_BSMV.

        Args:
            window: how many tokens back a token sees, itself included.
            **settings: further arguments of the function; `s_aux` (attention sinks) of the own heads.
        """
        # The function may look at the module: for how often keys repeat here, and for sinks.
        own = {"num_key_value_groups": q.shape[2] // k.shape[2]}
        if settings.get("s_aux") is not None:
            own["sinks"] = settings["s_aux"]
        call = partial(
            self._call, _StandIn(self.module, config=self.config, **own), dropout=0.0, scaling=scaling, **settings
        )
        return self._attend(call, *(x.transpose(1, 2) for x in (q, k, v)), documents, window)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """The unpatched call, [B, H, S, .] as Hugging Face hands them."""
        return self.function(_StandIn(self.module, config=self.config), q, k, v, attention_mask, **kwargs)

    def _call(self, module: _StandIn, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        return self.function(module, q, k, v, mask, **kwargs)[0]

    def _per_document(self, call, q, k, v, documents: Documents, window):
        if documents.one_per_row:
            return _causal(call, q, k, v, window)
        rows: dict[int | None, list[Tensor]] = {}
        for row, start, end in documents.segments:
            part = (x[slice(None) if row is None else slice(row, row + 1), :, start:end] for x in (q, k, v))
            rows.setdefault(row, []).append(_causal(call, *part, window))
        return without_padding(torch.cat([torch.cat(parts, dim=1) for parts in rows.values()]), documents)

    def _eager(self, call, q, k, v, documents: Documents, window):
        allowed = documents.allowed_B1SS
        if window is not None:
            allowed = allowed & _in_window(0, documents.length, 0, documents.length, window, q.device)
        mask = torch.zeros_like(allowed, dtype=q.dtype)
        # Eager functions take the softmax in fp32, where the lowest fp64 number is -inf and an empty row NaN.
        lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
        mask.masked_fill_(~allowed, lowest)
        return call(q, k, v, mask)

    def _varlen(self, call, q, k, v, documents: Documents, window):
        call = partial(call, q, k, v, None, is_causal=True, sliding_window=window)
        if documents.one_per_row:
            return call()
        lengths = {"cu_seq_lens_q": documents.cu_seqlens, "cu_seq_lens_k": documents.cu_seqlens}
        longest = {"max_length_q": documents.longest, "max_length_k": documents.longest}
        return without_padding(call(**lengths, **longest), documents)

    def _flex(self, call, q, k, v, documents: Documents, window):
        from torch.nn.attention.flex_attention import create_block_mask

        if ("flex", window) not in documents.kernel_cache:
            ids_BS = documents.ids_BS

            def seen(b, h, i, j):
                same_document = (i >= j) & (ids_BS[b, i] == ids_BS[b, j]) & (ids_BS[b, j] > 0)
                return same_document if window is None else same_document & (i - j < window)

            documents.kernel_cache["flex", window] = create_block_mask(
                seen, documents.batch, None, documents.length, documents.length, device=q.device
            )
        return call(q, k, v, documents.kernel_cache["flex", window])


def _causal(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """One document [B, H, n, .], causal, without a mask that is quadratic in n."""
    n = q.shape[2]
    if window is None or n <= window:
        return call(q, k, v, None, is_causal=True)
    parts = []
    for start in range(0, n, _WINDOW_BLOCK):
        stop, first = min(n, start + _WINDOW_BLOCK), max(0, start - window + 1)
        mask = _in_window(start, stop, first, stop, window, q.device)
        keys = slice(first, stop)
        parts.append(call(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], mask[None, None], is_causal=False))
    return torch.cat(parts, dim=1)


def _in_window(start: int, stop: int, first: int, last: int, window: int, device: torch.device) -> Tensor:
    """bool [stop-start, last-first]: which keys from `first` on the queries from `start` on may see."""
    distance = torch.arange(start, stop, device=device).unsqueeze(1) - torch.arange(first, last, device=device)
    return (distance >= 0) & (distance < window)


def without_padding(out_BTMV: Tensor, documents: Documents, first: int = 0) -> Tensor:
    """Zeros on padding, as sdpa and flash attention give to a row without keys; token `first` is the first of T."""
    if documents.padding_BS is None:
        return out_BTMV
    padding_BT = documents.padding_BS[:, first : first + out_BTMV.shape[1]]
    return out_BTMV.masked_fill(padding_BT.unflatten(1, (-1, 1, 1)), 0)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Rope in fp32 has widened some of them; under autocast kernels take them narrow."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


class _StandIn:
    """The attention module as an attention function sees it, with some attributes of its own."""

    def __init__(self, module: nn.Module, **own: Any) -> None:
        vars(self).update(own, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
