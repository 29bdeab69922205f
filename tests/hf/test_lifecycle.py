"""Patching touches one model and is undone exactly; without a layout the model is the plain one."""

import copy
import itertools
import json
import re
import shutil

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
from rank_pool import RankError, raises_on_ranks, run_ranks
from test_parity import DOCUMENTS, LOSS, sharded_step


def snapshot(model):
    """Everything that patching could leave behind."""
    return {
        name: (type(m), dict(vars(m)), {k: tuple(v) for k, v in vars(m).items() if k.endswith("hooks")})
        for name, m in model.named_modules()
    }


def restores(family, strategy):
    import ds_mla_ulysses as dmu

    model = tiny_model(family)
    model(input_ids=random_batch(1, 12)["input_ids"], use_cache=False)  # long rope keeps its tables after a forward
    keys, parameters, before = list(model.state_dict()), list(model.parameters()), snapshot(model)
    config = copy.deepcopy(model.config.to_dict())
    handle = dmu.parallelize(model, strategy=strategy)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert [name for name, _ in model.named_modules()] == list(before)
    assert model.config.to_dict() == config
    sharded_step(model, random_batch(1, 12), handle)
    handle.restore()
    after = snapshot(model)
    for name, (kind, attributes, hooks) in before.items():
        now = after[name]
        assert now[0] is kind and now[2] == hooks, name
        assert now[1].keys() == attributes.keys(), name
        assert all(now[1][k] is attributes[k] for k in attributes), name
    handle.restore()
    dmu.parallelize(model).restore()


@pytest.mark.parametrize("strategy", ["packed", "latent_kv", "latent_qkv", "gather_kv"])
@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k25", "minicpm3", "longcat_flash"])
def test_restore_puts_every_attribute_back(family, strategy):
    run_ranks(2, restores, family, strategy)


def stacks():
    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3")
    dmu.parallelize(model)
    dmu.parallelize(model)


def test_patches_do_not_stack():
    raises_on_ranks(2, RuntimeError, r"parallelized already: call restore\(\)", stacks)


def copies(how):
    import pickle

    model = tiny_model("youtu", torch.float32)
    import ds_mla_ulysses as dmu

    dmu.parallelize(model)
    copy.deepcopy(model) if how == "deepcopy" else pickle.dumps(model)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_parallel_models_are_not_copied(how):
    raises_on_ranks(2, RuntimeError, r"call handle.restore\(\) first", copies, how)


def other_models():
    """A plain model of the same config object, and a second parallel one with other groups."""
    from transformers import AutoModelForCausalLM

    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3")
    reference = AutoModelForCausalLM.from_config(model.config).double()
    reference.load_state_dict(model.state_dict())
    assert reference.config is model.config or reference.config.to_dict() == model.config.to_dict()
    batch = random_batch(1, 24)
    want = reference_step(tiny_model("deepseek_v3"), batch)
    handle = dmu.parallelize(model, sp_size=2)
    second = tiny_model("youtu")
    want_second = reference_step(tiny_model("youtu"), batch)
    handle_second = dmu.parallelize(second, sp_size=1)
    for _ in range(2):
        with torch.no_grad():
            logits = reference(input_ids=batch["input_ids"], use_cache=False).logits
        assert torch.equal(logits, want[2])  # on every rank: rank 0 alone would hide it
        loss, grads, _ = sharded_step(model, batch, handle)
        assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
        assert_gradients(grads, want[1], 1e-6)
        model.zero_grad()
        assert abs(sharded_step(second, batch, handle_second)[0] - want_second[0]) < 1e-12


def test_other_models_are_untouched():
    run_ranks(2, other_models)


def shared_config():
    """Two models over one config object: only the parallelized one changes."""
    from transformers import DeepseekV3ForCausalLM

    import ds_mla_ulysses as dmu

    first = tiny_model("deepseek_v3")
    config = first.config
    plain = DeepseekV3ForCausalLM(config).double()
    assert plain.config is config and first.config is config
    plain.load_state_dict(first.state_dict())
    batch = random_batch(1, 24)
    want = plain(input_ids=batch["input_ids"], use_cache=False).logits
    dmu.parallelize(first)
    assert config._attn_implementation == "sdpa"
    assert torch.equal(plain(input_ids=batch["input_ids"], use_cache=False).logits, want)


