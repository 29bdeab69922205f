"""recompute="keep_attention": gradients of full recomputation, without a second attention and without a second exchange."""

import collections
import contextlib
import gc
import time

import pytest
import torch
from models import (
    assert_gradients,
    gradients,
    packed_batch,
    padded_batch,
    per_document_step,
    random_batch,
    reference_step,
    tiny_model,
)
from rank_pool import raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, sharded_step

import ds_mla_ulysses as dmu
from ds_mla_ulysses.moba import operators
from ds_mla_ulysses.stored_bytes import StoredBytes

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


def flash(recompute, way):
    """A stand-in of flash attention, which takes all documents in one call."""
    from test_backends import flash_stand_in

    flash_stand_in(2)

    def make():
        model = tiny_model("deepseek_v3")
        model.config._attn_implementation = "flash_attention_2"
        return model

    return kept_like_recomputed(make, packed_batch(DOCUMENTS), recompute, **way)[3]


@pytest.mark.parametrize("way", ["packed", "head_tail"])
def test_flash_attention(way):
    run_ranks(2, flash, "keep_attention", WAYS[way])


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


def settled(stored):
    """Bytes alive; gloo's threads let go of buffers a little after a wait for them."""
    time.sleep(0.1)
    gc.collect()
    return stored.now


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
    with StoredBytes([*model.parameters(), *model.buffers()]) as stored:
        out = model(**shard.inputs, use_cache=False).logits.materialise().sum()
        after_forward = settled(stored)
        out.backward()
        model.zero_grad()
        after_backward = settled(stored)
    of_token = len(model.model.layers) * shard.inputs["input_ids"].shape[1]
    return after_forward / of_token, after_backward / of_token


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


def model_with(recompute, checkpoint_settings, **settings):
    model = tiny_model("llama")
    handle = dmu.parallelize(model, recompute=recompute, **settings)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint_settings)
    return model, handle


def refused(recompute, checkpoint_settings):
    import torch.distributed as dist

    # One rank has the wrong settings, and all of them raise.
    settings = checkpoint_settings if dist.get_rank() == 1 else dict(NOT_REENTRANT)
    model, handle = model_with(recompute, settings)
    sharded_step(model, random_batch(1, 16), handle)


def own_contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()


@pytest.mark.parametrize(
    "settings,message",
    [
        (dict(use_reentrant=True), "recompute='keep_attention' needs gradient checkpointing that is not reentrant"),
        (NOT_REENTRANT | dict(context_fn=own_contexts), "recompute='keep_attention' brings its own context_fn, but"),
        (NOT_REENTRANT | dict(context_fn=dmu.keep_output), "recompute='keep_attention' brings its own context_fn, but"),
    ],
)
def test_refused(settings, message):
    raises_on_ranks(2, ValueError, message, refused, "keep_attention", settings)


def with_deepspeeds_function():
    from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint

    model, handle = model_with("keep_attention", dict(NOT_REENTRANT))
    model._set_gradient_checkpointing(True, checkpoint)
    sharded_step(model, random_batch(1, 16), handle)


def test_functions_of_others_are_refused():
    message = "recompute='keep_attention' needs torch.utils.checkpoint .*, but layers are checkpointed by .*checkpoint"
    raises_on_ranks(2, ValueError, message, with_deepspeeds_function)


def unknown(**settings):
    dmu.parallelize(tiny_model("deepseek_v3"), **settings)


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            dict(recompute="keep"),
            r"recompute must be None .* or one of \['keep_attention', 'keep_output'\], got 'keep'",
        ),
        (dict(recompute=True), "recompute must be None"),
        (
            dict(recompute="keep_output", head_chunks=2),
            "recompute='keep_output' keeps attention, but head_chunks=2 frees and recomputes it chunk by chunk",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    raises_on_ranks(2, ValueError, message, unknown, **settings)
    with pytest.raises(ValueError, match=message):
        dmu.install(**settings)


def chunks_with_a_context():
    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, head_chunks=2)
    settings = NOT_REENTRANT | dict(context_fn=dmu.keep_attention)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
    sharded_step(model, random_batch(1, 16), handle)


def test_head_chunks_are_refused_with_a_context_too():
    raises_on_ranks(2, ValueError, "the context_fn keeps attention, but head_chunks=2", chunks_with_a_context)


def plain_forward_in_a_context():
    model, handle = model_with(None, NOT_REENTRANT | dict(context_fn=dmu.keep_attention))
    with handle.plain():
        reference_step(model, random_batch(1, 16))


def test_nothing_to_keep_is_refused():
    raises_on_ranks(2, RuntimeError, "nothing was kept for recomputation", plain_forward_in_a_context)


def by_context(dtype):
    """The context_fn alone, whichever way checkpointing is switched on, equals the setting."""
    batch = packed_batch(DOCUMENTS)
    want = step(lambda: tiny_model("deepseek_v3", dtype), batch, True, recompute="keep_attention")

    def before():
        model = tiny_model("deepseek_v3", dtype)
        settings = NOT_REENTRANT | dict(context_fn=dmu.keep_attention)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        return model

    got = step(before, batch, False)
    again = step(before, batch, False, recompute="keep_attention")
    for other in (got, again):
        assert other[0] == want[0] and other[2:] == want[2:]
        assert all(torch.equal(grad, want[1][name]) for name, grad in other[1].items())


def test_context_alone():
    run_ranks(2, by_context, torch.float64)


