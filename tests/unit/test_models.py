"""The tiny models attend, are deterministic and do not explode; the oracles agree, and can fail."""

import pytest
import torch
from models import (
    FAMILIES,
    TEXT_VOCAB,
    assert_gradients_close,
    document_lengths,
    gradient_errors,
    left_padded_batch,
    packed_batch,
    padded_batch,
    per_document_step,
    random_batch,
    reference_loss,
    reference_step,
    tiny_config,
    tiny_model,
)

DOCUMENTS = [[13, 5, 15], [20, 1, 12]]
WITH_ROUTERS = [family for family in FAMILIES if family not in ("minicpm3", "youtu")]
FP32 = torch.finfo(torch.float32).eps


pytestmark = pytest.mark.usefixtures("one_thread")


def dense(family):
    """Settings that leave the family no router; LongCat-Flash has one in every layer."""
    if family in ("glm4_moe_lite", "axk1"):
        return dict(mlp_layer_types=["dense", "dense"])
    return dict(first_k_dense_replace=2) if family in WITH_ROUTERS else {}


def attentions(model):
    return [module for module in model.modules() if hasattr(module, "kv_lora_rank")]


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_moderate(family):
    model = tiny_model(family)
    loss, grads, logits = reference_step(model, random_batch(2, 40))
    assert 5 < loss < 50 and logits.isfinite().all()
    assert not gradient_errors(grads, grads)[0][0]  # finite, or it would be infinitely far from itself
    norms = {name: float(grad.norm()) for name, grad in grads.items()}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    assert max(norms.values()) < 0.8 * total and min(norms.values()) > 1e-3 * total
    absent = {name for name, _ in model.named_parameters()} - set(grads)
    assert all("vision_tower" in name or "mm_projector" in name for name in absent)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_later_token_sees_an_early_one_and_no_earlier_does(family):
    model = tiny_model(family)
    ids = random_batch(1, 40)["input_ids"]
    other = ids.clone()
    other[0, 2] = 3 + (ids[0, 2] - 2) % (TEXT_VOCAB - 3)
    with torch.no_grad():
        logits, moved = (model(input_ids=x, use_cache=False).logits[0] for x in (ids, other))
    change = (moved - logits).norm(dim=-1) / logits.norm(dim=-1)
    assert change[:2].max() < 1e-6
    assert change[3:].min() > 1e-3 and change[3:].mean() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_structure(family):
    config = tiny_config(family, heads=6)
    layers = attentions(tiny_model(family, heads=6, layers=4))
    assert len(layers) == 4 and {layer.num_heads for layer in layers} == {6}
    layer = layers[0]
    widths = [layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim, layer.kv_lora_rank, layer.q_lora_rank]
    assert len(set(widths)) == 5 and (layer.q_lora_rank is None) == (family == "deepseek_v2")
    assert getattr(config, "text_config", config)._experts_implementation == "eager"
    experts = [m for m in tiny_model(family).modules() if type(m).__name__.endswith("Experts")]
    assert len(experts) == (family in WITH_ROUTERS)  # one dense layer, then one with experts


def test_unknown_family():
    with pytest.raises(ValueError, match="'gpt2', wanted one of deepseek_v2"):
        tiny_config("gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_depend_on_the_seed_alone(family):
    first = tiny_model(family, seed=1)
    torch.manual_seed(99)
    again, other = tiny_model(family, seed=1).state_dict(), tiny_model(family, seed=2).state_dict()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, again[name]), name
        # what is constant in the real initialisation is not: norms, biases, correction biases
        if not name.endswith("position_embeddings"):
            assert not torch.equal(weight, other[name]), name


