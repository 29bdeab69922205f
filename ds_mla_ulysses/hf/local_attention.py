"""The local attention of a layer: the Hugging Face attention function that the user chose, called on whole sequences.

Shape letters:
    B batch                      M query heads of this call
    T queries of this call       G KV heads of this call
    S tokens of the sequence     K query and key width
    n queries of one document    V value width
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ..comm.kept import attend_once, is_keeping
from ..errors import UlyssesValueError
from ..layout.documents import Documents
from ..moba import moba_attention
from ..moba.boundaries import seen_by_queries
from ..moba.dense_attention import has_flash
from .arguments import SCORE_ARGUMENTS

#: Queries that share one mask if a window has to be masked. The mask has this many rows, and as many columns as the
#: window and these rows together.
_WINDOW_BLOCK = 256


class LayerKernel(Protocol):
    """The local attention of one layer, as the strategies call it. `LocalAttention` and `MoBAKernel` implement it.

    Attributes:
        module: the attention module of the layer.
        keeps_itself: that its calls of attention are kept for a recomputation, and need not be kept as a whole.
    """

    module: nn.Module
    keeps_itself: bool

    @property
    def is_full(self) -> bool:
        """Whether the next call runs full attention."""

    def settings(self, documents: Documents, **kwargs: Any) -> dict[str, Any]:
        """Returns the keyword arguments of `__call__` that follow from those of a Hugging Face attention call.

        Raises:
            ValueError: the layer uses a feature that is not supported. It is raised before any collective.
        """

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
        """Attends causally within documents: q_BTMK, k_BSGK, v_BSGV -> out_BTMV.

        The queries are those of the tokens [first_query, first_query + T).
        """

    def plain(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Runs the layer in one process, with tensors [B, heads, tokens, width] as transformers passes them."""


