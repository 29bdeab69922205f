"""Every strategy but packed in models: what test_parity.py and its neighbours say of packed."""

import functools
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import (
    DENSE,
    FAMILIES,
    assert_gradients,
    gradients,
    packed_batch,
    random_batch,
    reference_step,
    tiny_model,
)
from rank_pool import raises_on_ranks, run_ranks
from test_dense import dense
from test_parity import DOCUMENTS, compare, own_tokens, sharded_step

import ds_mla_ulysses as dmu

WAYS = {
    "latent_kv": dict(strategy="latent_kv"),
    "latent_qkv": dict(strategy="latent_qkv"),
    "gather_kv": dict(strategy="gather_kv"),
    "head_tail": dict(strategy="gather_kv", split="head_tail"),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("way", ["latent_kv", "latent_qkv", "head_tail"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size,kind", [(2, "packed"), (4, "left")])
def test_every_family(family, size, kind, way):
    # DeepSeek-V2-Lite has no query latent, DeepSeek-V2 has one
    with_query_latent = dict(q_lora_rank=20) if (family, way) == ("deepseek_v2", "latent_qkv") else {}
    run_ranks(size, compare, family, kind, **WAYS[way], **with_query_latent)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["plain", "packed", "right"])
@EVERY_WAY
def test_batches(kind, size, way):
    run_ranks(size, compare, "deepseek_v3", kind, **WAYS[way])


@pytest.mark.parametrize("way", ["latent_kv", "latent_qkv"])
def test_heads_that_do_not_divide(way):
    run_ranks(4, compare, "glm4_moe_lite", "packed", heads=7, **WAYS[way])


@pytest.mark.parametrize("way", ["gather_kv", "head_tail"])
def test_fewer_heads_than_ranks(way):
    run_ranks(4, compare, "deepseek_v3", "packed", heads=2, **WAYS[way])
    run_ranks(4, dense, "llama", "packed", heads=2, kv_heads=1, **WAYS[way])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", DENSE)
def test_ordinary_heads(family, size):
    """Windows, soft caps and sinks included."""
    run_ranks(size, dense, family, "packed", heads=4, kv_heads=2, **WAYS["head_tail"])


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_ordinary_heads_in_one_run(kind):
    run_ranks(4, dense, "qwen2", kind, heads=4, kv_heads=1, **WAYS["gather_kv"])


def long_window(way):
    """A document longer than a block of queries, and a window across blocks and runs."""
    dense("mistral", "plain", B=1, S=601, sliding_window=300, max_position_embeddings=1024, **WAYS[way])


@pytest.mark.parametrize("way", ["gather_kv", "head_tail"])
def test_windows_of_several_blocks(way):
    run_ranks(2, long_window, way)


def with_moba(way):
    dmu.register_moba(dmu.MoBAConfig(4, 3, full_attention_layers=(1,)), "moba_strategies")
    compare("deepseek_v3", "packed", "moba_strategies", reference="moba_strategies", **WAYS[way])
    if WAYS[way]["strategy"] == "gather_kv":
        compare_dense = dict(attn_implementation="moba_strategies", kv_heads=2)
        dense("llama", "left", **compare_dense, **WAYS[way])


@EVERY_WAY
def test_moba_inside(way):
    run_ranks(2, with_moba, way)


def step_of(way, prepare):
    model = tiny_model("deepseek_v3", torch.float32)
    handle = dmu.parallelize(model, **WAYS[way])
    prepare(model)
    return sharded_step(model, packed_batch(DOCUMENTS), handle)


def recomputes(way, reentrant):
    def prepare(model):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))

    want, got = step_of(way, lambda model: None), step_of(way, prepare)
    assert want[0] == got[0] and all(torch.equal(got[1][name], g) for name, g in want[1].items())


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY_WAY
def test_recomputation_gives_identical_gradients(way, reentrant):
    run_ranks(2, recomputes, way, reentrant)


def two_forwards_first(way):
    """Nothing of a forward is kept where the next one would find it."""
    model = tiny_model("deepseek_v3")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=True))
    handle = dmu.parallelize(model, **WAYS[way])
    batches = [packed_batch(DOCUMENTS), random_batch(2, 22)]
    losses = []
    for batch in batches:
        shard = handle.shard(batch)
        losses.append(handle.loss(model(**shard.inputs).logits, shard))
    (losses[0] + losses[1]).backward()
    handle.sum_gradients()
    plain = tiny_model("deepseek_v3")
    for batch in batches:
        reference_step(plain, batch)
    assert_gradients(gradients(model), gradients(plain), 1e-6)


