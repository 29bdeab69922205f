"""Every attention backend keeps documents apart; bf16 is bitwise what three all-to-alls give."""

import importlib.machinery
import sys
import types

import pytest
import torch
from models import gradient_errors, gradients, packed_batch, padded_batch, random_batch, reference_step, tiny_model
from rank_pool import run_ranks
from test_parity import DOCUMENTS, compare, own_tokens, sharded_step


def flash_stand_in(version):
    """A module with flash-attn's functions that computes plainly: flash-attn does not run on a CPU."""
    calls = []

    def attend(q, k, v, scale):
        scores = torch.einsum("qmk,smk->mqs", q, k) * scale
        # as flash-attn has it, aligned at the last query and the last key
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(len(k) - len(q))
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
        assert causal and not dropout_p and q.ndim == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lengths, of_keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        assert sum(lengths) == len(q) and max(lengths) == max_seqlen_q
        assert sum(of_keys) == len(k) and max(of_keys) == max_seqlen_k and all(map(int.__le__, lengths, of_keys))
        calls.append("varlen")
        parts = zip(q.split(lengths), k.split(of_keys), v.split(of_keys), strict=True)
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


def with_flash(version, kind, **way):
    import ds_mla_ulysses as dmu

    calls = flash_stand_in(version)
    batch = dict(
        plain=lambda: random_batch(2, 33),
        even=lambda: random_batch(2, 32),
        one_row=lambda: packed_batch(DOCUMENTS[:1]),
        packed=lambda: packed_batch(DOCUMENTS),
        left=lambda: padded_batch([33, 21], 33),
    )[kind]()
    want = reference_step(tiny_model("deepseek_v3"), batch)
    model = tiny_model("deepseek_v3")
    model.config._attn_implementation = f"flash_attention_{version}"
    handle = dmu.parallelize(model, **way)
    got = sharded_step(model, batch, handle)
    assert abs(got[0] - want[0]) <= 1e-9 * max(1, abs(want[0]))
    from models import assert_gradients

    assert_gradients(got[1], want[1], 1e-6)
    # shard_batch pads 33 tokens to 34, which makes a document of its own
    assert set(calls) == {"plain" if kind == "even" else "varlen"}
    calls.clear()
    model(**handle.shard(random_batch(2, 4 * handle.group.size)).inputs)
    assert set(calls) == {"plain"}


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention(version, kind):
    run_ranks(2, with_flash, version, kind)


@pytest.mark.parametrize("kind", ["even", "one_row", "packed", "left"])
@pytest.mark.parametrize("split", ["contiguous", "head_tail"])
def test_flash_attention_of_some_queries(split, kind):
    """Boundaries of queries and of the keys that they see; rows divided differently."""
    run_ranks(4, with_flash, 2, kind, strategy="gather_kv", split=split)


def with_flex(kind, **way):
    """Forward only: flex attention has no backward on a CPU. Not compiled, which would need a compiler."""
    import ds_mla_ulysses as dmu

    batch = packed_batch(DOCUMENTS) if kind == "packed" else padded_batch([33, 21], 33)
    want = reference_step(tiny_model("deepseek_v3", torch.float32), batch)[2]
    model = tiny_model("deepseek_v3", torch.float32)
    model.config._attn_implementation = "flex_attention"
    handle = dmu.parallelize(model, **way)
    shard = handle.shard(batch)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        got = model(**shard.inputs).logits
    mine = own_tokens(want, handle)
    real = own_tokens(batch["attention_mask"], handle).bool() if kind == "left" else slice(None)
    torch.testing.assert_close(got[:, : mine.shape[1]][real], mine[real], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["packed", "left"])
@pytest.mark.parametrize("way", [{}, dict(strategy="gather_kv", split="head_tail")])
def test_flex_attention(way, kind):
    run_ranks(2, with_flex, kind, **way)


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
    inputs = {name: shard.inputs[name] for name in ("input_ids", "position_ids")}
    return model(**inputs, use_cache=False).logits


