"""latent_qkv: query latents and KV latents are gathered, and the module runs on all tokens with its local heads.

Shape letters: B batch · S tokens of the whole sequence · M heads of this rank · K query and key width · L latent width of
keys and values · R width of the shared RoPE key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ...attention.latent_kv import LatentKVMLAAttention
from ...comm.group import SequenceGroup
from ...layout.heads import HeadChunks
from ...planner.strategies.latent_qkv import LatentQKV
from ..families import UnsupportedModelError
from ..latent_forward import check_forward, on_latents
from .base import MLALayer

#: The submodules that `latent_forward` accounts for. q_proj is None in a module with a query latent.
_KNOWN = {
    "q_proj",
    "q_a_proj",
    "q_a_layernorm",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_a_layernorm",
    "kv_b_proj",
    "o_proj",
}


class LatentQKVLayer(MLALayer):
    """The module's forward is replaced by one that gathers the latents. Queries of the local heads come out of it."""

    # Only the local part of the class is used: the latents are gathered and the output is returned around the module's
    # forward.
    rules, attention_class = LatentQKV(), LatentKVMLAAttention
    attention: LatentKVMLAAttention

    def __init__(self, layer: nn.Module, kernel: Callable[..., Tensor], group: SequenceGroup, head_chunks: int) -> None:
        super().__init__(layer, kernel, group, head_chunks)
        self.chunks = HeadChunks(self.widths.heads, group.size, head_chunks).of_rank(group.rank)
        forward = on_latents(layer, group, self.attention.query_heads(self.widths.heads))
        self.replaced = [*self.replaced, (layer, "forward", forward)]

    @classmethod
    def check(cls, layer: nn.Module) -> None:
        unknown = sorted({name for name, module in layer._modules.items() if module is not None} - _KNOWN)
        if unknown:
            kind, name = type(layer).__name__, cls.rules.name
            raise UnsupportedModelError(
                f"strategy={name!r} would run {kind} on all tokens, but does not know its {', '.join(unknown)}: choose "
                "'latent_kv'."
            )
        check_forward(layer)

    def attend(self, query_BSMK: Tensor, latent_B1SL: Tensor, key_B1SR: Tensor, settings: dict[str, Any]) -> Tensor:
        return self.attention.latents.attend_in_chunks(
            query_BSMK,
            latent_B1SL.squeeze(1),
            key_B1SR.squeeze(1),
            True,
            self.chunks,
            self.expand,
            partial(self.attention.attend_locally, **settings),
        )