@pytest.mark.parametrize("way", ["latent_qkv", "head_tail"])
def test_two_forwards_before_one_backward(way):
    run_ranks(2, two_forwards_first, way)


def compiles(way):

    def prepare(model):
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")

    want, got = step_of(way, lambda model: None), step_of(way, prepare)
    assert abs(want[0] - got[0]) < 1e-6
    assert_gradients(got[1], want[1], 1e-5)


@EVERY_WAY
def test_compiled_layers(way):
    run_ranks(2, compiles, way)


def frozen(way, trained):
    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (plain, model):
        for name, parameter in m.named_parameters():
            parameter.requires_grad_(trained in name)
    batch = random_batch(2, 22)
    want = reference_step(plain, batch)
    handle = dmu.parallelize(model, **WAYS[way])
    _, grads, _ = sharded_step(model, batch, handle)
    assert set(grads) == set(want[1])
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("trained", ["kv_b_proj", "layers.0.self_attn.kv_a_proj", "q_b_proj", "embed_tokens"])
@pytest.mark.parametrize("way", ["latent_kv", "latent_qkv", "head_tail"])
def test_frozen_parameters(way, trained):
    run_ranks(2, frozen, way, trained)


def under_autocast(way):
    batch, settings = random_batch(1, 24), dict(dtype=torch.float32, initializer_range=0.1)
    exact = reference_step(tiny_model("youtu", **settings), batch)
    with torch.autocast("cpu", torch.bfloat16):
        want = reference_step(tiny_model("youtu", **settings), batch)
        model = tiny_model("youtu", **settings)
        loss, grads, _ = sharded_step(model, batch, dmu.parallelize(model, **WAYS[way]))
    assert abs(loss - want[0]) <= 2 * max(abs(want[0] - exact[0]), 1e-3)
    budget = 2 * max(float((want[1][n] - g).norm() / g.norm()) for n, g in exact[1].items())
    assert_gradients(grads, exact[1], budget)


@EVERY_WAY
def test_autocast(way):
    run_ranks(2, under_autocast, way)


def plain_and_restored(way):
    model, batch = tiny_model("deepseek_v3"), random_batch(1, 16)
    want = reference_step(tiny_model("deepseek_v3"), batch)
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    handle = dmu.parallelize(model, **WAYS[way])
    shard = handle.shard(batch)
    with pytest.raises(ValueError, match="dropout"):  # from the middle of a module's forward
        model.model.layers[1].self_attn.attention_dropout = 0.1
        model(**shard.inputs)
    model.model.layers[1].self_attn.attention_dropout = 0.0
    with torch.no_grad():
        assert torch.equal(model(input_ids=batch["input_ids"], use_cache=False).logits, want[2])
    handle.restore()
    after = {name: dict(vars(m)) for name, m in model.named_modules()}
    assert {name: set(own) for name, own in after.items()} == {name: set(own) for name, own in before.items()}
    got = reference_step(model, batch)
    assert torch.equal(got[2], want[2]) and all(torch.equal(gradients(model)[n], g) for n, g in want[1].items())


@EVERY_WAY
def test_plain_and_restored(way):
    run_ranks(2, plain_and_restored, way)


def with_adapters(way):
    """What calls projections whole takes adapters; latent strategies take them where no rows are taken."""
    from peft import LoraConfig, get_peft_model

    targets = ["kv_b_proj", "q_b_proj"] if WAYS[way]["strategy"] == "gather_kv" else ["q_a_proj", "kv_a_proj_with_mqa"]

    def adapted():
        model = get_peft_model(tiny_model("deepseek_v3"), LoraConfig(target_modules=targets, init_lora_weights=False))
        return model.double()

    torch.manual_seed(3)
    plain = adapted()
    torch.manual_seed(3)
    model = adapted()
    batch = packed_batch(DOCUMENTS)
    want = reference_step(plain, batch)
    loss, grads, _ = sharded_step(model, batch, dmu.parallelize(model, **WAYS[way]))
    assert abs(loss - want[0]) <= 1e-8
    assert_gradients(grads, want[1], 1e-6)


