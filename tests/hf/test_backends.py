"""Every attention backend keeps documents apart; bf16 is bitwise what three all-to-alls give."""

import importlib.machinery
import sys
import types

import pytest
import torch
from models import gradients, packed_batch, padded_batch, random_batch, reference_step, tiny_model
from rank_pool import run_ranks
from test_parity import DOCUMENTS, compare, own_tokens, sharded_step


def flash_stand_in(version):
    """A module with flash-attn's functions that computes plainly: flash-attn does not run on a CPU."""
    calls = []

    def attend(q, k, v, scale):
        scores = torch.einsum("qmk,smk->mqs", q, k) * scale
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return torch.einsum("mqs,smv->qmv", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)

    def flash_attn_func(
        q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False
    ):
        assert causal and not dropout_p and q.shape[-1] == v.shape[-1]
        calls.append("plain")
        return torch.stack([attend(*row, softmax_scale) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert causal and not dropout_p and q.ndim == 3 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff().tolist()
        assert sum(lengths) == len(q) and max(lengths) == max_seqlen_q == max_seqlen_k
        calls.append("varlen")
        parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*part, softmax_scale) for part in parts])

    import transformers.modeling_flash_attention_utils as utils

    functions = dict(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    name = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}[version]
    for part in {name.split(".")[0], name}:
        sys.modules[part] = types.ModuleType(part)
        sys.modules[part].__spec__ = importlib.machinery.ModuleSpec(part, None)  # transformers looks for it
    vars(sys.modules[name]).update(functions)
    padding = sys.modules["flash_attn.bert_padding"] = types.ModuleType("flash_attn.bert_padding")
    padding.pad_input = padding.unpad_input = None
    setattr(utils, f"is_flash_attn_{version}_available", lambda: True)
    utils._loaded_implementation = None
    return calls


def with_flash(version, kind):
    import ds_mla_ulysses as dmu

    calls = flash_stand_in(version)
    batch = dict(
        plain=lambda: random_batch(2, 33),
        packed=lambda: packed_batch(DOCUMENTS),
        left=lambda: padded_batch([33, 21], 33),
    )[kind]()
    want = reference_step(tiny_model("deepseek_v3"), batch)
    model = tiny_model("deepseek_v3")
    model.config._attn_implementation = f"flash_attention_{version}"
    handle = dmu.parallelize(model)
    got = sharded_step(model, batch, handle)
    assert abs(got[0] - want[0]) <= 1e-9 * max(1, abs(want[0]))
    from models import assert_gradients

    assert_gradients(got[1], want[1], 1e-6)
    # shard_batch pads 33 tokens to 34, which makes a document of its own
    assert set(calls) == {"varlen"}
    calls.clear()
    inputs = random_batch(2, 4)["input_ids"]
    model(input_ids=inputs)
    assert set(calls) == {"plain"}


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention(version, kind):
    run_ranks(2, with_flash, version, kind)


def with_flex(kind):
    """Forward only: flex attention has no backward on a CPU. Not compiled, which would need a compiler."""
    import ds_mla_ulysses as dmu

    batch = packed_batch(DOCUMENTS) if kind == "packed" else padded_batch([33, 21], 33)
    want = reference_step(tiny_model("deepseek_v3", torch.float32), batch)[2]
    model = tiny_model("deepseek_v3", torch.float32)
    model.config._attn_implementation = "flex_attention"
    handle = dmu.parallelize(model)
    shard = dmu.shard_batch(batch, handle.group)
    shard.pop("shift_labels")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        got = model(**shard).logits
    mine = own_tokens(want, handle)
    real = own_tokens(batch["attention_mask"], handle).bool() if kind == "left" else slice(None)
    torch.testing.assert_close(got[:, : mine.shape[1]][real], mine[real], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["packed", "left"])
def test_flex_attention(kind):
    run_ranks(2, with_flex, kind)


def materialised_step(model, shard, group):
    """The same model over stock DeepSpeed: K and V of all heads, three all-to-alls in, one out."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.sequence.layer import DistributedAttention
    from transformers import AttentionInterface

    from ds_mla_ulysses.integrations.deepspeed import without_cpu_extension

    with without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo")

    def local(q, k, v, scale):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)

    stock = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def three_all_to_alls(module, q, k, v, mask, scaling=None, **kwargs):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return stock(q, k, v, 0, None, scaling), None

    AttentionInterface.register("three_all_to_alls", three_all_to_alls)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "three_all_to_alls"
    inputs = dict(input_ids=shard["input_ids"], position_ids=shard["position_ids"])
    return model(**inputs, use_cache=False).logits


def bitwise(family, B):
    import torch.distributed as dist
    from models import gradient_errors

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.loss import sequence_loss

    # 0.3 saturates bf16 softmax; the real models' 0.02 keeps gradients comparable
    settings = dict(dtype=torch.bfloat16, initializer_range=0.1)
    batch = random_batch(B, 64)
    stock = tiny_model(family, **settings)
    shard = dmu.shard_batch(batch, dist.group.WORLD)
    want = materialised_step(stock, shard, dist.group.WORLD)
    want_loss = sequence_loss(want, shard["shift_labels"], SequenceGroup.of(dist.group.WORLD))
    want_loss.backward()
    model = tiny_model(family, **settings)
    handle = dmu.parallelize(model)
    handle.sum_gradients(stock)
    loss, grads, logits = sharded_step(model, batch, handle)
    assert torch.equal(logits, want.detach()) and loss == want_loss.item()
    return gradient_errors(grads, gradients(stock))[0]


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_bf16_is_bitwise_three_all_to_alls(family, B):
    worst = max(run_ranks(2, bitwise, family, B))
    # Gradients differ where sums are rounded: once in ours, per head in the materialised path.
    assert worst[0] < 0.05, worst


def test_eager_in_bf16_stays_finite():
    run_ranks(
        2, compare, "youtu", "left", "eager", S=34, loss=0.05, gradient=1.0, reference="eager", dtype=torch.bfloat16
    )
