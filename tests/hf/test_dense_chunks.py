"""head_chunks of models without latents: multi-head, grouped and multi-query attention, with everything that layers have."""

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, random_batch, reference_step, tiny_model
from rank_pool import run_ranks
from test_dense import dense
from test_hf_moba import moba_model, on_ranks
from test_parity import DOCUMENTS, sharded_step

import ds_mla_ulysses as dmu

WAYS = {
    "packed": dict(strategy="packed"),
    "gather_kv": dict(strategy="gather_kv"),
    "head_tail": dict(strategy="gather_kv", split="head_tail"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
#: Norms of q and k, sinks of each head, soft caps with windows, and windows in every layer.
FAMILIES = ("llama", "qwen3", "gpt_oss", "gemma2", "mistral")


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, kind):
    run_ranks(2, dense, family, kind, S=34, heads=8, kv_heads=2, head_chunks=3)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("way", ["gather_kv", "head_tail"])
def test_gathered(way, family):
    run_ranks(2, dense, family, "packed", heads=6, kv_heads=2, head_chunks=4, **WAYS[way])


@pytest.mark.parametrize("size,heads,kv_heads,chunks", [(1, 6, 2, 4), (2, 7, 1, 3), (4, 10, 5, 2), (4, 8, 2, 2)])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_heads(family, size, heads, kv_heads, chunks):
    """Sinks are those of each chunk's heads."""
    sizes = dict(hidden_size=8 * heads, head_dim=16)
    run_ranks(size, dense, family, "packed", heads=heads, kv_heads=kv_heads, head_chunks=chunks, **sizes)


def same_as_one_chunk(way):
    steps = []
    for chunks in (1, 2, 4):
        model = tiny_model("llama", heads=8, kv_heads=4)
        handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
        steps.append(sharded_step(model, packed_batch(DOCUMENTS), handle))
    for loss, grads, logits in steps[1:]:
        assert abs(loss - steps[0][0]) <= 1e-12 * abs(loss)
        assert (logits - steps[0][2]).abs().max() <= 1e-12 * logits.abs().max()
        assert_gradients(grads, steps[0][1], 1e-8)  # RoPE is in fp32


@EVERY_WAY
def test_to_the_last_digits(way):
    run_ranks(2, same_as_one_chunk, way)


def with_everything(way, what):
    def step(chunks):
        model = tiny_model("llama", torch.float32, heads=8, kv_heads=2)
        handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
        if "reentrant" in what:
            settings = dict(use_reentrant=what == "reentrant")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        if what == "compiled":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        return sharded_step(model, packed_batch(DOCUMENTS), handle)

    want, got = step(1), step(2)
    assert abs(want[0] - got[0]) < 1e-6
    assert_gradients(got[1], want[1], 1e-5)


@pytest.mark.parametrize("what", ["reentrant", "not reentrant", "compiled"])
@pytest.mark.parametrize("way", ["packed", "head_tail"])
def test_with_recomputation_and_compiled(way, what):
    run_ranks(2, with_everything, way, what)


def frozen(trained):
    plain, model = (tiny_model("llama", heads=8, kv_heads=4) for _ in range(2))
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(trained in name)
    want = reference_step(plain, random_batch(2, 22))
    handle = dmu.parallelize(model, head_chunks=2)
    _, grads, _ = sharded_step(model, random_batch(2, 22), handle)
    assert_gradients(grads, want[1], 1e-6)
    with torch.no_grad():
        model(**handle.shard(random_batch(1, 16)).inputs)


@pytest.mark.parametrize(
    "trained", ["layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"]
)
def test_frozen_and_without_gradients(trained):
    """Only the queries, the keys or the values of the last layer have a gradient."""
    run_ranks(2, frozen, trained)


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("name", ["moba", "moba_mixed"])
@pytest.mark.parametrize("way", ["packed", "head_tail"])
def test_moba(way, name, kind):
    run_ranks(2, on_ranks, "llama", kind, name, heads=8, kv_heads=4, head_chunks=3, **WAYS[way])


def switched(way):
    dense, sparse = [], []
    for chunks in (1, 3):
        model = moba_model("llama", heads=8, kv_heads=2)
        handle = dmu.parallelize(model, head_chunks=chunks, **WAYS[way])
        for steps, enabled in ((dense, False), (sparse, True)):
            dmu.set_moba(model, enabled)
            model.zero_grad()
            steps.append(sharded_step(model, packed_batch(DOCUMENTS), handle))
    for steps in (dense, sparse):
        assert abs(steps[0][0] - steps[1][0]) <= 1e-12 * abs(steps[0][0])
        assert_gradients(steps[1][1], steps[0][1], 1e-8)
    assert abs(dense[0][0] - sparse[0][0]) > 1e-3
    assert gradients(model)


@pytest.mark.parametrize("way", ["packed", "head_tail"])
def test_switch_to_full_attention_and_back(way):
    run_ranks(2, switched, way)