class LocalAttention:
    """Calls a Hugging Face attention function, and passes documents and windows in the form that the function takes.

    sdpa takes one causal call for each document, so an S x S mask never exists; with a window, it takes one call for
    each block of queries. Flash attention takes cu_seqlens, and flex attention takes a block mask. Eager attention takes
    an explicit mask, whose size is quadratic in S.

    The queries may be a run of the sequence, [first_query, first_query + T), while the keys are those of the whole
    sequence. A causal call is then aligned at its last query and its last key. sdpa supports this as
    `causal_lower_right`, which on a CPU would materialise a mask of all scores. On a CPU, the attention to the keys
    before the queries and the attention among the queries are therefore computed separately and merged.

    Args:
        module: the attention module. It is not changed.
        config: the config that names the attention implementation. It may differ from the module's config.
        function: the attention function of that implementation.

    Raises:
        ValueError: the implementation is not supported.
    """

    keeps_itself = True

    def __init__(self, module: nn.Module, config: Any, function: Callable[..., tuple[Tensor, Any]]) -> None:
        self.module, self.config, self.function = module, config, function
        name: str | None = config._attn_implementation
        forms: dict[str | None, _Form] = {
            "sdpa": self._per_document,
            "eager": self._eager,
            "flex_attention": self._flex,
        }
        form = self._varlen if "flash" in (name or "") else forms.get(name)
        if form is None:
            raise UlyssesValueError(
                f"attn_implementation={name!r} is not supported: load the model with 'sdpa', 'flash_attention_2', "
                "'flash_attention_3', 'flash_attention_4', 'flex_attention' or 'eager'."
            )
        self._attend: _Form = form

    @property
    def is_full(self) -> bool:
        """Whether the next call runs full attention, which is always the case."""
        return True

    def settings(
        self,
        documents: Documents,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the keyword arguments of `__call__` that follow from those of a Hugging Face attention call.

        Raises:
            ValueError: an argument is not supported and would silently be lost. It is raised before any collective.
        """
        if dropout:
            raise UlyssesValueError(
                f"attention dropout ({dropout}) is not supported, because each rank would draw different random numbers "
                "than one process: set config.attention_dropout = 0.0."
            )
        if is_causal is False:
            raise UlyssesValueError("attention that is not causal is not supported under sequence parallelism.")
        for name in SCORE_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise UlyssesValueError(
                    f"{name} is not supported under sequence parallelism: load the model without it."
                )
        if kwargs.get("s_aux") is not None and self.config._attn_implementation == "sdpa":
            raise UlyssesValueError(
                "attention sinks (s_aux) would be lost in sdpa: load the model with attn_implementation='eager', or name "
                "'eager' in MoBAConfig.dense."
            )
        passed_on = {name: kwargs[name] for name in ("softcap", "s_aux") if kwargs.get(name) is not None}
        return {"documents": documents, "scale": scaling, "window": sliding_window, **passed_on}

    # Documents are Python numbers. If they were traced, each layout would need another graph.
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
        """Attends causally within documents: q_BTMK, k_BSGK, v_BSGV -> out_BTMV.

        Args:
            documents: the documents of the whole sequence.
            scale: the factor of the scores; None for the default of the function.
            window: how many tokens a token sees, itself included; None for all.
            first_query: the index in the sequence of the first query.
            **settings: further arguments of the function, such as `s_aux`, the attention sinks of these M heads.
        """
        call = _Call(self.function, self.module, self.config, scale, settings)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self._attend(call, q, k, v, documents, window, first_query)

    def plain(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Runs the layer in one process, with tensors [B, heads, tokens, width] as transformers passes them."""
        return self.function(_StandIn(self.module, config=self.config), q, k, v, attention_mask, **kwargs)

    def _per_document(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, first: int
    ) -> Tensor:
        last = first + q.shape[2]
        if documents.one_per_row:
            return _causal(call, q, k[:, :, :last], v[:, :, :last], window)
        by_row = [list(found) for _, found in itertools.groupby(documents.segments, key=lambda segment: segment[0])]
        # The tensors are split instead of sliced, because the backward of each slice writes a gradient of full length.
        rows = zip(by_row, *(x.split(1 if len(by_row) > 1 else len(x)) for x in (q, k, v)), strict=True)
        out = []
        for segments, q_row, k_row, v_row in rows:
            seen = [(start, min(end, last)) for _, start, end in segments if start < last and end > first]
            keys = [seen[0][0], *(end - start for start, end in seen), k.shape[2] - last]
            queries = [end - max(start, first) for start, end in seen]
            parts = zip(q_row.split(queries, 2), k_row.split(keys, 2)[1:-1], v_row.split(keys, 2)[1:-1], strict=True)
            out.append(torch.cat([_causal(call, *part, window=window) for part in parts], dim=1))
        return without_padding(torch.cat(out), documents, first)

    def _eager(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, first: int
    ) -> Tensor:
        T, S = q.shape[2], k.shape[2]
        key = "eager", window, first, T, q.dtype
        if key not in documents.cache:
            allowed = documents.allowed_B1TS(first, T)
            if window is not None:
                allowed = allowed & _in_window(first, first + T, 0, S, window, q.device)
            mask = torch.zeros_like(allowed, dtype=q.dtype)
            # Eager functions compute the softmax in fp32, in which the lowest fp64 number becomes -inf. A query without
            # keys would then get NaN.
            lowest = max(torch.finfo(q.dtype).min, torch.finfo(torch.float32).min)
            mask.masked_fill_(~allowed, lowest)
            # It averages over all keys instead, but not over those that sharding has added, which one process lacks.
            added = slice(documents.tokens, None)
            mask[..., added].masked_fill_(~allowed[..., added], -torch.inf)
            documents.cache[key] = mask
        return call(q, k, v, documents.cache[key])

    def _varlen(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, first: int
    ) -> Tensor:
        (B, _, T, _), S = q.shape, k.shape[2]
        attend = partial(call, is_causal=True, sliding_window=window)
        if documents.one_per_row:
            return attend(q, k[:, :, : first + T], v[:, :, : first + T])
        if T == S:
            lengths = {"cu_seq_lens_q": documents.cu_seqlens, "cu_seq_lens_k": documents.cu_seqlens}
            longest = {"max_length_q": documents.longest, "max_length_k": documents.longest}
            return without_padding(attend(q, k, v, **lengths, **longest), documents)
        key = "varlen", first, T
        if key not in documents.cache:
            rows, cu_q, cu_k = seen_by_queries(documents.boundaries, B, T, S, first)
            longest = {"max_length_q": int(cu_q.diff().max()), "max_length_k": int(cu_k.diff().max())}
            lengths = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_k}
            lengths = {name: cu.to(q.device, torch.int32) for name, cu in lengths.items()}
            documents.cache[key] = rows, lengths | longest
        rows, lengths = documents.cache[key]
        out = attend(_one_row(q, [slice(None)] * B), _one_row(k, rows), _one_row(v, rows), **lengths)
        return without_padding(out.view(B, T, *out.shape[2:]), documents, first)

    def _flex(
        self, call: _Call, q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None, first: int
    ) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask

        T, S = q.shape[2], k.shape[2]
        key = "flex", window, first, T
        if key not in documents.cache:
            ids_BS = documents.ids_BS

            def seen(b: Tensor, h: Tensor, query: Tensor, j: Tensor) -> Tensor:
                i = query + first
                same_document = (i >= j) & (ids_BS[b, i] == ids_BS[b, j]) & (ids_BS[b, j] > 0)
                return same_document if window is None else same_document & (i - j < window)

            documents.cache[key] = create_block_mask(seen, documents.batch, None, T, S, device=q.device)
        return call(q, k, v, documents.cache[key])


