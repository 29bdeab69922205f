"""recompute="keep_attention": gradients of full recomputation, without a second attention and without a second exchange."""

import collections
import contextlib
import gc

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, random_batch, reference_step, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, sharded_step

import ds_mla_ulysses as dmu
from ds_mla_ulysses.moba import operators

KEEPS = pytest.mark.parametrize("recompute", ["keep_attention", "keep_output"])
NOT_REENTRANT = dict(use_reentrant=False)


@contextlib.contextmanager
def counting(model):
    """Counts calls of transformers' attention functions in a parallelized model, and of MoBA's operator."""
    calls = collections.Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for module in model.modules():
        kernel = getattr(vars(module).get("_ulysses"), "kernel", None)
        if kernel is not None:
            kernel = getattr(kernel, "dense", kernel)
            kernel.function = counted("function", kernel.function)
    forward = operators._forward
    operators._forward = counted("moba", forward)
    try:
        yield calls
    finally:
        operators._forward = forward


def step(make, batch, checkpointing, strategy="packed", split="contiguous", **settings):
    """Loss and gradients before they are summed over ranks, the bytes of the step, and calls of attention."""
    model = make()
    handle = dmu.parallelize(model, strategy=strategy, split=split, **settings)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(NOT_REENTRANT))
    shard = handle.shard(batch)
    with counting(model) as calls, dmu.TrafficMeter() as meter:
        loss = handle.loss(model(**shard.inputs).logits, shard)
        loss.backward()
    exchanged = {key: n for key, n in meter.bytes.items() if key[1] != "setup"}
    return loss.item(), gradients(model), exchanged, dict(calls)


def kept_like_recomputed(make, batch, recompute, **way):
    plain = step(make, batch, False, **way)
    full = step(make, batch, True, **way)
    got = step(make, batch, True, recompute=recompute, **way)
    assert got[0] == full[0] == plain[0]
    assert got[1].keys() == full[1].keys()
    for name, grad in full[1].items():
        assert torch.equal(got[1][name], grad), name
    assert got[3] == plain[3] and full[3] == {name: 2 * n for name, n in plain[3].items()}
    backward = {key: n for key, n in plain[2].items() if key[1] == "backward"}
    assert {key: n for key, n in got[2].items() if key[1] == "backward"} == backward
    forward, repeated = (sum(n for key, n in x[2].items() if key[1] == "forward") for x in (plain, got))
    assert sum(n for key, n in full[2].items() if key[1] == "forward") == 2 * forward
    if recompute == "keep_attention":
        assert repeated == forward
    else:  # gather_kv has nothing to return
        assert forward < repeated < 2 * forward or (way["strategy"] == "gather_kv" and repeated == 2 * forward)
    return got


def of_family(family, recompute, way, kind="packed", dtype=torch.float64, **config):
    batch = packed_batch(DOCUMENTS) if kind == "packed" else random_batch(1, 32)

    def make():
        return tiny_model(family, dtype, **config)

    return kept_like_recomputed(make, batch, recompute, **way)[3]


WAYS = {
    "packed": dict(strategy="packed"),
    "latent_kv": dict(strategy="latent_kv"),
    "latent_qkv": dict(strategy="latent_qkv"),
    "gather_kv": dict(strategy="gather_kv"),
    "head_tail": dict(strategy="gather_kv", split="head_tail"),
}


@pytest.mark.parametrize("way", WAYS)
@KEEPS
def test_deepseek(way, recompute):
    run_ranks(2, of_family, "deepseek_v3", recompute, WAYS[way])


def moba(family, recompute, way, **settings):
    config = dmu.MoBAConfig(block_size=8, top_k=2, full_attention_layers=(1,), **settings)
    dmu.register_moba(config, name=f"kept_{family}_{settings.get('implementation', 'any')}")
    name = f"kept_{family}_{settings.get('implementation', 'any')}"
    return of_family(family, recompute, way, attn_implementation=name)


