"""MoBA as an attention implementation of Hugging Face models, in one process and over ranks.

A model that is loaded with a registered name calls `MoBAFunction` in every layer. It passes the layer's queries, keys
and values to `MoBAKernel`, which `parallelize` also uses as the local attention of such a model. `MoBAKernel` decides
whether a layer runs MoBA or full attention, applies documents and padding, and raises errors for unsupported features.

Letters: B batch · T queries · S keys · H query heads · G KV heads · K query and key width · V value width.
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
from ..errors import UlyssesTypeError, UlyssesValueError
from ..layout.documents import Documents, gather_documents
from ..moba import MoBAConfig, moba_attention
from .families import refuse_lost_window
from .local_attention import LayerKernel, LocalAttention, as_autocast, without_padding

#: The attribute of a model's config that stores the MoBA settings which change the model's output.
CONFIG_KEY = "moba"
_STORED = ("block_size", "top_k", "full_attention_layers")
#: The attribute of an attention module that `set_moba` writes.
_OFF = "_moba_is_off"


def register_moba(config: MoBAConfig | None = None, name: str = "moba") -> None:
    """Makes `attn_implementation=name` run MoBA in any Hugging Face decoder.

    `block_size`, `top_k` and `full_attention_layers` are written into the config of each model (`model.config.moba`)
    when the model is parallelized or first runs, and are saved and loaded with it. If they differ from the registered
    config, the model raises ValueError: register another name for it.

    Args:
        config: the settings of all models with this name. None means that each model brings its own settings, from a
            checkpoint.
        name: the name of the implementation. It must not be one of transformers' own names.

    Raises:
        TypeError: the config is not a MoBAConfig, or the name is not a string.
        ValueError: the name is not valid, or it is taken by transformers or by another config.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if config is not None and not isinstance(config, MoBAConfig):
        raise UlyssesTypeError(f"config must be a MoBAConfig, got {config!r}.")
    if not isinstance(name, str):
        raise UlyssesTypeError(f"name must be a string, got {name!r}.")
    if not name.isidentifier() or "flash" in name or name in ("eager", "paged"):
        raise UlyssesValueError(
            "name must be an identifier other than 'eager' and 'paged', and without 'flash', which has a meaning in "
            f"transformers, got {name!r}."
        )
    known = ALL_ATTENTION_FUNCTIONS.get(name)
    if known is not None and not isinstance(known, MoBAFunction):
        raise UlyssesValueError(
            f"{name!r} already is an attention implementation of transformers: choose another name."
        )
    if known is not None and config is not None and known.config not in (None, config):
        raise UlyssesValueError(
            f"{name!r} is registered with {known.config}, not {config}: register this config by another name, "
            f"register_moba(config, name={name + '_2'!r}), and load its model with that attn_implementation."
        )
    if known is None or (known.config is None and config is not None):
        function = MoBAFunction(name, config)
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, function.mask)


def set_moba(model: nn.Module, enabled: bool) -> None:
    """Switches all MoBA layers of a model to full attention (`MoBAConfig.dense`) or back, from the next forward on.

    It works on plain models, on parallelized models and on modules that wrap them. The switch is not saved with the
    model. Do not call it between a forward and its backward, because recomputed layers would change.

    Args:
        enabled: True runs MoBA, False runs full attention.

    Raises:
        ValueError: the model has no MoBA layers.
    """
    layers = [module for module in model.modules() if _runs_moba(module)]
    if not layers:
        raise UlyssesValueError(
            f"{type(model).__name__} has no MoBA layers: call register_moba, and load the model with "
            "attn_implementation='moba'."
        )
    for layer in layers:
        vars(layer)[_OFF] = not enabled


