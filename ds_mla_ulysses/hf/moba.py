"""MoBA as an attention implementation of Hugging Face models, in one process and over ranks.

A model that is loaded with a registered name calls `MoBAFunction` in every layer. It hands the layer's queries, keys
and values to `MoBAKernel`, which is also what `parallelize` takes as the local attention of such a model: whether a
layer runs MoBA or full attention, how documents and padding are honoured and what is refused is said there, once.

Letters: B batch · H query heads · T queries · S keys · K query and key width · V value width.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.group import SequenceGroup
from ..layout.documents import Documents, gather_documents
from ..moba import MoBAConfig, moba_attention
from .families import attention_layers, refuse_lost_window
from .kernel import LocalKernel, as_autocast, without_padding

#: Where a model's config keeps what changes its answer; the rest is the machine's affair.
CONFIG_KEY = "moba"
_STORED = ("moba_chunk_size", "moba_topk", "full_attention_layers")
#: The attribute of an attention module that `set_moba` writes.
_OFF = "_moba_is_off"


def register_moba(config: MoBAConfig | None = None, name: str = "moba") -> None:
    """Makes `attn_implementation=name` run MoBA in any Hugging Face decoder.

    Block size, top-k and the layers with full attention are written into the config of each model, when it is
    parallelized or first runs (`model.config.moba`), and are saved and loaded with it. Where they differ from what is
    registered, the model is refused: models with other numbers take another name.

    Args:
        config: None: each model brings its own, from a checkpoint.
        name: of the implementation; not one of transformers' own.

    Raises:
        ValueError: the name is taken, by another config or by transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if config is not None and not isinstance(config, MoBAConfig):
        raise ValueError(f"config must be a MoBAConfig, got {config!r}.")
    if not name.isidentifier() or "flash" in name or name in ("eager", "paged"):
        raise ValueError(f"name must be a word of its own and without 'flash', at which transformers looks: {name!r}.")
    known = ALL_ATTENTION_FUNCTIONS.get(name)
    if known is not None and not isinstance(known, MoBAFunction):
        raise ValueError(f"{name!r} is an attention implementation already: choose another name.")
    if known is not None and config is not None and known.config not in (None, config):
        raise ValueError(
            f"{name!r} is registered with {known.config}, not {config}: give this one a name of its own, "
            f"register_moba(config, name={name + '_2'!r}), and load its model with that attn_implementation."
        )
    if known is None or (known.config is None and config is not None):
        function = MoBAFunction(name, config)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, function.mask)


