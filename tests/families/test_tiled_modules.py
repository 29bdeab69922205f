"""What runs in tiles of tokens, of each model type that is equal: tile by tile it computes what it computes at once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from entries import Entry, entries
from test_families import RESULT
from torch import Tensor, nn

from ds_mla_ulysses.checking.recipe import build, small_config
from ds_mla_ulysses.checking.run import make_request
from ds_mla_ulysses.hf.families import UnsupportedModelError, find_attention
from ds_mla_ulysses.hf.tiled_layers import TiledForward, tiled_forwards

#: Experts of each signature, routers in fp32 and with biases, sparse activations, LayerNorms, Conv1D, norms in MLPs.
FAST = ("deepseek_v3", "gpt_oss", "mixtral", "gemma3n_text, sparse activations", "cohere2_moe", "gpt2", "gpt_neox")
#: Encoders and others whose MLPs are not modules of their own, or whose experts have another signature.
WITHOUT = (
    "bert",
    "bert-generation",
    "biogpt",
    "camembert",
    "ctrl",
    "data2vec-text",
    "dbrx",
    "dory",
    "electra",
    "ernie",
    "jetmoe",
    "opt",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "xlm-roberta",
    "xlm-roberta-xl",
)
EQUAL = tuple(name for name, row in RESULT["models"].items() if row["verdict"] == "equal")


def text_model_of(name: str, entry: Entry) -> nn.Module:
    request = make_request(entry.model_type, 2, ("packed",), variant=entry.settings)
    request = dataclasses.replace(
        request, model=name, config={**request.config, **entry.config}, with_images=entry.with_images
    )
    torch.manual_seed(0)
    return find_attention(build(request, small_config(request)).double()).text_model


def inputs_of(forward: TiledForward, width: int) -> list[Tensor]:
    """Seven tokens, with the experts of each if the module takes them."""
    vectors = [p for p in forward.module.parameters(recurse=False) if p.ndim == 1]
    if forward.kind == "norm" and vectors:
        width = len(vectors[0])
    elif isinstance(forward.module, nn.RMSNorm):
        (width,) = forward.module.normalized_shape
    x = torch.randn(7, width, dtype=torch.float64, requires_grad=True)
    if forward.kind != "experts":
        return [x]
    return [x, torch.arange(14).view(7, 2) % 4, torch.rand(7, 2, dtype=torch.float64, requires_grad=True)]


def outcome(call, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor | None]:
    """The results, and gradients of all inputs and parameters."""
    results = call(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    floats = [x for x in results if x.is_floating_point()]
    torch.manual_seed(2)
    grads = [torch.randn_like(x) for x in floats]
    return [*floats, *torch.autograd.grad(floats, parameters, grads, allow_unused=True)]


def compare(name: str) -> None:
    text_model = text_model_of(name, entries()[name])
    seen = set()
    for module, forward in tiled_forwards(text_model, 2):
        if type(module) in seen:
            continue
        seen.add(type(module))
        torch.manual_seed(1)
        inputs = inputs_of(forward, text_model.config.hidden_size)
        wanted = [x for x in [*inputs, *module.parameters()] if x.requires_grad]
        for got, want in zip(outcome(forward, inputs, wanted), outcome(module, inputs, wanted), strict=True):
            if want is None:
                assert got is None
            else:  # norms, routers and some experts compute in fp32
                assert (got - want).norm() <= 1e-6 * want.norm() + 1e-12, (name, type(module).__name__)


@pytest.mark.parametrize("name", FAST)
def test_tiles(name):
    compare(name)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in EQUAL if name not in FAST])
def test_tiles_of_every_model_type(name):
    if name in WITHOUT:
        with pytest.raises(UnsupportedModelError, match="needs MLPs or experts"):
            compare(name)
    else:
        compare(name)