def test_models_that_share_a_config():
    run_ranks(2, shared_config)


def runs_plain(checkpointing, family="deepseek_v3"):
    import ds_mla_ulysses as dmu

    batch = random_batch(1, 16)
    plain, model = tiny_model(family), tiny_model(family)
    handle = dmu.parallelize(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    with torch.no_grad():
        got = model(**batch, use_cache=False)
    assert torch.equal(got.logits, plain(**batch, use_cache=False).logits)
    if checkpointing:
        with handle.plain():
            loss = model(**batch, use_cache=False).loss
        loss.backward()  # recomputes after the block
        assert_gradients(gradients(model), reference_step(plain, batch)[1], 1e-6)
        model.zero_grad()
    padded = padded_batch([16, 9], 16)
    with handle.plain():
        with handle.plain():
            pass
        got = model(**padded, use_cache=False)  # still permitted, and with the masks of the plain model
    assert torch.equal(got.logits, plain(**padded, use_cache=False).logits)
    model.eval(), plain.eval()
    got = model.generate(batch["input_ids"], max_new_tokens=8, do_sample=False)
    assert torch.equal(got, plain.generate(batch["input_ids"], max_new_tokens=8, do_sample=False))
    # A shard is sequence-parallel in evaluation mode too, and the block left nothing behind.
    want = reference_step(tiny_model(family).eval(), batch)
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_without_a_layout_it_is_the_plain_model(family):
    run_ranks(2, runs_plain, False, family)


def test_plain_with_gradients_and_recomputation():
    run_ranks(2, runs_plain, True)


def alone():
    """A group of one communicates nothing and is bitwise the plain model."""
    import ds_mla_ulysses as dmu

    for family in ("deepseek_v3", "mistral4"):
        batch = random_batch(2, 15)
        inputs = dict(input_ids=batch["input_ids"], position_ids=torch.arange(15).expand(2, 15))
        plain, model = (tiny_model(family, torch.float32) for _ in range(2))
        want = plain(**inputs, use_cache=False).logits
        want.square().mean().backward()
        handle = dmu.parallelize(model)
        with dmu.TrafficMeter() as meter:
            got = model(**handle.shard(inputs).inputs).logits
            got.square().mean().backward()
        assert meter.total_bytes == 0 and not meter.calls and handle.group.size == 1
        assert torch.equal(got, want)
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-6, msg=name)


def test_alone():
    run_ranks(1, alone)


