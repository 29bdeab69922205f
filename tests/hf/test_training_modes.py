"""Frozen parameters and autocast: what is trained gets one process's gradient, and nothing is left in flight."""

import pytest
import torch
from models import assert_gradients, gradients, random_batch, reference_step, tiny_model
from rank_pool import run_ranks
from test_parity import sharded_step

import ds_mla_ulysses as dmu


def frozen_but(trained, checkpointing):
    batch = random_batch(2, 22)
    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(any(part in name for part in trained))
    want = reference_step(plain, batch)
    handle = dmu.parallelize(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    with dmu.TrafficMeter() as meter:
        loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0])) and set(grads) == set(want[1])
    assert_gradients(grads, want[1], 1e-6)
    return meter.calls["all_to_all", "backward"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "trained,exchanges",
    [
        (["kv_b_proj"], 5),  # no gradient flows into the first layer's shared key: one exchange fewer
        (["layers.0.self_attn.q_a_proj"], 5),
        (["layers.1.self_attn.kv_a_proj"], 3),
        (["lm_head"], 0),
        (["embed_tokens"], 6),
    ],
)
def test_frozen_parameters(trained, exchanges, checkpointing):
    counts = run_ranks(2, frozen_but, trained, checkpointing)
    # With recomputation transformers makes the embeddings' output require gradients, so all are exchanged.
    assert checkpointing or counts == [exchanges] * 2


def under_autocast():
    batch = random_batch(1, 24)
    settings = dict(dtype=torch.float32, initializer_range=0.1)
    exact = reference_step(tiny_model("youtu", **settings), batch)
    with torch.autocast("cpu", torch.bfloat16):
        want = reference_step(tiny_model("youtu", **settings), batch)
        model = tiny_model("youtu", **settings)
        handle = dmu.parallelize(model)
        loss, grads, _ = sharded_step(model, batch, handle)
    noise = max(abs(want[0] - exact[0]), 1e-3)
    assert abs(loss - want[0]) <= 2 * noise
    budget = 2 * max(float((want[1][n] - g).norm() / g.norm()) for n, g in exact[1].items())
    assert_gradients(grads, exact[1], budget)
    assert gradients(model).keys() == exact[1].keys()


def test_autocast():
    run_ranks(2, under_autocast)