@dataclass(frozen=True)
class _Call:
    """The attention function with the arguments that all calls of a layer share. A call returns [B, T, H, V]."""

    function: Callable[..., tuple[Tensor, Any]]
    module: nn.Module
    config: Any
    scale: float | None
    settings: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        if is_keeping() and isinstance(mask, Tensor) and repeats > 1 and q.shape[2] > 1:
            # With a mask, the functions repeat keys and values. Copies made inside the call would be kept.
            k, v = (x.unsqueeze(2).expand(-1, -1, repeats, -1, -1).flatten(1, 2) for x in (k, v))
        return attend_once(self._attend, q, k, v, mask, **self.settings, **kwargs)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> Tensor:
        # The function may read two attributes of the module: how often to repeat the keys, and the attention sinks.
        attributes: dict[str, Any] = {"num_key_value_groups": q.shape[1] // k.shape[1]}
        if kwargs.get("s_aux") is not None:
            attributes["sinks"] = kwargs["s_aux"]
        module = _StandIn(self.module, config=self.config, **attributes)
        return self.function(module, q, k, v, mask, dropout=0.0, scaling=self.scale, **kwargs)[0]


#: How documents and window are passed: form(call, q_BMTK, k_BGSK, v_BGSV, documents, window, first query) -> out_BTMV.
_Form = Callable[[_Call, Tensor, Tensor, Tensor, Documents, "int | None", int], Tensor]


def _one_row(x_BMSK: Tensor, rows: list[slice]) -> Tensor:
    """Concatenates some tokens of each row into one row, [1, M, tokens, K]."""
    parts = [x[:, :, tokens] for x, tokens in zip(x_BMSK.split(1), rows, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _causal(call: _Call, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attends causally in one document. No mask is quadratic in its length.

    Args:
        q: [B, M, n, K], the last n queries of the keys' tokens.
        k, v: [B, G, keys, K], [B, G, keys, V].

    Returns:
        [B, n, M, V]
    """
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
    if has_flash(device):  # MoBA with one block that holds the whole document is full attention
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return moba_attention(q, k, v, keys, 1, scale=call.scale, implementation="torch")
    return call(q, k, v, causal_lower_right(n, keys), is_causal=False)


def _in_window(start: int, stop: int, first: int, last: int, window: int, device: torch.device) -> Tensor:
    """Returns bool [stop-start, last-first]: which of the keys [first, last) each query of [start, stop) may see."""
    distance = torch.arange(start, stop, device=device).unsqueeze(1) - torch.arange(first, last, device=device)
    return (distance >= 0) & (distance < window)


def without_padding(out_BTMV: Tensor, documents: Documents, first: int = 0) -> Tensor:
    """Writes zeros on padding, as sdpa and flash attention do for a query without keys.

    Args:
        first: the index in the sequence of the first of the T tokens.
    """
    if documents.padding_BS is None:
        return out_BTMV
    padding_BT = documents.padding_BS[:, first : first + out_BTMV.shape[1]]
    return out_BTMV.masked_fill(padding_BT.unflatten(1, (-1, 1, 1)), 0)


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts the tensors to autocast's dtype if autocast is on. RoPE in fp32 widens some of them before."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


class _StandIn:
    """The attention module as an attention function sees it, with other values of some attributes."""

    def __init__(self, module: nn.Module, **attributes: Any) -> None:
        vars(self).update(attributes, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
