"""MoBA as an attention implementation: plain, padded, packed, with a cache; over ranks it equals one process."""

import copy

import pytest
import torch
from models import (
    DENSE,
    FAMILIES,
    assert_gradients,
    packed_batch,
    padded_batch,
    per_document_step,
    random_batch,
    reference_step,
    tiny_model,
)
from rank_pool import raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, compare

import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.moba import MoBAFunction

# Blocks of 4 and three a query in up to 33 tokens. The oracle masks the scores of each document run alone.
BLOCKS = dict(moba_chunk_size=4, moba_topk=3)
NAMES = {
    "moba": dmu.MoBAConfig(**BLOCKS),
    "moba_oracle": dmu.MoBAConfig(**BLOCKS, implementation="reference"),
    "moba_mixed": dmu.MoBAConfig(**BLOCKS, full_attention_layers=(-1,)),
    "moba_mixed_oracle": dmu.MoBAConfig(**BLOCKS, full_attention_layers=(-1,), implementation="reference"),
    "moba_own": None,
}
WITHOUT_EXTRAS = [f for f in DENSE if f not in ("qwen2", "mistral", "gemma2", "gemma3_text", "gpt_oss")]


def moba_model(family, name="moba", **config):
    register()
    return tiny_model(family, attn_implementation=name, **config)


def register():
    for name, config in NAMES.items():
        dmu.register_moba(config, name)


def on_ranks(family, kind, name="moba", **settings):
    register()
    compare(family, kind, name, loss=2e-8, reference=f"{name}_oracle", **settings)


@pytest.fixture(autouse=True)
def _registered():
    register()


@pytest.mark.parametrize("family", [*FAMILIES, *WITHOUT_EXTRAS])
def test_one_unpadded_row(family):
    """It is sparse, and what the oracle says."""
    batch = random_batch(1, 33)
    got, want, dense = (
        reference_step(tiny_model(family, attn_implementation=name), batch) for name in ("moba", "moba_oracle", "sdpa")
    )
    assert abs(got[0] - want[0]) <= 1e-9 * want[0] and abs(got[0] - dense[0]) > 1e-3
    assert_gradients(got[1], want[1], 1e-6)


# Without experts, whose fp32 router rounds otherwise with another number of rows.
@pytest.mark.parametrize("family,config", [("llama", {}), ("deepseek_v3", {"first_k_dense_replace": 2})])
def test_packed(family, config):
    batch = packed_batch(DOCUMENTS)
    want = per_document_step(moba_model(family, "moba_oracle", **config), batch, DOCUMENTS)
    for masked in (False, True):
        given = batch | ({"attention_mask": torch.ones_like(batch["input_ids"])} if masked else {})
        model = moba_model(family, **config)
        logits = model(**{k: x for k, x in given.items() if k != "labels"}, use_cache=False).logits
        torch.testing.assert_close(logits, want[2], rtol=0, atol=1e-8)
    assert_gradients(reference_step(model, batch)[1], want[1], 1e-6)


