"""Models with multi-head, grouped and multi-query attention equal one process; windows, caps and sinks included."""

import pytest
import torch
from models import DENSE, assert_gradients, padded_batch, per_document_step, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import compare, own_tokens, packed_batch, sharded_step

EAGER = {"gemma2", "gpt_oss"}


def dense(family, kind, B=2, S=33, strategy="packed", split="contiguous", head_chunks=1, **config):
    import ds_mla_ulysses as dmu

    # Eager attention takes its softmax in fp32, in which transformers' own masks are NaN if they are fp64's.
    eager = dict(attn_implementation="eager", dtype=torch.float32)
    settings = (eager if family in EAGER else {}) | config
    loss_rtol, rtol = (1e-5, 1e-4) if family in EAGER else (2e-8, 1e-6)
    documents = [[13, 5, 15], [20, 1, 12]]
    batch = {
        "plain": lambda: random_batch(B, S),
        "packed": lambda: packed_batch(documents),
        "left": lambda: padded_batch([33, 21], S, "left"),
        "right": lambda: padded_batch([33, 21], S, "right"),
    }[kind]()
    plain = tiny_model(family, **settings)
    want = per_document_step(plain, batch, documents) if kind == "packed" else reference_step(plain, batch)
    model = tiny_model(family, **settings)
    handle = dmu.parallelize(model, strategy=strategy, split=split, head_chunks=head_chunks)
    got = sharded_step(model, batch, handle)
    assert abs(got[0] - want[0]) <= loss_rtol * max(1, abs(want[0])), (got[0], want[0])
    mine = own_tokens(want[2], handle)
    logits = got[2][:, : mine.shape[1]]
    real = own_tokens(batch["attention_mask"], handle).bool() if "attention_mask" in batch else slice(None)
    assert (logits - mine)[real].abs().max() <= rtol * mine.abs().max()
    assert_gradients(got[1], want[1], rtol)


@pytest.mark.parametrize("kind", ["plain", "packed", "left", "right"])
@pytest.mark.parametrize("family", DENSE)
def test_grouped_heads(family, kind):
    # In eager attention a row without keys averages all of them, those of added padding too: S is even there.
    S = 34 if family in EAGER and kind in ("left", "right") else 33
    run_ranks(2, dense, family, kind, S=S, heads=4, kv_heads=2)


@pytest.mark.parametrize(
    "size,heads,kv_heads",
    [(4, 4, 4), (4, 4, 1), (4, 4, 2), (2, 6, 3), (4, 6, 3), (2, 5, 1), (4, 5, 5), (2, 3, 3)],
)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_heads(family, size, heads, kv_heads):
    run_ranks(size, dense, family, "packed", heads=heads, kv_heads=kv_heads, hidden_size=60, head_dim=16)


def test_as_many_tokens_as_heads():
    """Swapped axes would show in the values only."""
    run_ranks(4, dense, "llama", "plain", B=1, S=4, heads=4, kv_heads=2)


@pytest.mark.parametrize("size,family", [(2, "deepseek_v3"), (4, "glm4_moe_lite")])
def test_mla_heads_need_not_divide(size, family):
    run_ranks(size, compare, family, "packed", heads=7)


def long_window():
    """A document longer than a block of queries, and a window across blocks."""
    dense("mistral", "plain", B=1, S=601, sliding_window=300, max_position_embeddings=1024)


def test_windows_of_several_blocks():
    run_ranks(2, long_window)


def too_many_ranks():
    import ds_mla_ulysses as dmu

    dmu.parallelize(tiny_model("llama", heads=2, kv_heads=1))


def test_more_ranks_than_heads():
    raises_on_ranks(4, ValueError, "2 attention heads are too few for 4 ranks", too_many_ranks)


def restores_dense():
    import ds_mla_ulysses as dmu

    model = tiny_model("gpt_oss", attn_implementation="eager", kv_heads=2)
    batch = random_batch(1, 16)
    want = reference_step(tiny_model("gpt_oss", attn_implementation="eager", kv_heads=2), batch)
    handle = dmu.parallelize(model)
    assert dmu.handle_of(model) is handle
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch["input_ids"], use_cache=False).logits, want[2])
    handle.restore()
    assert dmu.handle_of(model) is None
    assert torch.equal(reference_step(model, batch)[2], want[2])


def test_plain_and_restored():
    run_ranks(2, restores_dense)