def test_dtype_mode_and_experts():
    model = tiny_model("kimi_k25", torch.float32, train=False, experts="grouped_mm")
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.text_config._experts_implementation == "grouped_mm"
    batch = random_batch(1, 20)
    want = reference_step(tiny_model("kimi_k25", torch.float32), batch)
    torch.testing.assert_close(reference_step(model, batch)[2], want[2], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_alone_equal_packed_ones(family):
    batch = packed_batch(DOCUMENTS)
    want = reference_step(tiny_model(family), batch)
    got = per_document_step(tiny_model(family), batch)
    # routers are in fp32, whose products depend on the number of rows
    loss, gradient = (FP32, 10 * FP32) if family in WITH_ROUTERS else (1e-9, 1e-9)
    assert abs(got[0] - want[0]) < loss
    torch.testing.assert_close(got[2], want[2], rtol=100 * loss, atol=100 * loss)
    assert_gradients_close(got[1], want[1], gradient)


@pytest.mark.parametrize("family", [family for family in WITH_ROUTERS if family != "longcat_flash"])
def test_without_routers_documents_alone_are_exact(family):
    batch = packed_batch(DOCUMENTS)
    want = reference_step(tiny_model(family, **dense(family)), batch)
    got = per_document_step(tiny_model(family, **dense(family)), batch, DOCUMENTS)
    assert abs(got[0] - want[0]) < 1e-9
    assert_gradients_close(got[1], want[1], FP32 if family == "deepseek_v2" else 1e-9)  # that one's rope is in fp32


def test_long_rope_depends_on_the_longest_position():
    for documents, apart in (([[25, 8]], True), ([[25, 28]], False), ([[20, 13]], False)):
        batch = packed_batch(documents)
        packed, alone = reference_step(tiny_model("minicpm3"), batch), per_document_step(tiny_model("minicpm3"), batch)
        assert (abs(packed[0] - alone[0]) > 1e-3) == apart


def test_mistral4_scales_queries_from_position_16_on():
    batch = random_batch(1, 40)
    rope = tiny_config("mistral4").rope_parameters
    want = reference_step(tiny_model("mistral4"), batch)[2][0]
    got = reference_step(tiny_model("mistral4", rope_parameters=rope | dict(llama_4_scaling_beta=0.0)), batch)[2][0]
    change = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert change[:16].max() < 1e-6 and change[16:].mean() > 0.01


def test_a_mask_of_ones_does_not_join_documents():
    batch = packed_batch(DOCUMENTS)
    masked = batch | dict(attention_mask=torch.ones_like(batch["input_ids"]))
    model = tiny_model("deepseek_v3")
    want, got = reference_step(model, batch), reference_step(model, masked)
    assert got[0] == want[0]
    with torch.no_grad():  # what it guards against
        inputs = {name: x for name, x in masked.items() if name != "labels"}
        joined = model(**inputs, use_cache=False).logits
    assert (joined - want[2]).norm() > 0.1 * want[2].norm()


def test_a_padding_mask_is_passed():
    batch = left_padded_batch([30, 18])
    logits = reference_step(tiny_model("youtu"), batch)[2]
    alone = {name: batch[name][1:, 12:] for name in ("input_ids", "labels")}
    torch.testing.assert_close(logits[1:, 12:], reference_step(tiny_model("youtu"), alone)[2], rtol=1e-6, atol=1e-6)
    with pytest.raises(AssertionError, match="takes no padding"):
        per_document_step(tiny_model("youtu"), batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_loss_is_that_of_transformers(dtype):
    batch = random_batch(2, 15)
    model = tiny_model("deepseek_v3", dtype)
    for num_items in (None, 7):
        extra = {} if num_items is None else dict(num_items_in_batch=num_items)
        with torch.no_grad():
            out = model(**batch, use_cache=False, **extra)
        got = reference_loss(out.logits, batch["labels"], num_items)
        assert got.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(got, out.loss.to(got.dtype), rtol=1e-6, atol=0)


def test_batches():
    batch = packed_batch(DOCUMENTS, vocab=20)
    assert document_lengths(batch) == DOCUMENTS
    assert document_lengths(random_batch(2, 7)) == [[7], [7]]
    assert batch["position_ids"][1].tolist() == [*range(20), 0, *range(12)]
    assert batch["input_ids"].min() >= 3 and batch["input_ids"].max() < 20
    assert all(x.dtype == torch.int64 and x.shape == (2, 33) for x in batch.values())
    assert not torch.equal(random_batch(2, 7, 1)["input_ids"], random_batch(2, 7, 2)["input_ids"])
    with pytest.raises(AssertionError, match=r"different lengths: \[4, 5\]"):
        packed_batch([[2, 3], [4]])

    batch = left_padded_batch([2, 4], 5)
    assert batch["attention_mask"].tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 2, 3]]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert padded_batch([2], 4, "right")["attention_mask"].tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize(
    "change",
    [
        dict(a=torch.tensor([1.0, 2.1])),
        dict(a=torch.tensor([1.0, float("nan")])),
        dict(b=torch.tensor([float("inf")])),
        dict(b=torch.zeros(1)),
        dict(c=torch.tensor([1.0])),
    ],
)
def test_wrong_gradients_are_found(change):
    want = dict(a=torch.tensor([1.0, 2.0]), b=torch.tensor([1e-3]), z=torch.zeros(3))
    assert_gradients_close(dict(want), want, 0)
    (name,) = change
    with pytest.raises(AssertionError, match=f"'{name}"):
        assert_gradients_close(want | change, want, 1e-3)
    assert_gradients_close(want | change, want, 1e-3, skip=(name,))


def test_absent_gradients_are_zeros():
    want = dict(a=torch.tensor([1.0, 2.0]), z=torch.zeros(3))
    assert_gradients_close(dict(a=want["a"]), want, 0)
    assert_gradients_close(want, dict(a=want["a"]), 0)
    with pytest.raises(AssertionError, match="has no gradient"):
        assert_gradients_close(dict(z=want["z"]), want, 1e-3)
    with pytest.raises(AssertionError, match="wanted no gradient"):
        assert_gradients_close(want, dict(z=want["z"]), 1e-3)
    with pytest.raises(AssertionError, match="no gradients to compare"):
        assert_gradients_close({}, {}, 1)
    with pytest.raises(AssertionError, match="gradient of shape"):
        assert_gradients_close(dict(a=torch.ones(1)), want, 1)