def test_boundaries_of_a_collator():
    """DataCollatorWithFlattening may give cu_seq_lens, and no position ids."""
    batch = packed_batch(DOCUMENTS[:1])
    want = per_document_step(moba_model("llama", "moba_oracle"), batch, DOCUMENTS[:1])
    cu = torch.tensor([0, 13, 18, 33], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=15, max_length_k=15)
    model = moba_model("llama")
    restarting = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, **lengths)
    torch.testing.assert_close(restarting.logits, want[2], rtol=0, atol=1e-8)
    # Rope goes by relative positions, so they need not restart.
    going_on = model(input_ids=batch["input_ids"], use_cache=False, **lengths)
    torch.testing.assert_close(going_on.logits, want[2], rtol=0, atol=1e-4)  # of rope, which is in fp32


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["moba", "moba_mixed"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_padded(family, name, side):
    """Real rows are those of each row alone."""
    lengths, S = [33, 21], 33
    batch = padded_batch(lengths, S, side)
    model, oracle = moba_model(family, name), moba_model(family, f"{name}_oracle")
    inputs = {key: x for key, x in batch.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits
    for row, n in enumerate(lengths):
        real = slice(S - n, S) if side == "left" else slice(0, n)
        alone = oracle(input_ids=batch["input_ids"][row : row + 1, real], use_cache=False).logits
        torch.testing.assert_close(logits[row : row + 1, real], alone, rtol=0, atol=1e-8)


def test_no_mask_is_quadratic(monkeypatch):
    masks, call = [], MoBAFunction.__call__

    def spy(self, module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return call(self, module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(MoBAFunction, "__call__", spy)
    model = moba_model("llama", "moba_mixed")
    for batch, ndim in ((random_batch(2, 33), None), (packed_batch(DOCUMENTS), None), (padded_batch([33, 21], 33), 2)):
        masks.clear()
        model(**{key: x for key, x in batch.items() if key != "labels"})
        assert len(masks) == 2 and {None if m is None else m.ndim for m in masks} == {ndim}


@pytest.mark.parametrize("name", ["moba", "moba_mixed"])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_generation(family, name):
    """With a cache, padded: the tokens are those of each row alone without a cache."""
    model = moba_model(family, name, train=False)
    prompts = padded_batch([30, 19], 30)
    inputs = {key: prompts[key] for key in ("input_ids", "attention_mask")}
    settings = dict(max_new_tokens=9, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
    for row, n in enumerate([30, 19]):
        alone = prompts["input_ids"][row : row + 1, 30 - n :]
        want = model.generate(alone, **settings, use_cache=False)[0, n:]
        assert got.sequences[row, 30:].tolist() == want.tolist()
        whole = torch.cat([alone, want[None]], dim=1)
        logits = model(input_ids=whole, use_cache=False).logits[0, n - 1 : -1]
        torch.testing.assert_close(torch.stack(got.logits, 1)[row], logits.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["moba", "moba_mixed"])
def test_prefill_in_chunks(name):
    model = moba_model("llama", name, train=False)
    tokens = random_batch(2, 29)["input_ids"]
    whole, cache, parts = model(input_ids=tokens).logits, None, []
    for chunk in tokens.split([9, 1, 12, 7], dim=1):
        answer = model(input_ids=chunk, past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        parts.append(answer.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_selects_the_same(use_reentrant):
    batch = packed_batch(DOCUMENTS)
    plain, model = moba_model("llama"), moba_model("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    want, got = reference_step(plain, batch), reference_step(model, batch)
    assert all(torch.equal(got[1][key], g) for key, g in want[1].items())


def test_compiled():
    batch = random_batch(1, 33)
    plain, model = moba_model("llama"), moba_model("llama")
    want = reference_step(plain, batch)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    assert_gradients(reference_step(model, batch)[1], want[1], 1e-9)


# The schedule of layers, and the switch.


def test_full_layers_and_the_switch():
    batch = packed_batch(DOCUMENTS)
    dense = reference_step(tiny_model("llama"), batch)
    sparse = reference_step(moba_model("llama"), batch)
    model = moba_model("llama")
    dmu.set_moba(model, False)
    assert torch.allclose(reference_step(model, batch)[2], dense[2], rtol=0, atol=1e-9)
    dmu.set_moba(torch.nn.Sequential(model), True)  # through what wraps it
    assert torch.equal(reference_step(model, batch)[2], sparse[2])
    with pytest.raises(ValueError, match="LlamaForCausalLM has no MoBA layers: call register_moba"):
        dmu.set_moba(tiny_model("llama"), False)


def test_each_layer_has_its_blocks(monkeypatch):
    """longcat_flash counts two attentions a layer."""
    from ds_mla_ulysses.hf import moba

    seen, call = [], moba.moba_attention

    def spy(*args, **kwargs):
        seen.append(args[3:])
        return call(*args, **kwargs)

    monkeypatch.setattr(moba, "moba_attention", spy)
    config = dmu.MoBAConfig(moba_chunk_size=(4, 8, 2, 16), moba_topk=(2, 3, 4, 5), full_attention_layers=(1,))
    dmu.register_moba(config, "moba_by_layer")
    for family in ("llama", "longcat_flash"):
        seen.clear()
        reference_step(tiny_model(family, attn_implementation="moba_by_layer", layers=4), random_batch(1, 9))
        assert seen == [(4, 2), (2, 4), (16, 5)]
    with pytest.raises(ValueError, match="moba_chunk_size has 4 numbers, but the model has 2 layers"):
        reference_step(tiny_model("llama", attn_implementation="moba_by_layer"), random_batch(1, 9))


# The config.


def test_saved_with_the_model(tmp_path):
    from transformers import AutoModelForCausalLM

    batch = random_batch(1, 33)
    model = moba_model("llama", "moba_mixed")
    want = reference_step(model, batch)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="moba_own", dtype=torch.float64)
    assert loaded.config.moba == BLOCKS | {"full_attention_layers": [-1]}
    torch.testing.assert_close(reference_step(loaded, batch)[2], want[2], rtol=0, atol=1e-12)
    # Where it runs is not what it computes.
    oracle = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="moba_mixed_oracle", dtype=torch.float64
    )
    torch.testing.assert_close(reference_step(oracle, batch)[2], want[2], rtol=0, atol=1e-9)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="moba", dtype=torch.float64)
    with pytest.raises(ValueError, match=r"the model's config has moba=.* but 'moba' is registered with MoBAConfig\("):
        reference_step(other, batch)
    other.config.moba = None
    assert reference_step(other, batch)[0] == reference_step(moba_model("llama"), batch)[0]


def test_a_parallelized_model_saves_it(tmp_path):
    run_ranks(2, saves_it, str(tmp_path))


def saves_it(folder):
    from transformers import AutoConfig

    register()
    for family in ("deepseek_v3", "kimi_k25"):
        model = tiny_model(family, attn_implementation="moba")
        dmu.parallelize(model)
        assert model.config.get_text_config().moba["moba_topk"] == 3
        if torch.distributed.get_rank() == 0:
            model.config.save_pretrained(f"{folder}/{family}")
            config = AutoConfig.from_pretrained(f"{folder}/{family}").get_text_config()
            assert config.moba == BLOCKS | {"full_attention_layers": []}


def test_registration():
    dmu.register_moba(NAMES["moba"])  # the same again
    dmu.register_moba()
    with pytest.raises(ValueError, match="'moba' is registered with MoBAConfig.*register_moba.config, name='moba_2'."):
        dmu.register_moba(dmu.MoBAConfig(64, 2))
    for name in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=name):
            dmu.register_moba(dmu.MoBAConfig(64, 2), name)
    for name in ("flash_moba", "a/b"):
        with pytest.raises(ValueError, match="name must be a word of its own and without 'flash'"):
            dmu.register_moba(dmu.MoBAConfig(64, 2), name)
    with pytest.raises(ValueError, match="config must be a MoBAConfig, got 64"):
        dmu.register_moba(64)
    with pytest.raises(
        ValueError, match="the config of this llama has no 'moba' and 'moba_own' was registered without"
    ):
        reference_step(moba_model("llama", "moba_own"), random_batch(1, 9))
    dmu.register_moba(name="moba_later")
    dmu.register_moba(NAMES["moba"], "moba_later")
    reference_step(moba_model("llama", "moba_later"), random_batch(1, 9))
    dmu.register_moba(dmu.MoBAConfig(64, 2, dense="moba_self"), "moba_self")
    with pytest.raises(ValueError, match="dense='moba_self' is MoBA itself"):
        reference_step(moba_model("llama", "moba_self"), random_batch(1, 9))
    dmu.register_moba(dmu.MoBAConfig(64, 2, dense="nope"), "moba_nope")
    with pytest.raises(ValueError, match="dense='nope' is no attention implementation of transformers"):
        reference_step(moba_model("llama", "moba_nope"), random_batch(1, 9))


# What is refused.


@pytest.mark.parametrize(
    "family,what,config",
    [
        ("qwen2", "layer 0 has a sliding window of 8 tokens, which MoBA does not: name 0 in full_attention_layers", {}),
        ("mistral", "layer 0 has a sliding window of 8 tokens", {}),
        ("gemma2", r"layer 0 has a soft cap \(softcap=50.0\)", {}),
        ("gpt_oss", r"layer 0 has attention sinks \(s_aux\)", {}),
        ("llama", r"MoBA has no attention dropout \(0.1\): set config.attention_dropout = 0.0", dict(attention_dropout=0.1)),
    ],
)  # fmt: skip
def test_refused_by_name(family, what, config):
    with pytest.raises(ValueError, match=what):
        reference_step(moba_model(family, **config), random_batch(1, 20))


def refused_on_ranks(family):
    model = moba_model(family)
    handle = dmu.parallelize(model)
    model(**handle.shard(random_batch(1, 20)).inputs)


@pytest.mark.parametrize(
    "family,what", [("mistral", "sliding window of 8"), ("gpt_oss", "sinks"), ("gemma2", "soft cap")]
)
def test_refused_on_every_rank(family, what):
    raises_on_ranks(2, ValueError, what, refused_on_ranks, family)


def test_a_window_that_nothing_leaves():
    batch = random_batch(1, 33)
    model = moba_model("mistral", sliding_window=33)
    assert reference_step(model, batch)[0] == reference_step(moba_model("mistral", sliding_window=None), batch)[0]


def test_windows_in_full_layers():
    """Layer 0 of qwen2 slides; the second layer runs MoBA."""
    dmu.register_moba(dmu.MoBAConfig(**BLOCKS, full_attention_layers=(0,)), "moba_behind")
    dmu.register_moba(dmu.MoBAConfig(64, 1, full_attention_layers=(0,)), "moba_one_block")
    batch = random_batch(2, 33)
    sparse, whole, dense = (
        reference_step(tiny_model("qwen2", attn_implementation=name), batch)
        for name in ("moba_behind", "moba_one_block", "sdpa")
    )
    assert abs(whole[0] - dense[0]) < 1e-9 and abs(sparse[0] - dense[0]) > 1e-3
    model = tiny_model("qwen2", attn_implementation="moba_behind", train=False)
    settings = dict(max_new_tokens=5, do_sample=False, eos_token_id=None)
    cached, anew = (model.generate(batch["input_ids"], **settings, use_cache=use) for use in (True, False))
    assert torch.equal(cached, anew)
    start = model(input_ids=batch["input_ids"][:, :20], use_cache=True)
    rest = model(input_ids=batch["input_ids"][:, 20:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(rest, model(input_ids=batch["input_ids"], use_cache=False).logits[:, 20:])


def test_static_caches_and_other_masks():
    model = moba_model("llama", train=False)
    tokens = random_batch(1, 9)["input_ids"]
    with pytest.raises(ValueError, match="takes caches that grow .* not static ones"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="two-dimensional"):
        model(input_ids=tokens, attention_mask=torch.zeros(1, 1, 9, 9, dtype=torch.float64))
    config = copy.deepcopy(model.config)
    with pytest.raises(ValueError, match="cannot honour this model's additional mask"):
        MoBAFunction("moba", NAMES["moba"]).mask(1, 9, 9, use_vmap=True, config=config)


def test_only_causal_layers():
    model = moba_model("llama")
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ValueError, match="LlamaAttention is not causal, MoBA is: .*'text_config': 'moba'"):
        model(input_ids=random_batch(1, 9)["input_ids"])


# Over ranks.


@pytest.mark.parametrize("family", [*FAMILIES, *WITHOUT_EXTRAS])
def test_over_ranks(family):
    run_ranks(2, on_ranks, family, "packed" if family != "minicpm3" else "plain")


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("strategy", ["packed", "gather_kv"])
@pytest.mark.parametrize("kind", ["plain", "packed", "left", "right"])
def test_batches_over_ranks(kind, strategy, size):
    run_ranks(size, on_ranks, "llama", kind, "moba_mixed", strategy=strategy, kv_heads=2)


@pytest.mark.parametrize("kind", ["plain", "left"])
def test_mla_over_four_ranks(kind):
    run_ranks(4, on_ranks, "deepseek_v3", kind, "moba_mixed")


def test_gathered_keys_need_no_heads():
    run_ranks(4, on_ranks, "llama", "packed", strategy="gather_kv", heads=2, kv_heads=1)


def switches(strategy):
    """Back and forth, recomputation included; without a layout and restored it is the plain model."""
    model, plain = moba_model("llama", kv_heads=2), moba_model("llama", kv_heads=2)
    batch = packed_batch(DOCUMENTS)
    handle = dmu.parallelize(model, strategy=strategy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    shard = handle.shard(batch)
    whole = {key: x for key, x in batch.items() if key != "labels"}
    for enabled in (True, False, True):
        for m in (model, plain):
            dmu.set_moba(m, enabled)
            m.zero_grad()
        want = reference_step(plain, batch)
        loss = handle.loss(model(**shard.inputs).logits, shard)
        loss.backward()
        handle.sum_gradients()
        assert abs(loss.item() - want[0]) < 1e-8
        assert_gradients({k: p.grad for k, p in model.named_parameters()}, want[1], 1e-6)
        with torch.no_grad():
            assert torch.equal(model(**whole, use_cache=False).logits, want[2])
    handle.restore()
    assert torch.equal(reference_step(model, batch)[2], want[2])


@pytest.mark.parametrize("strategy", ["packed", "gather_kv"])
def test_switch_over_ranks(strategy):
    run_ranks(2, switches, strategy)


def test_full_layers_gather_where_heads_are_few():
    run_ranks(4, on_ranks, "llama", "left", "moba_mixed", strategy="gather_kv", heads=2, kv_heads=1)


def switched_on_one_rank():
    model = moba_model("llama")
    handle = dmu.parallelize(model, strategy="gather_kv")
    dmu.set_moba(model, handle.group.rank == 0)
    model(**handle.shard(random_batch(1, 20)).inputs)


def test_switched_on_some_ranks():
    raises_on_ranks(
        2, ValueError, "set_moba was called on some ranks of the sequence-parallel group", switched_on_one_rank
    )


# What models tell their masks only, and what their dense attention would lose.


def tiny(model_type, name, **own):
    """Of a family that is not among the tested ones."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = dict(
        vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, head_dim=12, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **common | own)
    return AutoModelForCausalLM.from_config(config, attn_implementation=name).double().eval()


def test_documents_that_only_the_mask_knows():
    """Persimmon's attention is not given position ids."""
    dmu.register_moba(dmu.MoBAConfig(256, 1), "moba_whole")
    batch = packed_batch(DOCUMENTS)
    inputs = {key: batch[key] for key in ("input_ids", "position_ids")} | {"use_cache": False}
    want = tiny("persimmon", "sdpa")(**inputs).logits
    torch.testing.assert_close(tiny("persimmon", "moba_whole")(**inputs).logits, want, rtol=0, atol=1e-4)
    sparse, oracle = (tiny("persimmon", name)(**inputs).logits for name in ("moba", "moba_oracle"))
    torch.testing.assert_close(sparse, oracle, rtol=0, atol=1e-8)
    assert (sparse - want).abs().max() > 0.1


@pytest.mark.parametrize("lengths", [[33, 33], [33, 21]])
def test_chunks_that_only_the_mask_knows(lengths):
    """Llama 4 chunks one of its layers."""
    chunks = dict(
        attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64, moe_layers=[],
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    dmu.register_moba(dmu.MoBAConfig(256, 1), "moba_whole")
    batch = padded_batch(lengths, 33, "right")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")} | {"use_cache": False}
    got, want = (tiny("llama4_text", name, **chunks)(**inputs).logits for name in ("moba_whole", "sdpa"))
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-4)


def test_windows_that_only_the_mask_knows():
    window = dict(sliding_window=8, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="PhimoeAttention does not hand its sliding window to the attention function"):
        tiny("phimoe", "moba", **window)(**random_batch(1, 20))
    with pytest.raises(ValueError, match="PhimoeAttention does not hand its sliding window to the attention function"):
        dmu.parallelize(tiny("phimoe", "sdpa", **window))


def test_sinks_of_full_layers():
    batch = random_batch(1, 20)
    model = moba_model("gpt_oss", dtype=torch.float32)
    dmu.set_moba(model, False)
    with pytest.raises(
        ValueError, match=r"attention sinks \(s_aux\) would be lost in sdpa: .* 'eager' in MoBAConfig.dense"
    ):
        reference_step(model, batch)
    dmu.register_moba(dmu.MoBAConfig(**BLOCKS, full_attention_layers=(0, 1), dense="eager"), "moba_eager")
    got, want = (
        reference_step(tiny_model("gpt_oss", attn_implementation=name, dtype=torch.float32), batch)
        for name in ("moba_eager", "eager")
    )
    assert abs(got[0] - want[0]) < 1e-5


def test_a_cache_that_slides():
    """While the window holds all tokens they are MoBA's own; then its blocks would begin at another token each time."""
    model = moba_model("mistral", train=False)
    tokens = random_batch(1, 12)["input_ids"]
    want = moba_model("mistral", train=False, sliding_window=None)(input_ids=tokens).logits
    cache = None
    for i in range(7):
        answer = model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = answer.past_key_values
        torch.testing.assert_close(answer.logits[:, 0], want[:, i], rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="a cache that slides with a window of 8 tokens"):
        for i in range(7, 10):
            model(input_ids=tokens[:, i : i + 1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_autocast(family):
    """In bf16; generation with a cache after the switch too."""
    batch = random_batch(1, 33)
    want = reference_step(moba_model(family, dtype=torch.float32), batch)
    model = moba_model(family, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = reference_step(model, batch)
        dmu.set_moba(model, False)
        assert model.generate(batch["input_ids"], max_new_tokens=3, eos_token_id=None).shape == (1, 36)
    assert abs(got[0] - want[0]) < 0.05 * want[0]


def test_a_config_that_means_nothing():
    model = moba_model("llama", "moba_own")
    for value in (dmu.MoBAConfig(), {"block": 3}):
        model.config.moba = value
        with pytest.raises(
            ValueError, match="model.config.moba must be a dict with moba_chunk_size, moba_topk, full_att"
        ):
            reference_step(model, random_batch(1, 9))
