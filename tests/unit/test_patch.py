"""Undo of a patch, and the local attention, in one process."""

import pytest
import torch
from models import tiny_model

from ds_mla_ulysses.comm.group import SequenceGroup
from ds_mla_ulysses.hf.families import find_attention
from ds_mla_ulysses.hf.local_attention import LocalAttention
from ds_mla_ulysses.hf.moba import kernel_of
from ds_mla_ulysses.hf.patch import ModelPatch
from ds_mla_ulysses.layout.documents import Documents


@pytest.mark.parametrize("had", [True, False])
def test_undo_takes_the_last_replacement_back_first(had):
    model = tiny_model("llama", layers=1)
    found = find_attention(model)
    kernels = [kernel_of(layer, layer.config) for layer in found.layers]
    patch = ModelPatch(model, found, SequenceGroup.of(None), kernels, "packed", 1)
    (layer,) = found.layers
    if had:
        layer.note = "original"
    before = dict(vars(layer))
    patch._replace(layer, "note", "first")
    patch._replace(layer, "note", "second")
    assert layer.note == "second"
    patch.undo()
    assert vars(layer) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2])
def test_eager_attention_of_a_query_without_keys_is_finite(dtype, window):
    """Padding attends to nothing. Eager functions compute the softmax in fp32, whatever the dtype."""
    layer = tiny_model("llama", dtype, "eager", layers=1).model.layers[0].self_attn
    kernel = kernel_of(layer, layer.config)
    assert isinstance(kernel, LocalAttention)
    starts, padding = torch.zeros(1, 6, dtype=torch.bool), torch.zeros(1, 6, dtype=torch.bool)
    starts[:, [0, 2]] = True
    padding[:, :2] = True
    q, k, v = (torch.randn(1, 6, heads, 8, dtype=dtype).requires_grad_() for heads in (4, 2, 2))
    out = kernel(q, k, v, documents=Documents(starts, padding), scale=1.0, window=window)
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert x.isfinite().all()
    tokens = out[:, 2:]
    alone = kernel(q[:, 2:], k[:, 2:], v[:, 2:], documents=Documents(starts[:, 2:]), scale=1.0, window=window)
    torch.testing.assert_close(tokens, alone)