def saves(folder):
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3", torch.float32)
    want = model(**random_batch(1, 12), use_cache=False).logits
    dmu.parallelize(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with open(f"{folder}/config.json") as file:
        assert "ulysses" not in json.dumps(json.load(file))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    assert torch.equal(loaded(**random_batch(1, 12), use_cache=False).logits, want)


def test_save_pretrained_knows_nothing_of_us(tmp_path):
    run_ranks(2, saves, str(tmp_path))


def two_forwards(reentrant, family="deepseek_v3"):
    """Two forwards with different documents before one backward, as preference training does."""
    import ds_mla_ulysses as dmu

    layouts = ([[13, 5, 15]], [[8, 25]])
    batches = [packed_batch(layout, seed=i) for i, layout in enumerate(layouts)]
    plain = tiny_model(family)
    if family == "minicpm3":  # long rope looks at the longest position of the whole batch
        want = [reference_step(plain, batch)[0] for batch in batches]
    else:
        want = [per_document_step(plain, batch, layout)[0] for batch, layout in zip(batches, layouts, strict=True)]
    model = tiny_model(family)
    handle = dmu.parallelize(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    losses = []
    for batch in batches:
        shard = handle.shard(batch)
        losses.append(handle.loss(model(**shard.inputs).logits, shard))
    sum(losses).backward()
    handle.sum_gradients()
    assert all(abs(a.item() - b) < LOSS[family] * b for a, b in zip(losses, want, strict=True))
    assert_gradients(gradients(model), gradients(plain), 1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_forwards_before_one_backward(family):
    run_ranks(2, two_forwards, None, family)


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_forwards_and_recomputation(reentrant):
    run_ranks(2, two_forwards, reentrant)


def recomputes(reentrant):
    """Five steps of varying length and layout: gradients are bitwise those without recomputation."""
    import ds_mla_ulysses as dmu

    models = [tiny_model("deepseek_v3"), tiny_model("deepseek_v3")]
    handles = [dmu.parallelize(model) for model in models]
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=reentrant))
    for step, layout in enumerate([[[33]], DOCUMENTS, [[7, 12]], [[50]], [[5, 5, 5]]]):
        results = [
            sharded_step(model, packed_batch(layout, seed=step), handle)
            for model, handle in zip(models, handles, strict=True)
        ]
        assert results[0][0] == results[1][0]
        assert all(torch.equal(results[1][1][name], g) for name, g in results[0][1].items())
        for model in models:
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.01 * parameter.grad
            model.zero_grad()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_gives_identical_gradients(reentrant):
    run_ranks(2, recomputes, reentrant)


def compiled(backend, layouts=10, rtol=1e-12):
    """Compiled layers give the gradients of eager, with the same number of graphs for every layout."""
    from torch._dynamo.utils import counters

    import ds_mla_ulysses as dmu

    torch._dynamo.reset()
    eager, model = tiny_model("youtu"), tiny_model("youtu")
    eager_handle, handle = dmu.parallelize(eager), dmu.parallelize(model)
    for layer in model.model.layers:
        layer.compile(backend=backend)
    graphs = []
    for i in range(layouts):
        cuts = sorted({0, 40, *(1 + (7 * i + 5 * j) % 39 for j in range(i))})
        layout = [[b - a for a, b in itertools.pairwise(cuts)]]
        batch = packed_batch(layout, seed=i)
        want = sharded_step(eager, batch, eager_handle)
        with dmu.TrafficMeter() as meter:
            got = sharded_step(model, batch, handle)
        assert abs(got[0] - want[0]) <= rtol * abs(want[0])
        assert_gradients(got[1], want[1], rtol)
        assert meter.calls["all_to_all", "forward"] == 4 and meter.calls["all_to_all", "backward"] == 6
        assert meter.calls["all_gather", "forward"] == 2
        graphs.append(counters["stats"]["unique_graphs"])
        eager.zero_grad(), model.zero_grad()
    return graphs


def test_compiled_layers_serve_all_layouts():
    for graphs in run_ranks(2, compiled, "aot_eager", timeout=400):
        assert graphs[0] > 0 and len(set(graphs[1:])) == 1, graphs


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_by_inductor():
    for graphs in run_ranks(2, compiled, "inductor", 3, 1e-6, timeout=400):
        assert graphs[1] == graphs[2], graphs


def loses_its_peer():
    import os
    import signal

    import ds_mla_ulysses as dmu

    model = tiny_model("llama")
    handle = dmu.parallelize(model)
    shard = handle.shard(random_batch(1, 12))
    model(**shard.inputs)
    if handle.group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):  # what has arrived already may be enough for the first
        model(**shard.inputs)


@pytest.mark.slow  # it ends the ranks of a pool, whose start takes seconds
def test_a_rank_that_is_killed_ends_the_others():
    """At once, with gloo's own message, which docs/limits.md describes."""
    with pytest.raises(RankError) as caught:
        run_ranks(2, loses_its_peer)
    survivor, killed = str(caught.value).split("--- rank ")[1:]
    assert re.search("Connection closed by peer|Connection reset by peer|Broken pipe", survivor), survivor
    assert "ended with exit code -9" in killed and "no answer after" not in str(caught.value)
