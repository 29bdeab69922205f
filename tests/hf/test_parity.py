"""The parallelized model equals the plain one in one process: loss, logits, every gradient, fp64."""

import pytest
import torch
from models import (
    FAMILIES,
    assert_gradients,
    gradients,
    packed_batch,
    padded_batch,
    per_document_step,
    random_batch,
    reference_step,
    tiny_model,
)
from rank_pool import run_ranks

# DeepSeek-V2 weighs experts by an fp32 softmax whose products depend on the number of rows; without
# experts it is exact like the others (below).
LOSS, GRADIENT = dict.fromkeys(FAMILIES, 1e-9) | {"deepseek_v2": 2e-8}, 1e-6
DOCUMENTS = [[13, 5, 15], [20, 1, 12]]


def sharded_step(model, batch, handle):
    """Loss, summed gradients and this rank's logits."""
    shard = handle.shard(batch)
    logits = model(**shard.inputs).logits
    loss = handle.loss(logits, shard)
    loss.backward()
    handle.sum_gradients()
    return loss.item(), gradients(model), logits.detach()


def own_tokens(whole, handle):
    """This rank's part of a [B, S, ...] tensor, without the padding that shard_batch adds."""
    size, rank = handle.group.size, handle.group.rank
    chunks = {"contiguous": [rank], "head_tail": [rank, 2 * size - 1 - rank]}[handle.split]
    width = -(-whole.shape[1] // (size * len(chunks)))
    return torch.cat([whole[:, chunk * width : (chunk + 1) * width] for chunk in chunks], dim=1)


def compare(
    family,
    kind,
    implementation="sdpa",
    B=2,
    S=33,
    loss=None,
    gradient=GRADIENT,
    reference="sdpa",
    strategy="packed",
    split="contiguous",
    head_chunks=1,
    **config,
):
    import ds_mla_ulysses as dmu

    if kind == "packed":
        batch, documents = packed_batch(DOCUMENTS[:B]), DOCUMENTS[:B]
    elif kind in ("left", "right"):
        batch = padded_batch([33, 21][-B:], S, kind)
    else:
        batch = random_batch(B, S)
    loss = LOSS[family] if loss is None else loss
    plain = tiny_model(family, attn_implementation=reference, **config)
    if kind == "packed" and family != "minicpm3":  # long rope looks at the longest position of the whole batch
        want = per_document_step(plain, batch, documents)
    else:
        want = reference_step(plain, batch)
    model = tiny_model(family, attn_implementation=implementation, **config)
    handle = dmu.parallelize(model, strategy=strategy, split=split, head_chunks=head_chunks)
    got = sharded_step(model, batch, handle)
    assert abs(got[0] - want[0]) <= loss * max(1, abs(want[0])), (got[0], want[0])
    mine = own_tokens(want[2], handle)
    logits = got[2][:, : mine.shape[1]]
    real = own_tokens(batch["attention_mask"], handle).bool() if "attention_mask" in batch else slice(None)
    assert (logits - mine)[real].abs().max() <= gradient * mine.abs().max()
    assert_gradients(got[1], want[1], gradient)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_row_of_odd_length(family, size):
    run_ranks(size, compare, family, "plain", B=1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["plain", "packed", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_batches(family, kind, size):
    run_ranks(size, compare, family, kind)


@pytest.mark.parametrize("value_width", [16, 24])
def test_key_and_value_widths(value_width):
    """V narrower than K = 24, and as wide."""
    run_ranks(2, compare, "deepseek_v3", "packed", v_head_dim=value_width)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_without_experts_it_is_exact(family):
    run_ranks(2, compare, family, "packed", loss=1e-11, gradient=1e-7, first_k_dense_replace=2)


@pytest.mark.parametrize("kind", ["plain", "packed", "left", "right"])
def test_eager_keeps_its_own_function(kind):
    # Eager attention takes its softmax in fp32. A row without keys averages all S of them, so S is even here.
    run_ranks(2, compare_eager, kind)


def compare_eager(kind):
    compare("deepseek_v3", kind, "eager", S=34, loss=1e-5, gradient=1e-4, dtype=torch.float32, reference="eager")


def test_more_heads():
    run_ranks(4, compare, "glm4_moe_lite", "packed", heads=20)
