"""The forward of an MLA module, run on the latents of the whole sequence. This is the strategy "latent_qkv".

Query latents and KV latents are computed for the local tokens and gathered. From there on the module's code runs as if
it had all tokens and only the local heads, so RoPE, scales and other particulars of a family need no code here. It runs
on a stand-in for the module, in which these submodules are replaced:

| submodule                     | result of its call in the stand-in                                                  |
|-------------------------------|-------------------------------------------------------------------------------------|
| q_a_proj                      | the normalised query latents of all tokens                                          |
| kv_a_proj_with_mqa            | the normalised KV latents and the RoPE keys of all tokens                           |
| q_a_layernorm, kv_a_layernorm | their input, which is normalised already                                            |
| q_b_proj                      | the local heads of all tokens; kv_b_proj is called for them by the layer's strategy |
| o_proj                        | the output of the local tokens, after an all-to-all has returned all of their heads |

Shape letters:
    B batch                             D hidden width
    T tokens of this rank               L latent width of keys and values
    S tokens of the whole sequence      Q latent width of queries
    H all heads                         R width of the shared RoPE key
    M heads of this rank                V value width, and W = M*V
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import gather_now
from ..comm.group import SequenceGroup
from ..layout.documents import Documents
from ..layout.exchange import HeadsToTokens
from ..layout.gather import gather_rows
from ..layout.widths import MLAWidths
from .arguments import by_name
from .families import UnsupportedModelError
from .head_projections import project
from .local_attention import as_autocast

#: The keyword argument in which the documents of a forward travel to its attention calls.
DOCUMENTS = "ulysses_documents"


def check_forward(module: nn.Module) -> None:
    """Refuses a module whose forward cannot be run on a stand-in, because it is not a method of the module.

    Methods that were replaced by other methods are fine, and so are the offloading hooks of accelerate.

    Raises:
        UnsupportedModelError: the forward was replaced by another kind of function.
    """
    for forward in (module.forward, vars(module).get("_old_forward", module.forward)):
        if _of_stand_in(forward, module, module) is None:
            kind = type(module).__name__
            raise UnsupportedModelError(
                f"strategy='latent_qkv' runs the forward of {kind} on the latents of all tokens, but {kind}.forward was "
                f"replaced by {forward!r}, which is not a method and would call the submodules itself: choose 'latent_kv'."
            )


def on_latents(module: nn.Module, group: SequenceGroup, heads: slice) -> Callable[..., Any]:
    """Returns a forward that runs an MLA module with a query latent on the latents of all tokens.

    It calls each submodule once, as the module's forward does, so that hooks fire; under ZeRO-3 they gather the weights.
    Nothing is written to the module. Each call has a stand-in of its own, so calls may overlap: nested, recomputed, or in
    several threads, as long as all ranks issue their collectives in the same order.

    Args:
        module: the attention module, which `check_forward` has accepted.
        group: the sequence-parallel group.
        heads: the local heads, which are passed to `q_b_proj(x, heads=heads)`.
    """
    original, signature = module.forward, inspect.signature(module.forward)
    widths = MLAWidths.of(module)

    # Positions and documents are looked up by identity. Traced, each forward would be a graph of its own.
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
        real: Mapping[str, Any] = module._modules
        q_BTQ = real["q_a_layernorm"](real["q_a_proj"](x_BTD))
        latent_BTL, k_rot_BTR = real["kv_a_proj_with_mqa"](x_BTD).split([widths.latent, widths.rope], dim=-1)
        kv_BTD = torch.cat([real["kv_a_layernorm"](latent_BTL), k_rot_BTR], dim=-1)
        q_BSQ, kv_BSD = gather_rows(as_autocast(q_BTQ, kv_BTD), group, True)

        def to_tokens(out_BSW: Tensor) -> Tensor:
            out_SBMV = out_BSW.unflatten(-1, (-1, widths.value)).transpose(0, 1)
            out_TBHV = HeadsToTokens.apply(out_SBMV, widths.heads, group, True)
            return real["o_proj"](out_TBHV.transpose(0, 1).flatten(2))

        answers: dict[str, Callable[[Tensor], Tensor]] = {
            "q_a_proj": lambda _: q_BSQ,
            "q_a_layernorm": lambda x: x,
            "q_b_proj": lambda x: project(module, "q_b_proj", x, heads),
            "kv_a_proj_with_mqa": lambda _: kv_BSD,
            "kv_a_layernorm": lambda x: x,
            "o_proj": to_tokens,
        }
        # The module only looks at the shape of its input. Anything that computed with it would raise.
        given["hidden_states"] = x_BTD.new_empty(*kv_BSD.shape[:2], x_BTD.shape[-1], device="meta")
        run = _of_stand_in(original, module, _stand_in(module, answers))
        assert run is not None  # check_forward
        return run(**given)

    return forward


def _stand_in(module: nn.Module, answers: Mapping[str, Callable[[Tensor], Tensor]]) -> nn.Module:
    """Returns a shallow copy of the module in which calls of some submodules have other results.

    The copy has the module's class and shares its parameters, buffers, submodules and hooks. Its methods are bound to
    the copy. Attributes that its forward assigns stay on the copy.
    """
    copied = object.__new__(type(module))
    attributes = vars(copied)
    for name, value in vars(module).items():
        of_copy = _of_stand_in(value, module, copied)
        attributes[name] = value if of_copy is None else of_copy
    # Instance attributes are found before the submodules of the same names.
    attributes.update({name: _Submodule(module._modules[name], answer) for name, answer in answers.items()})
    return copied


def _of_stand_in(function: Any, module: nn.Module, stand_in: nn.Module) -> Callable[..., Any] | None:
    """Returns a method of the module as a method of the stand-in; None if `function` is no method of the module."""
    if isinstance(function, MethodType) and function.__self__ is module:
        return MethodType(function.__func__, stand_in)
    # The hooks of accelerate: a function of the module and of what its forward takes.
    if isinstance(function, functools.partial) and function.args and function.args[0] is module:
        return functools.partial(function.func, stand_in, *function.args[1:], **function.keywords)
    return None


class _Submodule:
    """Stands in for a submodule: calls give `answer`, everything else is looked up in the submodule."""

    def __init__(self, module: nn.Module | None, answer: Callable[[Tensor], Tensor]) -> None:
        self._module, self._answer = module, answer

    def __call__(self, x: Tensor) -> Tensor:
        return self._answer(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _of_all_tokens(x: Any, documents: Documents, group: SequenceGroup) -> Any:
    """Gathers tensors [B or 1, T, ...], or a tuple of them, once per forward for all layers."""
    if isinstance(x, tuple):
        return tuple(_of_all_tokens(tensor, documents, group) for tensor in x)
    known = documents.cache.get(("of_all_tokens", id(x)))
    # The tensor is kept along with the result, so that no other tensor can have its id.
    if known is None or known[0] is not x:
        local = torch.view_as_real(x) if x.is_complex() else x
        whole = gather_now(local.transpose(0, 1), group, "setup").transpose(0, 1)
        known = x, torch.view_as_complex(whole.contiguous()) if x.is_complex() else whole
        documents.cache["of_all_tokens", id(x)] = known
    return known[1]