@EVERY_WAY
def test_adapters(way):
    run_ranks(2, with_adapters, way)


def refused(what, strategy):
    from peft import LoraConfig, get_peft_model

    model = tiny_model(
        {"dense": "llama", "no query latent": "deepseek_v2"}.get(what, "deepseek_v3"),
    )
    if what.endswith("_proj"):
        model = get_peft_model(model, LoraConfig(target_modules=[what]))
    if what == "gate":
        add_gate(model)
    dmu.parallelize(model, strategy=strategy)


def add_gate(model):
    """A family that does more with hidden states than this package knows."""
    layer = model.model.layers[1].self_attn
    original = type(layer).forward

    class Gated(type(layer)):
        def forward(self, hidden_states, *args, **kwargs):
            out, weights = original(self, hidden_states, *args, **kwargs)
            assert self.expand_kv and self.get_interface
            return out * self.gate(hidden_states), weights

    layer.gate, layer.get_interface = torch.nn.Linear(48, 48), True
    layer.__class__ = Gated


def other_method(model):
    """A method in the place of the layers' forward, which calls a helper and the forward of the class."""
    for layer in model.model.layers:

        class Halved(type(layer.self_attn)):
            @property
            def half(self):
                return self.o_proj

            def forward(self, hidden_states, *args, **kwargs):
                assert self.expand_kv and self.get_interface and self.half is self.o_proj
                return self.halve(*super().forward(hidden_states, *args, **kwargs))

            def halve(self, out, weights):
                assert isinstance(self, __class__) and self.training and self.q_b_proj.weight.requires_grad
                return out / 2, weights

        layer.self_attn.get_interface = True
        layer.self_attn.__class__ = Halved


def offloading_hooks(model):
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Doubles(ModelHook):
        def post_forward(self, module, output):
            return output[0] * 2, output[1]

    for layer in model.model.layers:
        add_hook_to_module(layer.self_attn, Doubles())


def bound_to_the_module(model):
    for layer in model.model.layers:
        layer.self_attn.forward = types.MethodType(type(layer.self_attn).forward, layer.self_attn)


OTHER_FORWARDS = {f.__name__: f for f in (other_method, offloading_hooks, bound_to_the_module)}


def with_other_forward(name):
    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    for m in (plain, model):
        m.train()
        OTHER_FORWARDS[name](m)
    want = reference_step(plain, packed_batch(DOCUMENTS))
    loss, grads, _ = sharded_step(model, packed_batch(DOCUMENTS), dmu.parallelize(model, strategy="latent_qkv"))
    assert abs(loss - want[0]) <= 1e-8
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("name", OTHER_FORWARDS)
def test_forwards_that_were_replaced_by_methods(name):
    """The stand-in of latent_qkv has the module's methods, properties and class, and offloading hooks run on it."""
    run_ranks(2, with_other_forward, name)


def with_a_closure():
    model = tiny_model("deepseek_v3")
    layer = model.model.layers[1].self_attn
    original = layer.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    layer.forward = forward
    dmu.parallelize(model, strategy="latent_qkv")


def test_forwards_that_were_replaced_by_functions():
    message = "DeepseekV3Attention.forward was replaced by <function .*, which is not a method .* choose 'latent_kv'"
    raises_on_ranks(2, dmu.UnsupportedModelError, message, with_a_closure)


@pytest.mark.parametrize(
    "what,strategy,message",
    [
        ("dense", "latent_kv", "strategy='latent_kv' is for MLA, but LlamaAttention has no latents: choose 'packed'"),
        ("no query latent", "latent_qkv", r"has none \(q_lora_rank is None\): choose 'latent_kv'"),
        (
            "kv_b_proj",
            "latent_kv",
            r"kv_b_proj is a Linear \(an adapter or a quantised layer\), of which rows would be",
        ),
        ("kv_b_proj", "latent_qkv", r"kv_b_proj is a Linear .* choose 'packed' or 'gather_kv', which call it whole"),
        ("q_b_proj", "latent_qkv", "takes rows of q_b_proj's weight, but .*q_b_proj is a Linear"),
        ("gate", "latent_qkv", "would run Gated on all tokens, but does not know its gate: choose 'latent_kv'"),
    ],
)
def test_refused(what, strategy, message):
    raises_on_ranks(2, dmu.UnsupportedModelError, message, refused, what, strategy)