def stock_step(family, batch, settings):
    """Loss, gradients and logits of this rank, of materialised K through three all-to-alls."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.agreement import sum_gradients
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.loss import sequence_loss

    group, model = SequenceGroup.of(dist.group.WORLD), tiny_model(family, **settings)
    shard = dmu.shard_batch(batch, group)
    logits = materialised_step(model, shard, dist.group.WORLD)
    loss = sequence_loss(logits, shard.shift_labels, group)
    loss.backward()
    sum_gradients(model.parameters(), group)
    return loss.item(), gradients(model), logits.detach()


# 0.3 saturates bf16 softmax; the real models' 0.02 keeps gradients comparable
BF16 = dict(dtype=torch.bfloat16, initializer_range=0.1)


def bitwise(family, B):
    from models import gradient_errors

    import ds_mla_ulysses as dmu

    batch = random_batch(B, 64)
    want = stock_step(family, batch, BF16)
    model = tiny_model(family, **BF16)
    loss, grads, logits = sharded_step(model, batch, dmu.parallelize(model))
    assert torch.equal(logits, want[2]) and loss == want[0]
    return gradient_errors(grads, want[1])[0]


@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_bf16_is_bitwise_three_all_to_alls(family, B):
    worst = max(run_ranks(2, bitwise, family, B))
    # Gradients differ where sums are rounded: once in ours, per head in the materialised path.
    assert worst[0] < 0.05, worst


def products_depend_on_rows(size, T):
    """Whether this CPU's bf16 products of a projection change with the rows of x, or of the weight, in the call."""
    generator = torch.Generator().manual_seed(0)
    for features, out in ((24, 4 * 28), (20, 4 * 24)):
        x = torch.randn(size * T, features, generator=generator).bfloat16()
        weight = torch.randn(out, features, generator=generator).bfloat16()
        whole = torch.nn.functional.linear(x, weight)
        for part in range(size):
            rows, heads = slice(part * T, (part + 1) * T), slice(part * out // size, (part + 1) * out // size)
            if not torch.equal(torch.nn.functional.linear(x[rows], weight), whole[rows]):
                return True
            if not torch.equal(torch.nn.functional.linear(x, weight[heads]), whole[:, heads]):
                return True
    return False


def as_near_as_stock(way):
    """Logits bitwise stock's, or within twice stock's own rounding error; gradients within the latter."""
    from models import gradient_errors

    import ds_mla_ulysses as dmu

    batch = random_batch(1, 64)
    exact_model = tiny_model("deepseek_v3", torch.bfloat16, initializer_range=0.1).float()
    exact = reference_step(exact_model, batch)
    stock = stock_step("deepseek_v3", batch, BF16)
    model = tiny_model("deepseek_v3", **BF16)
    handle = dmu.parallelize(model, **way)
    _, grads, logits = sharded_step(model, batch, handle)
    is_bitwise = None
    if handle.split == "contiguous":
        is_bitwise = torch.equal(logits, stock[2])
        noise = (stock[2].float() - own_tokens(exact[2], handle)).norm()
    else:  # stock's ranks hold other tokens
        noise = (reference_step(tiny_model("deepseek_v3", **BF16), batch)[2].float() - exact[2]).norm()
    error = (logits.float() - own_tokens(exact[2], handle)).norm()
    assert 0 < error <= 2 * noise, (error, noise)
    of_stock, of_ours = (dict(map(reversed, gradient_errors(g, exact[1]))) for g in (stock[1], grads))
    for name, distance in of_ours.items():
        assert distance <= 2 * of_stock[name], (name, distance, of_stock[name])
    # Keys before and among the queries are merged by log-sum-exp under gather_kv, and so rounded otherwise.
    should_be = handle.strategy != "gather_kv" and not products_depend_on_rows(handle.group.size, logits.shape[1])
    assert is_bitwise or not should_be
    return is_bitwise


@pytest.mark.parametrize(
    "way",
    [
        dict(strategy="latent_kv"),
        dict(strategy="latent_qkv"),
        dict(strategy="gather_kv"),
        dict(strategy="gather_kv", split="head_tail"),
    ],
)
def test_bf16_of_the_other_strategies(way):
    print(way, "bitwise:", run_ranks(2, as_near_as_stock, way))


def eager_left(S, seed):
    """Gradients of left-padded rows under eager attention: fp32 in one process, and in bf16 there and here."""
    import ds_mla_ulysses as dmu

    def model():
        return tiny_model("gemma2", torch.float32, attn_implementation="eager")

    def errors(step):
        return dict(map(reversed, gradient_errors(step[1], exact[1])))

    batch = padded_batch([S, S - 12], S, "left", seed)
    exact = reference_step(model(), batch)
    of_ranks = model()
    handle = dmu.parallelize(of_ranks)
    in_fp32 = errors(sharded_step(of_ranks, batch, handle))
    of_ranks.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        of_one = errors(reference_step(model(), batch))
        in_bf16 = errors(sharded_step(of_ranks, batch, handle))
    assert max(in_fp32.values()) < 2e-6, in_fp32
    for name, error in in_bf16.items():
        assert error <= 1.3 * of_one[name] + 2e-6, (name, error, of_one[name])


@pytest.mark.parametrize("S", [33, 34])
@pytest.mark.parametrize("seed", range(2))
def test_left_padding_in_eager_attention(S, seed):
    """The last padding token of a row sees no key, so eager attention averages over all: not over padding that is added."""
    run_ranks(2, eager_left, S, seed)


def test_eager_in_bf16_stays_finite():
    run_ranks(
        2, compare, "youtu", "left", "eager", S=34, loss=0.05, gradient=1.0, reference="eager", dtype=torch.bfloat16
    )
