"""An MLA module's own forward, run on the latents of the whole sequence: what "latent_qkv" is.

Query and key-value latents are made of this rank's tokens and gathered; from there on the module's own code runs as
if it had all tokens and the own heads, so that rope, scales and whatever else a family does need no code here.

| submodule                           | what its call gives while the module runs                          |
|-------------------------------------|--------------------------------------------------------------------|
| q_a_proj                            | the normalised query latents of all tokens                         |
| kv_a_proj_with_mqa                  | the normalised latents and the rope keys of all tokens             |
| q_a_layernorm, kv_a_layernorm       | what they are given: that has been normalised                      |
| q_b_proj                            | the own heads, of all tokens; `LayerStrategy` asks kv_b_proj so    |
| o_proj                              | of the own tokens, whose heads have come back by an all-to-all     |

Letters: B batch · T this rank's tokens · S all tokens · H all heads · M own heads · D hidden width · L, Q latents of
keys and values, and of queries · R rope key · V value width · W = M*V.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import gather_now
from ..comm.group import SequenceGroup
from ..layout.documents import Documents
from ..layout.exchange import HeadsToTokens
from ..layout.gather import gather_rows
from ..layout.widths import MLAWidths
from .calls import by_name
from .kernel import as_autocast
from .rows import project

#: The keyword argument in which the documents of a forward travel to its attention calls.
DOCUMENTS = "ulysses_documents"


def on_latents(module: nn.Module, group: SequenceGroup, heads: slice) -> Callable[..., Any]:
    """A forward for an MLA attention module with a query latent.

    It calls each submodule once, as the module itself does, so that hooks fire, which gather weights under ZeRO-3.
    The submodules' places are taken while it runs only, and nothing of a call is kept.

    Args:
        heads: the own ones, for which its `q_b_proj(x, heads=...)` is asked.
    """
    original, signature = module.forward, inspect.signature(module.forward)
    widths = MLAWidths.of(module)

    # Positions and documents are looked up by identity: traced, each forward would be a graph of its own.
    @functools.wraps(original)
    @torch.compiler.disable
    def forward(*args: Any, **kwargs: Any) -> Any:
        documents: Documents | None = kwargs.get(DOCUMENTS)
        if documents is None or group.size == 1:
            return original(*args, **kwargs)
        given = by_name(signature, args, kwargs)
        x_BTD: Tensor = given["hidden_states"]
        for name in ("position_embeddings", "position_ids"):
            if given.get(name) is not None:
                given[name] = _of_all_tokens(given[name], documents, group)
        real = module._modules
        q_BTQ = real["q_a_layernorm"](real["q_a_proj"](x_BTD))
        latent_BTL, k_rot_BTR = real["kv_a_proj_with_mqa"](x_BTD).split([widths.latent, widths.rope], dim=-1)
        kv_BTD = torch.cat([real["kv_a_layernorm"](latent_BTL), k_rot_BTR], dim=-1)
        q_BSQ, kv_BSD = gather_rows(as_autocast(q_BTQ, kv_BTD), group, True)

        def to_tokens(out_BSW: Tensor) -> Tensor:
            out_SBMV = out_BSW.unflatten(-1, (-1, widths.value)).transpose(0, 1)
            out_TBHV = HeadsToTokens.apply(out_SBMV, widths.heads, group, True)
            return real["o_proj"](out_TBHV.transpose(0, 1).flatten(2))

        answers = {
            "q_a_proj": lambda _: q_BSQ,
            "q_a_layernorm": lambda x: x,
            "q_b_proj": lambda x: project(module, "q_b_proj", x, heads),
            "kv_a_proj_with_mqa": lambda _: kv_BSD,
            "kv_a_layernorm": lambda x: x,
            "o_proj": to_tokens,
        }
        places = {name: _Place(real[name], answer) for name, answer in answers.items()}
        # Of the shape that the module asks it for; whatever would compute with it raises.
        given["hidden_states"] = x_BTD.new_empty(*kv_BSD.shape[:2], x_BTD.shape[-1], device="meta")
        vars(module).update(places)  # found before the submodules of these names
        try:
            return original(**given)
        finally:
            for name in places:
                del vars(module)[name]

    return forward


class _Place:
    """A submodule, but for what its call gives."""

    def __init__(self, module: nn.Module, answer: Callable[[Tensor], Tensor]) -> None:
        self._module, self._answer = module, answer

    def __call__(self, x: Tensor) -> Tensor:
        return self._answer(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_all_tokens(x: Any, documents: Documents, group: SequenceGroup) -> Any:
    """Tensors [B or 1, T, ...], or a tuple of them, of all tokens; gathered once per forward, for all layers."""
    if isinstance(x, tuple):
        return tuple(_of_all_tokens(part, documents, group) for part in x)
    known = documents.cache.get(("of_all_tokens", id(x)))
    if known is None or known[0] is not x:  # kept along with it, so that no other tensor can have its id
        parts = torch.view_as_real(x) if x.is_complex() else x
        whole = gather_now(parts.transpose(0, 1), group, "setup").transpose(0, 1)
        known = x, torch.view_as_complex(whole.contiguous()) if x.is_complex() else whole
        documents.cache["of_all_tokens", id(x)] = known
    return known[1]