def learns_a_prompt(kind):
    import peft

    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    dmu.parallelize(peft.get_peft_model(tiny_model("deepseek_v3"), config))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_prompts_that_are_learnt_are_refused(kind):
    message = "learns a prompt, .* in front of every rank's shard"
    raises_on_ranks(2, dmu.UnsupportedModelError, message, learns_a_prompt, kind)


@pytest.mark.parametrize("strategy", ["packed", "latent_kv", "latent_qkv"])
def test_head_and_tail_are_for_queries_that_stay(strategy):
    with pytest.raises(ValueError, match=f"split='head_tail' is for strategy='gather_kv', .* with '{strategy}' every"):
        dmu.parallelize(tiny_model("deepseek_v3"), strategy=strategy, split="head_tail")
    with pytest.raises(ValueError, match=r"split must be one of \['contiguous', 'head_tail'\], got 'zigzag'"):
        dmu.parallelize(tiny_model("deepseek_v3"), strategy=strategy, split="zigzag")


def other_split(of_model, of_batch, documents):
    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, strategy="gather_kv", split=of_model)
    shard = dmu.shard_batch(packed_batch(documents), handle.group.with_split(of_batch))
    model(
        **{name: x.clone() for name, x in shard.inputs.items()}
    )  # whatever becomes of the tensors, the layout says it


# Of the last one no positions are cut off in either order.
@pytest.mark.parametrize("documents", [[[32]], [[20, 12]], [[3, 29], [30, 2]], [[16, 8, 8]]])
@pytest.mark.parametrize("of_model,of_batch", [("contiguous", "head_tail"), ("head_tail", "contiguous")])
@pytest.mark.parametrize("size", [2, 4])
def test_batches_of_the_other_split(size, of_model, of_batch, documents):
    message = f"the batch was sharded as ShardLayout.kind='{of_batch}', .* but the model has split='{of_model}'"
    raises_on_ranks(size, ValueError, message, other_split, of_model, of_batch, documents)


def starts_anywhere(way):
    """Documents that go on from elsewhere, wherever chunks meet, are legal."""
    batch = random_batch(1, 8)
    plain, model = tiny_model("llama"), tiny_model("llama")
    handle = dmu.parallelize(model, **way)
    for positions in ([0, 1, 2, 3, 2, 3, 0, 1], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 0, 1, 7, 8, 2, 3]):
        batch["position_ids"] = torch.tensor([positions])
        want = reference_step(plain, batch)
        plain.zero_grad()
        loss, _, _ = sharded_step(model, batch, handle)
        assert abs(loss - want[0]) < 1e-8


@pytest.mark.parametrize("way", [dict(), WAYS["gather_kv"], WAYS["head_tail"]])
def test_documents_that_start_anywhere(way):
    run_ranks(2, starts_anywhere, way)


def uneven():
    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, strategy="gather_kv", split="head_tail")
    tokens = random_batch(1, 5 if handle.group.rank else 4)["input_ids"]
    layout = dmu.ShardLayout("head_tail", 2, handle.group.rank, 2 * tokens.shape[1])
    model(input_ids=tokens, ulysses_layout=layout)


def test_tokens_that_the_split_does_not_divide():
    raises_on_ranks(2, ValueError, "a rank has 5 tokens, which split='head_tail' does not divide into 2", uneven)


def makes_positions():
    """Without position_ids a rank takes those of its head and its tail."""
    model, batch = tiny_model("deepseek_v3"), random_batch(2, 32)
    want = reference_step(tiny_model("deepseek_v3"), batch)[2]
    handle = dmu.parallelize(model, strategy="gather_kv", split="head_tail")
    inputs = handle.shard(batch).inputs
    del inputs["position_ids"]
    logits = model(**inputs).logits
    assert (logits - own_tokens(want, handle)).abs().max() < 1e-8 * want.abs().max()


def test_positions_that_are_not_given():
    run_ranks(2, makes_positions)


