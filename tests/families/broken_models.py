"""Llama with one line broken in each class, and a right one: `check` has to notice each."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward


class Attention(LlamaAttention):
    """The attention of Llama, in which subclasses replace one step."""

    def given(self, settings: dict[str, Any]) -> dict[str, Any]:
        return settings

    def mask(self, mask: Any, tokens: int) -> Any:
        return mask

    def value(self, value: Any, settings: dict[str, Any]) -> Any:
        return value

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        value = self.value(value, kwargs)
        mask = self.mask(attention_mask, query.shape[2])
        out, weights = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **self.given(kwargs))
        return self.o_proj(out.reshape(*shape[:2], -1).contiguous()), weights


class _DropsDocuments(Attention):
    def given(self, settings):
        return {}


class _BringsMask(Attention):
    def mask(self, mask, tokens):
        distance = torch.arange(tokens).unsqueeze(1) - torch.arange(tokens)
        bias = (-0.1 * distance).to(self.q_proj.weight.dtype).masked_fill(distance < 0, float("-inf"))
        return bias.expand(1, 1, tokens, tokens)


class _LosesGradient(Attention):
    def value(self, value, settings):
        return value.detach() if "ulysses_documents" in settings else value


class _SlightlyOff(Attention):
    def value(self, value, settings):
        return value * (1 + 3e-9) if "ulysses_documents" in settings else value


class _Raises(Attention):
    def value(self, value, settings):
        if "ulysses_documents" in settings:
            raise IndexError("not among the layers")
        return value


class _Dies(Attention):
    def value(self, value, settings):
        if "ulysses_documents" in settings and torch.distributed.get_rank() == 1:
            os._exit(7)
        return value


class Right(LlamaForCausalLM):
    attention: type[Attention] = Attention

    def __init__(self, config):
        super().__init__(config)
        for i, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention(config, i)
        self.post_init()


class DropsDocuments(Right):
    attention = _DropsDocuments


class BringsMask(Right):
    attention = _BringsMask


class LosesGradient(Right):
    attention = _LosesGradient


class SlightlyOff(Right):
    attention = _SlightlyOff


class Raises(Right):
    attention = _Raises


class Dies(Right):
    attention = _Dies


class DoesNotBuild(LlamaForCausalLM):
    def __init__(self, config):
        raise RuntimeError("needs a kernel")
