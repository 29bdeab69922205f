"""The auxiliary loss of MoE routers over a group equals that of one process: value and all gradients, fp64."""

import contextlib
import sys
from unittest import mock

import pytest
import torch
from models import (
    assert_gradients,
    gradients,
    packed_batch,
    padded_batch,
    random_batch,
    reference_loss,
    tiny_config,
    tiny_model,
)
from rank_pool import raises_on_ranks, run_ranks

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "olmoe", "granitemoe", "phimoe")
#: Large beside the cross entropy, so that its gradient shows in every parameter.
COEFFICIENT = 3.0
#: Eager attention takes its softmax in fp32, in which transformers' own masks are NaN if they are fp64's.
EAGER = ("gpt_oss",)
#: Relative tolerances of the value and the gradients. GraniteMoE's router logits are fp32.
RTOL = dict.fromkeys(FAMILIES, (1e-8, 1e-6)) | {"gpt_oss": (1e-5, 1e-4), "granitemoe": (1e-6, 1e-5)}


def batch_of(kind, family=None):
    if kind == "packed":
        return packed_batch([[13, 5, 15], [20, 1, 12]])
    if kind in ("left", "right"):
        # In eager attention a row without keys averages all of them, those of added padding too: the length is even.
        return padded_batch([33, 21], 34 if family in EAGER else 33, kind)
    return random_batch(2, 33 if kind == "odd" else 32)


def model_of(family, **overrides):
    eager = dict(attn_implementation="eager", dtype=torch.float32) if family in EAGER else {}
    return tiny_model(family, **eager | overrides)


@contextlib.contextmanager
def wide_reference(model):
    """The model's function sums in fp32; here it is computed as the formula is written, in fp64."""

    def load_balancing(gate_logits, num_experts, top_k, attention_mask=None):
        routing = torch.cat([torch.softmax(layer, dim=-1) for layer in gate_logits])
        chosen = torch.nn.functional.one_hot(routing.topk(top_k, dim=-1).indices, num_experts).sum(1).double()
        if attention_mask is not None:
            kept = attention_mask.flatten().repeat(len(gate_logits)).bool()
            routing, chosen = routing[kept], chosen[kept]
        return num_experts * (chosen.mean(0) * routing.mean(0)).sum()

    with mock.patch.object(sys.modules[type(model).__module__], "load_balancing_loss_func", load_balancing):
        yield


def one_process(family, batches, wide=True, num_items=None, **overrides):
    """The losses and the gradients of the sum over micro-batches."""
    model = model_of(family, **overrides)
    losses = []
    with wide_reference(model) if wide else contextlib.nullcontext():
        for batch in batches:
            inputs = {name: x for name, x in batch.items() if name != "labels"}
            out = model(**inputs, output_router_logits=True, use_cache=False)
            (reference_loss(out.logits, batch["labels"], num_items) + COEFFICIENT * out.aux_loss).backward()
            losses.append(float(out.aux_loss.detach()))
    return losses, gradients(model)


def over_ranks(model, handle, batches, num_items=None, group=None):
    losses = []
    for batch in batches:
        shard = handle.shard(batch)
        out = model(**shard.inputs, output_router_logits=True)
        (handle.loss(out.logits, shard, num_items) + COEFFICIENT * out.aux_loss).backward()
        losses.append(float(out.aux_loss.detach()))
    handle.sum_gradients(group=group)
    return losses, gradients(model)


def compare(family, kind, split="contiguous", strategy="packed"):
    import ds_mla_ulysses as dmu

    batches, (rtol, gradient_rtol) = [batch_of(kind, family)], RTOL[family]
    want, want_gradients = one_process(family, batches)
    model = model_of(family)
    handle = dmu.parallelize(model, split=split, strategy=strategy)
    got, got_gradients = over_ranks(model, handle, batches)
    assert got == pytest.approx(want, rel=rtol)
    assert_gradients(got_gradients, want_gradients, gradient_rtol)
    stock, stock_gradients = one_process(family, batches, wide=False)
    assert got == pytest.approx(stock, rel=1e-5)
    assert_gradients(got_gradients, stock_gradients, max(gradient_rtol, 1e-5))
    return got


@pytest.mark.parametrize("kind", ["odd", "packed", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_process(family, kind):
    first, second = run_ranks(2, compare, family, kind)
    assert first == second


def test_an_odd_length_on_4_ranks():
    run_ranks(4, compare, "qwen3_moe", "odd", "head_tail", "gather_kv")