def gathers_of_positions(layers):
    """Rope's tables are the same for all layers, and are gathered once for all of them."""
    model = tiny_model("mistral4", layers=layers)
    handle = dmu.parallelize(model, strategy="latent_qkv")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    with dmu.TrafficMeter() as meter:
        sharded_step(model, random_batch(1, 32), handle)
    return meter.calls["all_gather", "setup"]


def test_positions_are_gathered_once():
    assert run_ranks(2, gathers_of_positions, 2) == run_ranks(2, gathers_of_positions, 4)


def two_calls(way, order):
    """Outputs and gradients of two calls of one layer: one after the other, one inside the other, or in two threads."""
    from ds_mla_ulysses.hf.latent_forward import DOCUMENTS
    from ds_mla_ulysses.layout.documents import Documents

    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, **WAYS[way])
    layer, rotary = model.model.layers[1].self_attn, model.model.rotary_emb
    T, calls, outs, inputs = 8, 0, [None, None], []
    torch.manual_seed(5 + handle.group.rank)
    for call in range(2):
        starts = torch.zeros(1, T * handle.group.size, dtype=torch.bool)
        starts[:, [0, 5 + call]] = True
        x = torch.randn(1, T, 48, dtype=torch.float64, requires_grad=True)
        positions = torch.arange(call, call + T)[None]
        inputs.append((x, rotary(x.detach(), positions), Documents(starts)))

    def forward(call):
        x, embeddings, documents = inputs[call]
        settings = {"position_embeddings": embeddings, "attention_mask": None, DOCUMENTS: documents}
        outs[call] = layer(hidden_states=x, **settings)[0]

    # In the order in which two threads go on: the first to the middle, the second to the middle, both to their ends.
    second_starts, first_goes_on, second_goes_on = (threading.Event() for _ in range(3))

    def in_the_middle(module, args):
        nonlocal calls
        calls += 1
        if order == "nested" and calls == 1:
            forward(1)
        if order == "threads":
            (second_starts if calls == 1 else first_goes_on).set()
            assert (first_goes_on if calls == 1 else second_goes_on).wait(60)

    def in_a_thread(call, before, after):
        assert before is None or before.wait(60)
        try:
            forward(call)
        finally:
            after.set()

    layer.kv_b_proj.register_forward_pre_hook(in_the_middle)
    if order == "threads":
        with ThreadPoolExecutor(2) as pool:
            done = [
                pool.submit(in_a_thread, 0, None, second_goes_on),
                pool.submit(in_a_thread, 1, second_starts, first_goes_on),
            ]
        for future in done:
            future.result()
    else:
        forward(0)
        if order == "one after the other":
            forward(1)
    assert calls == 2
    for out in outs:  # one by one, since gradients are accumulated in the order of the backward
        out.square().sum().backward()
    found = [*(out.detach() for out in outs), *(x.grad for x, *_ in inputs)]
    return found + [p.grad for p in layer.parameters() if p.grad is not None]


def runs_twice_at_once(way, order):
    want, got = two_calls(way, "one after the other"), two_calls(way, order)
    assert len(want) == len(got) > 8
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("order", ["nested", "threads"])
@EVERY_WAY
def test_one_layer_twice_at_once(way, order):
    """Nothing of a call is kept on the module."""
    run_ranks(2, runs_twice_at_once, way, order)


def with_hooks(way):
    """A user's hooks see one tensor and fire once; what they return is taken; siblings are what they are."""
    batch = random_batch(1, 16)
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")

    def hooked(model):
        fired = []
        for layer in model.model.layers:
            attention = layer.self_attn

            def before(module, args, attention=attention):
                (x,) = args
                assert attention.q_a_proj.weight is attention._modules["q_a_proj"].weight
                fired.append(type(module).__name__)
                return (x * 1.1,)

            for name in names:
                getattr(attention, name).register_forward_pre_hook(before)
        return fired

    plain, model = tiny_model("deepseek_v3"), tiny_model("deepseek_v3")
    of_plain, of_model = hooked(plain), hooked(model)
    want = reference_step(plain, batch)
    loss, grads, _ = sharded_step(model, batch, dmu.parallelize(model, **WAYS[way]))
    assert abs(loss - want[0]) < 1e-8 and len(of_model) == len(of_plain)
    assert_gradients(grads, want[1], 1e-6)


@EVERY_WAY
def test_hooks_of_the_user(way):
    run_ranks(2, with_hooks, way)