class MoBAFunction:
    """The attention function and the mask function that transformers calls for one registered name."""

    def __init__(self, name: str, config: MoBAConfig | None) -> None:
        self.name, self.config = name, config

    def config_of(self, model_config: Any) -> MoBAConfig:
        """Returns the MoBA config of a model, and writes it into the model's config if it is not there yet.

        Raises:
            TypeError: the model's config stores something other than a dict.
            ValueError: there is no config, or the stored config and the registered one differ.
        """
        stored = getattr(model_config, CONFIG_KEY, None)
        if stored is None:
            if self.config is None:
                raise UlyssesValueError(
                    f"the config of this {model_config.model_type} has no {CONFIG_KEY!r}, and {self.name!r} was "
                    "registered without one: call register_moba(MoBAConfig(...))."
                )
            setattr(model_config, CONFIG_KEY, {key: getattr(self.config, key) for key in _STORED})
            return self.config
        if not isinstance(stored, dict) or not set(stored) <= set(_STORED):
            error = UlyssesValueError if isinstance(stored, dict) else UlyssesTypeError
            raise error(f"model.config.{CONFIG_KEY} must be a dict with {', '.join(_STORED)}, got {stored!r}.")
        found = replace(self.config or MoBAConfig(), **stored)
        if self.config not in (None, found):
            raise UlyssesValueError(
                f"the model's config has {CONFIG_KEY}={stored}, but {self.name!r} is registered with {self.config}. To "
                "use the model's settings, register a name without a config, "
                f"register_moba(name={self.name + '_of_model'!r}), and load the model with it. To use the registered "
                f"settings, set model.config.{CONFIG_KEY} = None."
            )
        return found

    # MoBA reads documents as Python numbers. If they were traced, each layout would need another graph.
    @torch.compiler.disable
    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Runs one attention layer: query [B, H, T, K], key [B, G, S, K] and value [B, G, S, V] -> [B, T, H, V]."""
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
        """Returns the mask that transformers passes to the layers. Its size is never quadratic.

        Returns:
            None; a padding mask [B, S]; or, if the mask function divides documents, int64 [B, S] with the number of
            each token's document, from 1 on, and 0 on padding.

        Raises:
            ValueError: the model combines additional masks, or uses a static cache.
        """
        from transformers.masking_utils import causal_mask_function, flash_attention_mask

        if use_vmap:
            raise UlyssesValueError(
                f"attn_implementation={self.name!r} cannot apply this model's additional mask: load the model with "
                "another one."
            )
        if int(q_offset) + q_length != kv_offset + kv_length:
            raise UlyssesValueError(
                f"attn_implementation={self.name!r} supports caches that grow (DynamicCache, the default of generate), "
                "but not static ones: remove cache_implementation."
            )
        if config is not None:
            self.config_of(config)
        mask_BS = flash_attention_mask(batch_size, q_length, kv_length, attention_mask=attention_mask)
        if mask_function in (None, causal_mask_function) or q_length != kv_length or q_length == 1:
            return mask_BS
        # Some models pass their documents, or local attention spans, only to their masks. A document begins at each
        # token that does not see the previous one.
        row_B1, token_S = torch.arange(batch_size, device=device).unsqueeze(1), torch.arange(1, q_length, device=device)
        head = torch.zeros((), dtype=torch.long, device=device)
        begins_BS = ~mask_function(row_B1, head, token_S, token_S - 1).expand(batch_size, -1)
        if not begins_BS.any():
            return mask_BS
        ids_BS = torch.nn.functional.pad(begins_BS.cumsum(1), (1, 0)) + 1
        return ids_BS if mask_BS is None else ids_BS * mask_BS


class MoBAKernel:
    """The local attention of one layer: MoBA, or the dense implementation in layers with full attention.

    It has the methods of `LocalAttention`. The queries may be a run of each row.

    Args:
        module: the attention module.
        config: the config that names the attention implementation. It may differ from the module's own config.
        function: the registered function of that name.

    Raises:
        ValueError: `MoBAConfig.dense` is not the name of an attention implementation, or the model has no settings.
    """

    keeps_itself = True

    def __init__(self, module: nn.Module, config: Any, function: MoBAFunction) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        moba = function.config_of(config)
        self.module, self.function, self.implementation = module, function, moba.implementation
        self.blocks = moba.blocks_of(_layer_index(module), config.num_hidden_layers)
        if _registered(moba.dense) is not None:
            raise UlyssesValueError(
                f"dense={moba.dense!r} is MoBA itself: set it to an implementation of full attention."
            )
        if moba.dense not in ("eager", *ALL_ATTENTION_FUNCTIONS):
            raise UlyssesValueError(
                f"dense={moba.dense!r} is not an attention implementation of transformers: set it to one, such as "
                "'sdpa'."
            )
        dense = copy.copy(config)
        dense._attn_implementation_internal = moba.dense
        self.dense = kernel_of(module, dense)

    @property
    def is_full(self) -> bool:
        """Whether the next call runs full attention."""
        return self.blocks is None or vars(self.module).get(_OFF, False)

    def settings(self, documents: Documents, **kwargs: Any) -> dict[str, Any]:
        """Returns the same as `LocalAttention.settings`.

        Raises:
            ValueError: the layer uses a feature that MoBA, or the dense implementation, does not support.
        """
        if kwargs.get("dropout"):
            raise UlyssesValueError(
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
        for feature, is_used in found.items():
            if is_used:
                layer = _layer_index(self.module)
                raise UlyssesValueError(
                    f"layer {layer} has {feature}, which MoBA does not support: add {layer} to full_attention_layers "
                    "and set dense to an implementation that supports it, or load the model with another "
                    "attn_implementation."
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
        scale: float | None,
        window: int | None = None,
        first_query: int = 0,
        **settings: Any,
    ) -> Tensor:
        """Computes q_BTHK, k_BSGK, v_BSGV -> out_BTHV, for tokens [first_query, first_query + T) of S as queries."""
        if self.is_full or self.blocks is None:
            settings |= {"documents": documents, "scale": scale, "window": window, "first_query": first_query}
            return self.dense(q, k, v, **settings)
        block_size, top_k = self.blocks
        out = moba_attention(
            q,
            k,
            v,
            block_size,
            top_k,
            cu_seqlens=None if documents.one_per_row else documents.cu_seqlens,
            first_query=first_query,
            scale=scale,
            implementation=self.implementation,
        )
        return without_padding(out, documents, first_query)

    def plain(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Runs the layer in one process, with tensors [B, heads, tokens, width] as transformers passes them.

        With a cache, the queries are the last T of S tokens.

        Raises:
            ValueError: the layer is not causal, or uses a feature that is not supported.
        """
        if getattr(self.module, "is_causal", True) is False:
            raise UlyssesValueError(
                f"{type(self.module).__name__} is not causal, but MoBA is: pass a dict as attn_implementation that "
                f"names MoBA for the text model only, such as {{'text_config': {self.function.name!r}}}."
            )
        refuse_lost_window(type(self.module).__name__, self.module, "sliding_window" in kwargs)
        T, S = q.shape[2], k.shape[2]
        documents = _documents(
            q, S, attention_mask, kwargs.pop("position_ids", None), kwargs.pop("cu_seq_lens_k", None)
        )
        settings = self.settings(documents, **kwargs)
        window = settings["window"]
        if not self.is_full and T < S and window is not None and window <= S:
            raise UlyssesValueError(
                f"MoBA does not support a cache that slides with a window of {window} tokens, because block boundaries "
                "would slide, too: call generate(use_cache=False), or load the model with another attn_implementation."
            )
        out = self(*(x.transpose(1, 2) for x in as_autocast(q, k, v)), first_query=S - T, **settings)
        return out, None


