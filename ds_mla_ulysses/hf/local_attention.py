"""The local attention: the Hugging Face function that the user chose, over whole sequences.

Letters: B batch · T queries here · S all tokens · M query heads here · G key-value heads here · K key width · V value
width.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ..layout.documents import Documents
from ..moba import moba_attention
from ..moba.boundaries import seen_by_queries
from ..moba.dense_attention import has_flash

#: Arguments of attention functions that change the result and that this exchange does not carry.
_REFUSED = ("position_bias", "head_mask", "indices", "block_indices")
#: Queries that share one mask where a window has to be masked: the mask is this by window + this.
_WINDOW_BLOCK = 256


class LocalAttention:
    """Calls one Hugging Face attention function with documents and window in the form that it takes.

    sdpa: one causal call per document, so that no S x S mask ever exists; with a window, one call per
    block of queries. flash: cu_seqlens. flex: a block mask. eager: an explicit mask, quadratic in S.

    Queries may be a run of the sequence, [first_query, first_query + T), with all of its keys. Then a causal call is
    aligned at its last query and its last key; sdpa has it as `causal_lower_right`, which on a CPU would make a mask
    of all scores: there, what the queries see before themselves and among themselves is computed apart and merged.

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
        return {"documents": documents, "scale": scaling, "window": sliding_window, **passed_on}

    # Documents are Python numbers: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        documents: Documents,
        scale: float | None,
        window: int | None = None,
        first_query: int = 0,
        **settings: Any,
    ) -> Tensor:
        """q_BTMK, k_BSGK, v_BSGV -> out_BTMV.

        Args:
            window: how many tokens back a token sees, itself included.
            first_query: the place of the first query in the sequence.
            **settings: further arguments of the function; `s_aux` (attention sinks) of the own heads.
        """
        # The function may look at the module: for how often keys repeat here, and for sinks.
        own = {"num_key_value_groups": q.shape[2] // k.shape[2]}
        if settings.get("s_aux") is not None:
            own["sinks"] = settings["s_aux"]
        call = _Call(self.function, _StandIn(self.module, config=self.config, **own), scale, settings)
        return self._attend(call, *(x.transpose(1, 2) for x in (q, k, v)), documents, window, first_query)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """The unpatched call, [B, H, S, .] as Hugging Face hands them."""
        return self.function(_StandIn(self.module, config=self.config), q, k, v, attention_mask, **kwargs)

    def _per_document(self, call, q, k, v, documents: Documents, window, first):
        last = first + q.shape[2]
        if documents.one_per_row:
            return _causal(call, q, k[:, :, :last], v[:, :, :last], window)
        by_row = [list(found) for _, found in itertools.groupby(documents.segments, key=lambda segment: segment[0])]
        # Parts, not slices: each slice's backward would write a gradient of full length.
        rows = zip(by_row, *(x.split(1 if len(by_row) > 1 else len(x)) for x in (q, k, v)), strict=True)
        out = []
        for segments, q_row, k_row, v_row in rows:
            seen = [(start, min(end, last)) for _, start, end in segments if start < last and end > first]
            keys = [seen[0][0], *(end - start for start, end in seen), k.shape[2] - last]
            queries = [end - max(start, first) for start, end in seen]
            parts = zip(q_row.split(queries, 2), *(x.split(keys, 2)[1:-1] for x in (k_row, v_row)), strict=True)
            out.append(torch.cat([_causal(call, *part, window) for part in parts], dim=1))
        return without_padding(torch.cat(out), documents, first)

    def _eager(self, call, q, k, v, documents: Documents, window, first):
        T, S = q.shape[2], k.shape[2]
        key = "eager", window, first, T, q.dtype
        if key not in documents.cache:
            allowed = documents.allowed_B1TS(first, T)
            if window is not None:
                allowed = allowed & _in_window(first, first + T, 0, S, window, q.device)
            mask = torch.zeros_like(allowed, dtype=q.dtype)
            # Eager functions take the softmax in fp32, where the lowest fp64 number is -inf and an empty row NaN.
            lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
            documents.cache[key] = mask.masked_fill_(~allowed, lowest)
        return call(q, k, v, documents.cache[key])

    def _varlen(self, call, q, k, v, documents: Documents, window, first):
        (B, _, T, _), S = q.shape, k.shape[2]
        call = partial(call, is_causal=True, sliding_window=window)
        if documents.one_per_row:
            return call(q, k[:, :, : first + T], v[:, :, : first + T])
        if T == S:
            lengths = {"cu_seq_lens_q": documents.cu_seqlens, "cu_seq_lens_k": documents.cu_seqlens}
            longest = {"max_length_q": documents.longest, "max_length_k": documents.longest}
            return without_padding(call(q, k, v, **lengths, **longest), documents)
        key = "varlen", first, T
        if key not in documents.cache:
            rows, cu_q, cu_k = seen_by_queries(documents.boundaries, B, T, S, first)
            longest = {"max_length_q": int(cu_q.diff().max()), "max_length_k": int(cu_k.diff().max())}
            lengths = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k}
            lengths = {name: cu.to(q.device, torch.int32) for name, cu in lengths.items()}
            documents.cache[key] = rows, lengths | longest
        rows, lengths = documents.cache[key]
        out = call(_one_row(q, [slice(None)] * B), _one_row(k, rows), _one_row(v, rows), **lengths)
        return without_padding(out.view(B, T, *out.shape[2:]), documents, first)

    def _flex(self, call, q, k, v, documents: Documents, window, first):
        from torch.nn.attention.flex_attention import create_block_mask

        T, S = q.shape[2], k.shape[2]
        key = "flex", window, first, T
        if key not in documents.cache:
            ids_BS = documents.ids_BS

            def seen(b, h, query, j):
                i = query + first
                same_document = (i >= j) & (ids_BS[b, i] == ids_BS[b, j]) & (ids_BS[b, j] > 0)
                return same_document if window is None else same_document & (i - j < window)

            documents.cache[key] = create_block_mask(seen, documents.batch, None, T, S, device=q.device)
        return call(q, k, v, documents.cache[key])


