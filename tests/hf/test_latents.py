"""strategy="latent_kv" in models: what test_parity.py and its neighbours say of packed."""

import pytest
import torch
from models import FAMILIES, assert_gradients, gradients, packed_batch, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, compare, sharded_step

import ds_mla_ulysses as dmu


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size,kind", [(2, "packed"), (4, "left")])
def test_every_family(family, size, kind):
    run_ranks(size, compare, family, kind, strategy="latent_kv")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "packed", "right"])
def test_batches(kind, size):
    run_ranks(size, compare, "deepseek_v3", kind, strategy="latent_kv")


def test_heads_that_do_not_divide():
    run_ranks(4, compare, "glm4_moe_lite", "packed", heads=7, strategy="latent_kv")


def with_moba():
    dmu.register_moba(dmu.MoBAConfig(4, 3), "moba_latents")
    compare("deepseek_v3", "packed", "moba_latents", reference="moba_latents", strategy="latent_kv")


def test_moba_inside():
    run_ranks(2, with_moba)


def step_of(prepare):
    model = tiny_model("deepseek_v3", torch.float32)
    handle = dmu.parallelize(model, strategy="latent_kv")
    prepare(model)
    return sharded_step(model, packed_batch(DOCUMENTS), handle)


def recomputes(reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))

    want, got = step_of(lambda model: None), step_of(prepare)
    assert want[0] == got[0] and all(torch.equal(got[1][name], g) for name, g in want[1].items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_identical_gradients(reentrant):
    run_ranks(2, recomputes, reentrant)


def compiles():
    def prepare(model):
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

    want, got = step_of(lambda model: None), step_of(prepare)
    assert abs(want[0] - got[0]) < 1e-6
    assert_gradients(got[1], want[1], 1e-5)


def test_compiled_layers():
    run_ranks(2, compiles)


def frozen(trained):
    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(trained in name)
    batch = random_batch(2, 22)
    want = reference_step(plain, batch)
    handle = dmu.parallelize(model, strategy="latent_kv")
    _, grads, _ = sharded_step(model, batch, handle)
    assert set(grads) == set(want[1])
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("trained", ["kv_b_proj", "layers.0.self_attn.kv_a_proj", "q_b_proj", "embed_tokens"])
def test_frozen_parameters(trained):
    run_ranks(2, frozen, trained)


def under_autocast():
    batch, settings = random_batch(1, 24), dict(dtype=torch.float32, initializer_range=0.1)
    exact = reference_step(tiny_model("youtu", **settings), batch)
    with torch.autocast("cpu", torch.bfloat16):
        want = reference_step(tiny_model("youtu", **settings), batch)
        model = tiny_model("youtu", **settings)
        loss, grads, _ = sharded_step(model, batch, dmu.parallelize(model, strategy="latent_kv"))
    assert abs(loss - want[0]) <= 2 * max(abs(want[0] - exact[0]), 1e-3)
    budget = 2 * max(float((want[1][n] - g).norm() / g.norm()) for n, g in exact[1].items())
    assert_gradients(grads, exact[1], budget)


def test_autocast():
    run_ranks(2, under_autocast)


def paused_and_restored():
    model, batch = tiny_model("deepseek_v3"), random_batch(1, 16)
    want = reference_step(tiny_model("deepseek_v3"), batch)
    handle = dmu.parallelize(model, strategy="latent_kv")
    with handle.paused():
        assert torch.equal(model(input_ids=batch["input_ids"], use_cache=False).logits, want[2])
    handle.restore()
    got = reference_step(model, batch)
    assert torch.equal(got[2], want[2]) and all(torch.equal(gradients(model)[n], g) for n, g in want[1].items())


def test_paused_and_restored():
    run_ranks(2, paused_and_restored)


def refused(what):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama" if what == "dense" else "deepseek_v3")
    if what == "lora":
        model = get_peft_model(model, LoraConfig(target_modules=["kv_b_proj"]))
    dmu.parallelize(model, strategy="latent_kv")


@pytest.mark.parametrize(
    "what,message",
    [
        ("dense", "strategy='latent_kv' is for MLA, LlamaAttention has no latents: choose 'packed'"),
        (
            "lora",
            r"kv_b_proj is a Linear \(an adapter or a quantised layer\), of which rows would be wrong: choose 'packed'",
        ),
    ],
)
def test_refused(what, message):
    raises_on_ranks(2, dmu.UnsupportedModelError, message, refused, what)