@pytest.mark.parametrize(
    "family,way,config",
    [
        ("glm4_moe_lite", "packed", {}),
        ("glm4_moe_lite", "latent_kv", dict(heads=5)),
        ("kimi_k25", "latent_kv", {}),
        ("longcat_flash", "packed", {}),  # two attentions in a layer
        ("llama", "packed", dict(kv_heads=2)),
        ("llama", "head_tail", dict(kv_heads=1)),
        ("qwen3_moe", "packed", dict(kv_heads=2)),
        ("qwen3_moe", "gather_kv", dict(attn_implementation="eager", kv_heads=2)),
        ("gemma3_text", "packed", dict(kv_heads=2)),  # windows, with a mask
        ("gemma2", "packed", dict(attn_implementation="eager")),  # soft caps
        ("gpt_oss", "packed", dict(attn_implementation="eager", kv_heads=2)),  # sinks, which are parameters
        ("gpt_oss", "head_tail", dict(attn_implementation="eager", kv_heads=2)),
    ],
)
@KEEPS
def test_families(family, way, config, recompute):
    run_ranks(2, of_family, family, recompute, WAYS[way], **config)


@pytest.mark.parametrize("family,way", [("llama", "packed"), ("deepseek_v3", "packed"), ("llama", "head_tail")])
@KEEPS
def test_moba(family, way, recompute):
    for calls in run_ranks(2, moba, family, recompute, WAYS[way]):
        assert calls["moba"] > 0


class FlashStandIn(torch.autograd.Function):
    """Keeps what flash attention keeps: queries, keys, values, the output and the log-sum-exp."""

    @staticmethod
    def forward(ctx, q, k, v):
        (B, H, S, _), V = q.shape, v.shape[-1]
        out, lse = v.new_ones(B, S, H, V), q.new_ones(B, H, S, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        assert (out == 1).all() and (lse == 1).all() and grad.shape == out.shape
        return q, k, v


@contextlib.contextmanager
def net_bytes():
    """A list that gets the bytes that were allocated meanwhile and not freed."""
    found = []
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        yield found
        gc.collect()
    found.append(sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"))


def bytes_of_step(family, way, recompute, **config):
    """Bytes alive after forward and after backward, of a layer and local token."""
    model = tiny_model(family, torch.bfloat16, heads=8, **config)
    handle = dmu.parallelize(model, recompute=recompute, **WAYS[way])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(NOT_REENTRANT))
    for layer in model.model.layers:
        vars(layer.self_attn)["_ulysses"].kernel.function = lambda module, q, k, v, *_, **__: (
            FlashStandIn.apply(q, k, v),
        )
    shard = handle.shard(random_batch(1, 64))

    def step():
        with net_bytes() as after_forward:
            out = model(**shard.inputs, use_cache=False).logits.materialise().sum()
        with net_bytes() as of_backward:
            out.backward()
            model.zero_grad()
        return after_forward[0], after_forward[0] + of_backward[0]

    step()
    of_token = len(model.model.layers) * shard.inputs["input_ids"].shape[1]
    return [n / of_token for n in step()]


def kept_bytes(family, way, config):
    full, attention, output = (bytes_of_step(family, way, x, **config) for x in (None, "keep_attention", "keep_output"))
    assert full[1] == attention[1] == output[1], (full, attention, output)  # all is freed in backward
    return attention[0] - full[0], output[0] - full[0]


N, R, V, L, H, G, P = 16, 8, 12, 24, 8, 4, 2
#: Of attention and its exchange back, and of the exchanges in front of it.
PRICES = {
    ("llama", "packed"): (H * 6 * 2 + 4 * H + H * 6 * 2, (H * 6 + G * 12) * 2),
    ("llama", "gather_kv"): (H * 6 * 2 + 4 * H, P * G * 12 * 2),
    ("deepseek_v3", "packed"): (H * V * 2 + 4 * H + H * V * 2, (H * (N + R + N + V) + P * R) * 2),
    ("deepseek_v3", "latent_kv"): (H * V * 2 + 4 * H + H * V * 2, (H * (N + R) + P * (L + R)) * 2),
    ("deepseek_v3", "gather_kv"): (H * V * 2 + 4 * H, P * (L + R) * 2),
}


@pytest.mark.parametrize("family,way", PRICES)
def test_price_in_bytes(family, way):
    """In bf16: H V 2 + 4 H of attention, H V 2 of what comes back, and what arrives."""
    output, arriving = PRICES[family, way]
    config = dict(kv_heads=G) if family == "llama" else {}
    for found in run_ranks(P, kept_bytes, family, way, config):
        assert found == (output + arriving, output)