@dataclass(frozen=True)
class _Call:
    """The attention function with what is the same for all of a layer's calls; it returns [B, T, H, V]."""

    function: Callable[..., tuple[Tensor, Any]]
    module: _StandIn
    scale: float | None
    settings: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        kwargs |= self.settings
        return self.function(self.module, q, k, v, mask, dropout=0.0, scaling=self.scale, **kwargs)[0]


def _one_row(x_BHSD: Tensor, rows: list[slice]) -> Tensor:
    """Some tokens of each row, one row after the other: [1, H, tokens, D]."""
    parts = [x[:, :, tokens] for x, tokens in zip(x_BHSD.split(1), rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _causal(call: _Call, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """The last queries of one document [B, H, n, .], causal, without a mask that is quadratic in n: [B, n, H, V]."""
    (n, keys), device = (q.shape[2], k.shape[2]), q.device
    first = keys - n
    if window is not None and keys > window:
        parts = []
        for start in range(0, n, _WINDOW_BLOCK):
            stop, begin = min(n, start + _WINDOW_BLOCK), max(0, first + start - window + 1)
            mask = _in_window(first + start, first + stop, begin, first + stop, window, device)
            seen = slice(begin, first + stop)
            parts.append(call(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], mask[None, None], is_causal=False))
        return torch.cat(parts, dim=1)
    if not first:
        return call(q, k, v, None, is_causal=True)
    if n == 1:
        return call(q, k, v, None, is_causal=False)
    if has_flash(device):  # one block holds the document
        heads_last = (x.transpose(1, 2) for x in (q, k, v))
        return moba_attention(*heads_last, keys, 1, scale=call.scale, implementation="torch")
    return call(q, k, v, causal_lower_right(n, keys), is_causal=False)


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