def _documents(
    q_BHTK: Tensor, S: int, mask_BS: Tensor | None, position_ids: Tensor | None, boundaries: Tensor | None
) -> Documents:
    """Returns the documents of a call in one process, from cu_seqlens over all tokens, or from positions and mask."""
    B, _, T, _ = q_BHTK.shape
    if boundaries is not None:
        starts = torch.zeros(B * S + 1, dtype=torch.bool, device=boundaries.device)
        starts[boundaries.long()] = True
        starts[: B * S : S] = True
        return Documents(starts[:-1].view(B, S))
    positions = position_ids if T == S else None  # with a cache, position_ids covers the queries only
    documents, _ = gather_documents(positions, mask_BS, (B, S), q_BHTK.device, SequenceGroup.of(None))
    if mask_BS is None or mask_BS.dtype == torch.bool:
        return documents
    starts_BS = documents.starts_BS.clone()
    starts_BS[:, 1:] |= mask_BS[:, 1:] != mask_BS[:, :-1]
    return Documents(starts_BS, documents.padding_BS)


def implementations_of(config: Any) -> tuple[str, ...]:
    """Returns the attention implementations that a config names. For MoBA, they include `MoBAConfig.dense`."""
    function = _registered(config._attn_implementation)
    dense = () if function is None else (function.config_of(config).dense,)
    return config._attn_implementation, *dense


def kernel_of(layer: nn.Module, config: Any) -> LayerKernel:
    """Returns the local attention of the implementation that a config names."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager: Any = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)
    function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
    if isinstance(function, MoBAFunction):
        return MoBAKernel(layer, config, function)
    return LocalAttention(layer, config, function)


def _runs_moba(module: nn.Module) -> bool:
    """Whether a module is an attention layer (which has an index) that runs MoBA."""
    kernel = getattr(vars(module).get("_ulysses"), "kernel", None)  # of a parallelized model
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return isinstance(kernel, MoBAKernel) or (hasattr(module, "layer_idx") and _registered(name) is not None)


def _registered(name: str | None) -> MoBAFunction | None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(name)
    return function if isinstance(function, MoBAFunction) else None


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if index is None:
        raise UlyssesValueError(
            f"{type(module).__name__} has no layer_idx, which MoBA needs to find the settings of the layer: load the "
            "model with another attn_implementation."
        )
    return index