def set_moba(model: nn.Module, enabled: bool) -> None:
    """Switches all MoBA layers of a model to full attention (`MoBAConfig.dense`), or back; from the next forward on.

    Works on plain and on parallelized models, and on what wraps them. It is not saved with the model. Do not call it
    between a forward and its backward: layers that are recomputed would change.

    Raises:
        ValueError: the model has no MoBA layers.
    """
    layers = [layer for layer in attention_layers(model) if _runs_moba(layer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no MoBA layers: call register_moba, and load it with attn_implementation='moba'."
        )
    for layer in layers:
        vars(layer)[_OFF] = not enabled


class MoBAFunction:
    """transformers' attention function and mask function of one registered name."""

    def __init__(self, name: str, config: MoBAConfig | None) -> None:
        self.name, self.config = name, config

    def config_of(self, model_config: Any) -> MoBAConfig:
        """The MoBA config of a model, which is written into the model's config if it is not there.

        Raises:
            ValueError: there is none, or two that differ.
        """
        stored = getattr(model_config, CONFIG_KEY, None)
        if stored is None and self.config is None:
            raise ValueError(
                f"the config of this {model_config.model_type} has no {CONFIG_KEY!r} and {self.name!r} was registered "
                "without one: call register_moba(MoBAConfig(...))."
            )
        if stored is None:
            setattr(model_config, CONFIG_KEY, {key: getattr(self.config, key) for key in _STORED})
            return self.config
        if not isinstance(stored, dict) or not set(stored) <= set(_STORED):
            raise ValueError(f"model.config.{CONFIG_KEY} must be a dict with {', '.join(_STORED)}, got {stored!r}.")
        own = replace(self.config or MoBAConfig(), **stored)
        if self.config not in (None, own):
            raise ValueError(
                f"the model's config has {CONFIG_KEY}={stored}, but {self.name!r} is registered with {self.config}: "
                f"register a name without a config, register_moba(name={self.name + '_own'!r}), and load the model with it to "
                f"take the model's, or set model.config.{CONFIG_KEY} = None to take the registered one from here on."
            )
        return own

    # Documents are Python numbers to MoBA: traced, each layout would be a graph of its own.
    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """query [B, H, T, K], key [B, G, S, K], value [B, G, S, V] -> [B, T, H, V]."""
        return MoBAKernel(module, module.config, self).plain(query, key, value, attention_mask, **kwargs)

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Tensor] | None = None,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        config: Any = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """What goes to the layers, never quadratic: None, a mask [B, S], or where it tells more than padding the number
        of each token's document, int64 [B, S] from 1 on, 0 on padding.
        """
        from transformers.masking_utils import causal_mask_function, flash_attention_mask

        if use_vmap:
            raise ValueError(
                f"attn_implementation={self.name!r} cannot honour this model's additional mask: load it with another one."
            )
        if int(q_offset) + q_length != kv_offset + kv_length:
            raise ValueError(
                f"attn_implementation={self.name!r} takes caches that grow (DynamicCache, the default of generate), not "
                "static ones: leave cache_implementation out."
            )
        if config is not None:
            self.config_of(config)
        mask_BS = flash_attention_mask(batch_size, q_length, kv_length, attention_mask=attention_mask)
        if mask_function in (None, causal_mask_function) or q_length != kv_length or q_length == 1:
            return mask_BS
        # Some models tell documents, or chunks, to their masks only. One begins where a token does not see the one before.
        row_B1, token_S = torch.arange(batch_size, device=device).unsqueeze(1), torch.arange(1, q_length, device=device)
        head = torch.zeros((), dtype=torch.long, device=device)
        begins_BS = ~mask_function(row_B1, head, token_S, token_S - 1).expand(batch_size, -1)
        if not begins_BS.any():
            return mask_BS
        ids_BS = torch.nn.functional.pad(begins_BS.cumsum(1), (1, 0)) + 1
        return ids_BS if mask_BS is None else ids_BS * mask_BS