def copied_projection(name):
    import copy

    model = tiny_model("deepseek_v3")
    dmu.parallelize(model, strategy="latent_qkv")
    copy.deepcopy(getattr(model.model.layers[0].self_attn, name))


@pytest.mark.parametrize("name", ["q_b_proj", "kv_b_proj"])
def test_projections_are_not_copied(name):
    """The copy would compute with the original's weight."""
    raises_on_ranks(2, RuntimeError, "cannot be copied or pickled: call handle.restore", copied_projection, name)


def adapted_afterwards(name):
    from peft import LoraConfig, get_peft_model

    model = tiny_model("deepseek_v3")
    handle = dmu.parallelize(model, strategy="latent_qkv")
    model = get_peft_model(model, LoraConfig(target_modules=[name])).double()
    model(**handle.shard(random_batch(1, 16)).inputs)


@pytest.mark.parametrize("name", ["q_b_proj", "kv_b_proj"])
def test_adapters_that_come_afterwards(name):
    message = f"{name} was replaced after parallelize, .* put adapters on the model before it is parallelized"
    raises_on_ranks(2, RuntimeError, message, adapted_afterwards, name)


def counted_pairs(split, documents):
    """Query-key pairs that this rank's calls of the attention function compute, and the largest mask."""
    from transformers.integrations import sdpa_attention

    from ds_mla_ulysses.hf import local_attention as kernel

    batch = packed_batch(documents)
    model = tiny_model("deepseek_v3", torch.float32, layers=1)
    handle = dmu.parallelize(model, strategy="gather_kv", split=split)
    layer = model.model.layers[0].self_attn
    own, pairs, masks = vars(layer)["_ulysses"].kernel, [], [0]

    def function(module, q, k, v, mask, is_causal=None, **kwargs):
        queries, keys = q.shape[2], k.shape[2]
        pairs.append(
            len(q) * (queries * (keys - queries) + (queries * (queries + 1) // 2 if is_causal else queries**2))
        )
        masks.append(0 if mask is None else mask.numel())
        return sdpa_attention.sdpa_attention_forward(module, q, k, v, mask, is_causal=is_causal, **kwargs)

    def merged(q, k, v, keys, topk, **kwargs):
        queries = q.shape[1]
        pairs.append(len(q) * (queries * (keys - queries) + queries * (queries + 1) // 2))
        return original(q, k, v, keys, topk, **kwargs)

    own.function, original, kernel.moba_attention = function, kernel.moba_attention, merged
    try:
        sharded_step(model, batch, handle)
    finally:
        kernel.moba_attention = original
    return sum(pairs), max(masks)


@pytest.mark.parametrize("size", [2, 4])
def test_causal_work_is_equal(size):
    S = 1024
    whole = S * (S + 1) // 2
    pairs, masks = zip(*run_ranks(size, counted_pairs, "head_tail", [[S]]), strict=True)
    assert sum(pairs) == whole and max(pairs) <= 1.01 * whole / size
    assert set(masks) == {0}
    pairs, _ = zip(*run_ranks(size, counted_pairs, "contiguous", [[S]]), strict=True)
    assert sum(pairs) == whole and max(pairs) > 1.4 * whole / size


def test_other_documents_are_not_computed():
    documents = [[100, 28]]
    pairs, _ = zip(*run_ranks(2, counted_pairs, "head_tail", documents), strict=True)
    assert sum(pairs) == 100 * 101 // 2 + 28 * 29 // 2


def by_lower_right(kind):
    """As on a GPU: scaled_dot_product_attention with causal_lower_right."""
    from ds_mla_ulysses.hf import local_attention as kernel

    original, kernel.has_flash = kernel.has_flash, lambda device: False
    try:
        compare("deepseek_v3", kind, **WAYS["head_tail"])
        dense("llama", kind, kv_heads=2, **WAYS["head_tail"])
    finally:
        kernel.has_flash = original


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_causal_lower_right(kind):
    run_ranks(2, by_lower_right, kind)


def eagerly(kind):
    compare(
        "deepseek_v3", kind, "eager", S=40, loss=1e-5, gradient=1e-4, dtype=torch.float32, reference="eager",
        **WAYS["head_tail"],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_eager(kind):
    run_ranks(2, eagerly, kind)