def switched():
    """Checkpointing on and off, before and after parallelize, some layers only, plain forwards, and restore."""
    import warnings

    model = tiny_model("llama", layers=4)
    batch = random_batch(1, 32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(NOT_REENTRANT))
    function = model.model.layers[0]._gradient_checkpointing_func
    handle = dmu.parallelize(model, recompute="keep_attention")
    shard = handle.shard(batch)

    def calls():
        with counting(model) as found, dmu.TrafficMeter() as meter:
            handle.loss(model(**shard.inputs).logits, shard).backward()
        return found["function"], meter.calls["all_to_all", "forward"]

    assert calls() == (4, 8)
    assert model.model.layers[0]._gradient_checkpointing_func is function
    model.gradient_checkpointing_disable()
    with pytest.warns(
        UserWarning, match="recompute='keep_attention' has no effect, because gradient checkpointing is off"
    ):
        assert calls() == (4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calls() == (4, 8)  # warned once
        model.activation_checkpointing_enable(every_n_layers=2)
        assert calls() == (4, 8)
        model.eval()
        model(**shard.inputs)
        model.train()
    with torch.no_grad():
        model(**shard.inputs)
    plain = tiny_model("llama", layers=4)
    want = reference_step(plain, batch)
    model.zero_grad()
    with handle.plain():
        loss, grads, _ = reference_step(model, batch)  # the plain model checkpoints as before
    assert loss == want[0] and all(torch.equal(grad, want[1][name]) for name, grad in grads.items())
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**shard.inputs)
    broken.remove()
    functions = {id(layer._gradient_checkpointing_func) for layer in model.model.layers}
    handle.restore()
    assert {id(layer._gradient_checkpointing_func) for layer in model.model.layers} == functions
    model.zero_grad()
    loss, grads, _ = reference_step(model, batch)
    assert loss == want[0] and all(torch.equal(grad, want[1][name]) for name, grad in grads.items())


def test_switching_on_and_off():
    run_ranks(2, switched)


def offloaded():
    """transformers keeps the layers' inputs on the host, through pinned memory, which a CPU does not have."""
    import functools

    import transformers.modeling_utils as utils

    batch, on_cpu = packed_batch(DOCUMENTS), utils.save_on_cpu
    packed = []

    def save_on_cpu(pin_memory, device_type):
        packed.append(device_type)
        return on_cpu(pin_memory=False, device_type=device_type)

    def make():
        return tiny_model("deepseek_v3")

    want = step(make, batch, True, recompute="keep_attention")
    utils.save_on_cpu = functools.wraps(on_cpu)(save_on_cpu)
    try:

        def with_offload():
            model = make()
            model.activation_checkpointing_enable(offload=True)
            return model

        got = step(with_offload, batch, False, recompute="keep_attention")
    finally:
        utils.save_on_cpu = on_cpu
    assert len(packed) == 2 and got[0] == want[0] and got[2:] == want[2:]
    assert all(torch.equal(grad, want[1][name]) for name, grad in got[1].items())


def test_inputs_of_layers_on_the_host():
    run_ranks(2, offloaded)


def compiled(kind):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    want = step(lambda: tiny_model("deepseek_v3"), packed_batch(DOCUMENTS), True, recompute="keep_attention")

    def make():
        model = tiny_model("deepseek_v3")
        for layer in model.model.layers:
            for module in [layer] if kind == "layers" else [layer.self_attn, layer.mlp]:
                module.compile(backend="aot_eager")
        return model

    got = step(make, packed_batch(DOCUMENTS), True, recompute="keep_attention")
    assert got[0] == pytest.approx(want[0], rel=1e-12) and got[2:] == want[2:]
    assert_gradients(got[1], want[1], 1e-9)
    assert kind == "layers" or counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("kind", ["layers", "parts"])
def test_compiled(kind):
    run_ranks(2, compiled, kind)


def twice():
    model, handle = model_with("keep_attention", dict(NOT_REENTRANT))
    shard = handle.shard(random_batch(1, 16))
    loss = handle.loss(model(**shard.inputs).logits, shard)
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_second_backward_is_refused():
    raises_on_ranks(2, RuntimeError, "backward ran a second time|a second time", twice)


def of_one_process(family, size, way, kind, **config):
    batch = dict(packed=lambda: packed_batch(DOCUMENTS), left=lambda: padded_batch([33, 21], 33))[kind]()
    plain = tiny_model(family, **config)
    want = (per_document_step if kind == "packed" else reference_step)(plain, batch)
    model = tiny_model(family, **config)
    handle = dmu.parallelize(model, recompute="keep_attention", **WAYS[way])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(NOT_REENTRANT))
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize(
    "family,size,way,kind,config",
    [
        ("deepseek_v3", 2, "packed", "packed", dict(heads=5)),
        ("deepseek_v3", 4, "latent_kv", "left", {}),
        ("glm4_moe_lite", 4, "head_tail", "packed", dict(heads=5)),
        ("qwen3_moe", 4, "packed", "packed", dict(heads=6, kv_heads=3)),
        ("mixtral", 2, "packed", "left", dict(kv_heads=2)),
        ("gemma3_text", 2, "head_tail", "packed", dict(kv_heads=2)),
        ("llama", 1, "packed", "packed", dict(kv_heads=2)),
    ],
)
def test_equals_one_process(family, size, way, kind, config):
    run_ranks(size, of_one_process, family, size, way, kind, **config)