class MoBAKernel:
    """The local attention of one layer: MoBA, or the dense implementation in the layers that have it.

    Has the methods of `LocalKernel`. Queries may be a part of the rows.

    Args:
        module: the attention module.
        config: its config, or one whose names it goes by.
        function: the registered function that the config names.
    """

    def __init__(self, module: nn.Module, config: Any, function: MoBAFunction) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        moba = function.config_of(config)
        self.module, self.function, self.implementation = module, function, moba.implementation
        self.blocks = moba.blocks_of(_layer_index(module), config.num_hidden_layers)
        if _registered(moba.dense) is not None:
            raise ValueError(f"dense={moba.dense!r} is MoBA itself: name the implementation of full attention.")
        if moba.dense not in ("eager", *ALL_ATTENTION_FUNCTIONS):
            raise ValueError(
                f"dense={moba.dense!r} is no attention implementation of transformers: name one, as 'sdpa'."
            )
        dense = copy.copy(config)
        dense._attn_implementation_internal = moba.dense
        self.dense = kernel_of(module, dense)

    @property
    def is_full(self) -> bool:
        """Whether the next call is full attention."""
        return self.blocks is None or vars(self.module).get(_OFF, False)

    def settings(self, documents: Documents, **kwargs: Any) -> dict[str, Any]:
        """As `LocalKernel.settings`; refuses what MoBA does not have."""
        if kwargs.get("dropout"):
            raise ValueError(
                f"MoBA has no attention dropout ({kwargs['dropout']}): set config.attention_dropout = 0.0."
            )
        if self.is_full:
            return self.dense.settings(documents, **kwargs)
        softcap, window = kwargs.get("softcap"), kwargs.get("sliding_window")
        found = {
            "attention sinks (s_aux)": kwargs.get("s_aux") is not None,
            f"a soft cap (softcap={softcap})": softcap is not None,
            f"a sliding window of {window} tokens": window is not None and window < documents.length,
        }
        for what, is_there in found.items():
            if is_there:
                layer = _layer_index(self.module)
                raise ValueError(
                    f"layer {layer} has {what}, which MoBA does not: name {layer} in full_attention_layers and an "
                    "implementation that has it in dense, or load the model with another attn_implementation."
                )
        return self.dense.settings(documents, **kwargs)

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
        first_query: int = 0,
        **settings: Any,
    ) -> Tensor:
        """q_BTHK, k_BSGK, v_BSGV -> out_BTHV; the queries are [first_query, first_query + T) of the S tokens."""
        if self.is_full:
            settings |= {"documents": documents, "scaling": scaling, "window": window, "first_query": first_query}
            return self.dense(q, k, v, **settings)
        out = moba_attention(
            q,
            k,
            v,
            *self.blocks,
            cu_seqlens=None if documents.one_per_row else documents.cu_seqlens,
            first_query=first_query,
            scale=scaling,
            implementation=self.implementation,
        )
        return without_padding(out, documents, first_query)

    def plain(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """One process, [B, H, T, .] as Hugging Face hands them; with a cache the queries are the last T of S."""
        if getattr(self.module, "is_causal", True) is False:
            raise ValueError(
                f"{type(self.module).__name__} is not causal, MoBA is: give attn_implementation a dict that names MoBA "
                f"for the text model only, such as {{'text_config': {self.function.name!r}}}."
            )
        refuse_lost_window(type(self.module).__name__, self.module)
        T, S = q.shape[2], k.shape[2]
        documents = _documents(
            q, S, attention_mask, kwargs.pop("position_ids", None), kwargs.pop("cu_seq_lens_k", None)
        )
        settings = self.settings(documents, **kwargs)
        window = settings["window"]
        if not self.is_full and T < S and window is not None and window <= S:
            raise ValueError(
                f"MoBA over a cache that slides with a window of {window} tokens would count its blocks from another token "
                "each time: call generate(use_cache=False), or load the model with another attn_implementation."
            )
        out = self(*(x.transpose(1, 2) for x in as_autocast(q, k, v)), first_query=S - T, **settings)
        return out, None


def _documents(
    q_BHTK: Tensor, S: int, mask_BS: Tensor | None, position_ids: Tensor | None, boundaries: Tensor | None
) -> Documents:
    """Of a call in one process, from whatever tells them: cu_seqlens over all tokens, or positions and mask."""
    B, _, T, _ = q_BHTK.shape
    if boundaries is not None:
        starts = torch.zeros(B * S + 1, dtype=torch.bool, device=boundaries.device)
        starts[boundaries.long()] = True
        starts[: B * S : S] = True
        return Documents(starts[:-1].view(B, S))
    positions = position_ids if T == S else None  # with a cache, those of the queries only
    documents, _ = gather_documents(positions, mask_BS, (B, S), q_BHTK.device, SequenceGroup.of(None))
    if mask_BS is None or mask_BS.dtype == torch.bool:
        return documents
    starts_BS = documents.starts_BS.clone()
    starts_BS[:, 1:] |= mask_BS[:, 1:] != mask_BS[:, :-1]
    return Documents(starts_BS, documents.padding_BS)


def implementations_of(config: Any) -> tuple[str, ...]:
    """The attention implementations of a model, by its config: of MoBA models that of full layers too."""
    function = _registered(config._attn_implementation)
    dense = () if function is None else (function.config_of(config).dense,)
    return config._attn_implementation, *dense


def kernel_of(layer: nn.Module, config: Any) -> LocalKernel | MoBAKernel:
    """The kernel of the implementation that a config names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    kind = MoBAKernel if isinstance(function, MoBAFunction) else LocalKernel
    return kind(layer, config, function)


def _runs_moba(layer: nn.Module) -> bool:
    kernel = getattr(vars(layer).get("_ulysses"), "kernel", None)  # of a parallelized model
    return isinstance(kernel, MoBAKernel) or _registered(layer.config._attn_implementation) is not None


def _registered(name: str) -> MoBAFunction | None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return function if isinstance(function, MoBAFunction) else None


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"{type(module).__name__} has no layer_idx, by which MoBA's layers are told: it cannot run MoBA."
        )
    return index
