"""Engines from initialize: their updates are one process's updates, at every ZeRO stage."""

import pytest
import torch
from models import FAMILIES, random_batch, tiny_model, token_loss
from rank_pool import raises_on_ranks, run_ranks

LR = 0.02


def engine_config(stage, clip=0.0, accumulation=1, reduce_scatter=True, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage, "reduce_scatter": reduce_scatter},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    } | more


def micro_batches(step, data_size, accumulation):
    """Uneven token counts: 2 labels in one micro-batch, many in the next."""
    rows = []
    for micro in range(accumulation):
        row = [random_batch(2, 17, seed=100 * step + 10 * micro + d) for d in range(data_size)]
        for d, batch in enumerate(row):
            batch["labels"][:, : 15 if micro == 0 else 3 + d] = -100
        rows.append(row)
    return rows


def plain_steps(family, steps, data_size, accumulation, clip, aux=0.0):
    """Losses and parameters of one process; its gradient norms before clipping."""
    model = tiny_model(family, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(steps):
        batches = [b for row in micro_batches(step, data_size, accumulation) for b in row]
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        total = 0.0
        for batch in batches:
            out = model(
                input_ids=batch["input_ids"], use_cache=False, **({"output_router_logits": True} if aux else {})
            )
            loss = token_loss(out.logits, batch["labels"], items)
            if aux:
                loss = loss + aux * out.aux_loss
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def full_parameters(model, stage):
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: (safe_get_full_fp32_param(p) if stage == 3 else p.detach()) for n, p in model.named_parameters()}


def engine_steps(model, handle, config, steps, accumulation, aux=0.0):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    losses, norms = [], []
    for step in range(steps):
        rows = micro_batches(step, handle.data_size, accumulation)
        shards = [handle.shard(row[handle.data_rank]) for row in rows]
        num_items = handle.num_items(shards)
        total = torch.zeros(())
        for shard in shards:
            out = engine(**shard.inputs, **({"output_router_logits": True} if aux else {}))
            loss = handle.loss(out.logits, shard, num_items=num_items)
            if aux:
                loss = loss + aux * out.aux_loss
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / handle.group.size)
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return engine, losses, norms


def compare_update(family, sp_size, stage, clip, reduce_scatter, steps=3, accumulation=2, aux=0.0, **way):
    import ds_mla_ulysses as dmu

    model = tiny_model(family, torch.float32)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = dmu.parallelize(model, sp_size=sp_size, **way)
    config = engine_config(stage, clip, accumulation, reduce_scatter)
    engine, losses, norms = engine_steps(model, handle, config, steps, accumulation, aux)
    got = full_parameters(model, stage)
    engine.destroy()
    want_losses, want_norms, want = plain_steps(family, steps, handle.data_size, accumulation, clip, aux)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    if stage:  # stage 0 in fp32 reports no norm
        assert norms == pytest.approx(want_norms, rel=1e-4)
    for name, expected in want.items():
        error = (got[name] - expected).norm()
        assert error <= 1e-5 * expected.norm(), name
        # Next to what the steps changed, which a wrong scale would show at any learning rate.
        assert error <= 1e-3 * (expected - start[name]).norm() + 1e-6 * expected.norm(), name
    return {name: float(p.double().sum()) for name, p in got.items()}


@pytest.mark.parametrize("size,stage", [(2, 2), (4, 3)])
def test_auxiliary_losses_of_routers(size, stage):
    """Lengths of 17 tokens, two micro-batches, and two data-parallel groups on 4 ranks."""
    sums = run_ranks(size, compare_update, "qwen3_moe", 2, stage, 0.0, True, aux=1.0)
    assert all(other == sums[0] for other in sums)


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("stage,reduce_scatter", [(0, True), (1, True), (2, True), (2, False), (3, True), (3, False)])
@pytest.mark.parametrize("size,sp_size", [(2, 2), (4, 2)])
def test_three_sgd_steps(size, sp_size, stage, reduce_scatter, clip):
    sums = run_ranks(size, compare_update, "deepseek_v3", sp_size, stage, clip, reduce_scatter)
    assert all(s == sums[0] for s in sums)  # no rank drifts


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "way", [dict(strategy="latent_kv"), dict(strategy="latent_qkv"), dict(strategy="gather_kv", split="head_tail")]
)
def test_strategies(way, stage):
    """With the latent ones each rank has the gradient of its own heads, in weights that ZeRO-3 takes apart."""
    run_ranks(2, compare_update, "deepseek_v3", 2, stage, 0.5, True, **way)


@pytest.mark.matrix
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "family,way",
    [
        (family, way)
        for family in (*FAMILIES, "llama", "qwen2", "qwen3_moe", "mixtral", "phi3")
        for way in (dict(strategy="packed"), dict(strategy="gather_kv", split="head_tail"))
    ],
)
def test_every_family_at_every_stage(family, way, stage):
    run_ranks(2, compare_update, family, 2, stage, 0.5, True, **way)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_num_items(stage):
    """One micro-batch, one data-parallel group: the mean needs no count."""
    run_ranks(2, mean_update, stage)


def mean_update(stage):
    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.float32)
    handle = dmu.parallelize(model)
    engine, *_ = dmu.initialize(model=model, config=engine_config(stage), handle=handle)
    ((batch,),) = micro_batches(0, 1, 1)
    shard = handle.shard(batch)
    engine.backward(handle.loss(engine(**shard.inputs).logits, shard))
    engine.step()
    got = full_parameters(model, stage)
    engine.destroy()
    want = plain_steps("youtu", 1, 1, 1, 0.0)[2]
    assert all((got[n] - p).norm() <= 1e-5 * p.norm() for n, p in want.items())


def refuses_mean(accumulation, sp_size):
    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.float32)
    handle = dmu.parallelize(model, sp_size=sp_size)
    engine, *_ = dmu.initialize(model=model, config=engine_config(0, accumulation=accumulation), handle=handle)
    shard = handle.shard(random_batch(2, 8))
    handle.loss(engine(**shard.inputs).logits, shard)


@pytest.mark.parametrize("size,accumulation,sp_size", [(2, 2, 2), (4, 1, 2)])
def test_a_mean_that_is_not_the_steps_is_refused(size, accumulation, sp_size):
    raises_on_ranks(size, ValueError, "pass num_items=handle.num_items", refuses_mean, accumulation, sp_size)


def routes_apart(family, steps):
    """Twelve steps of ZeRO-3 in which ranks route to different numbers of experts: no rank waits for another."""
    import ds_mla_ulysses as dmu

    model = tiny_model(family, torch.float32, n_routed_experts=6 if family == "longcat_flash" else 16, seed=3)
    counts = []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda m, args: counts.append(len(set(args[1].flatten().tolist()))))
    handle = dmu.parallelize(model)
    engine, losses, _ = engine_steps(model, handle, engine_config(3), steps, 1)
    engine.destroy()
    return counts, losses


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_zero3_survives_uneven_routing(family):
    (first, losses), (second, other) = run_ranks(2, routes_apart, family, 12, timeout=120)
    assert first != second  # the data does what the test is for
    assert losses == other and all(x == x for x in losses)


def next_engine_is_plain():
    """DeepSpeed's process-wide mpu is put back: a plain engine made afterwards is right, and the old one stays right."""
    import deepspeed
    from deepspeed.utils import groups

    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.float32)
    handle = dmu.parallelize(model)
    engine, *_ = dmu.initialize(model=model, config=engine_config(2), handle=handle)
    assert groups.mpu is None
    plain = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(plain.weight)
    second, *_ = deepspeed.initialize(model=plain, config=engine_config(0))
    loss = second(torch.ones(2, 3)).sum()
    second.backward(loss)
    second.step()
    torch.testing.assert_close(plain.weight, torch.ones(3, 3) - LR * 2)  # the ranks' mean: both have the same data
    ((batch,),) = micro_batches(0, 1, 1)
    shard = handle.shard(batch)
    engine.backward(handle.loss(engine(**shard.inputs).logits, shard))
    engine.step()
    want = plain_steps("youtu", 1, 1, 1, 0.0)[2]
    assert all((p.detach() - want[n]).norm() <= 1e-5 * want[n].norm() for n, p in model.named_parameters())
    engine.destroy()


def test_the_next_plain_engine_is_right():
    run_ranks(2, next_engine_is_plain)


def of_deepspeed():
    """All functions and classes of DeepSpeed's loaded modules, and the attributes of these classes."""
    import sys

    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed" and module is not None:
            for key, value in vars(module).items():
                if callable(value):
                    found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(name, key, attribute): x for attribute, x in vars(value).items() if callable(x)}
    return found


def touches(stage, launched, folder):
    """One process: what `initialize` changes in the environment and in DeepSpeed, and what training needs of it."""
    import os
    from unittest import mock

    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compatible
    from deepspeed.utils import groups, z3_leaf_module

    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3", torch.float32)
    handle = dmu.parallelize(model)
    config = engine_config(stage, accumulation=2)
    seen = {}

    def recorded(original):
        def create(*args, **kwargs):
            seen.update(local_rank=os.environ.get("LOCAL_RANK"), extension=compatible.get("deepspeed_shm_comm"))
            return original(*args, **kwargs)

        return create

    def fails(*args, **kwargs):
        raise OSError("no engine")

    with mock.patch.dict(os.environ):
        if launched:
            os.environ["LOCAL_RANK"] = "0"
        else:
            os.environ.pop("LOCAL_RANK", None)
        environment, extensions, symbols = dict(os.environ), dict(compatible), of_deepspeed()
        with mock.patch.object(deepspeed, "initialize", fails), pytest.raises(OSError, match="no engine"):
            dmu.initialize(model=model, config=config, handle=handle)
        assert dict(os.environ) == environment and dict(compatible) == extensions and groups.mpu is None
        with mock.patch.object(deepspeed, "initialize", recorded(deepspeed.initialize)):
            engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
        assert seen == {"local_rank": "0", "extension": False}
        stays = {} if launched or stage < 3 else {"LOCAL_RANK": "0"}
        assert {k: v for k, v in os.environ.items() if environment.get(k) != v} == stays
        assert dict(compatible) == extensions and groups.mpu is None
        now = of_deepspeed()
        assert [name for name, value in symbols.items() if now.get(name) is not value] == []
        replaced = {"backward", "_take_model_step"} & set(vars(engine))
        assert replaced == ({"backward", "_take_model_step"} if stage == 0 else {"backward"})
        leaves = [name for name, module in model.named_modules() if z3_leaf_module(module)]
        experts = [name for name, _ in model.named_modules() if name.endswith(".experts")]
        assert experts and leaves == (experts if stage == 3 else [])
        for step in range(3):  # ZeRO-3 compares the order of modules between ranks after the first one
            shards = [handle.shard(batch) for (batch,) in micro_batches(step, 1, 2)]
            for shard in shards:
                loss = handle.loss(engine(**shard.inputs).logits, shard, num_items=handle.num_items(shards))
                engine.backward(loss)
                engine.step()
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        got = full_parameters(model, stage)
        engine.destroy()
    want = plain_steps("deepseek_v3", 3, 1, 2, 0.0)[2]
    assert all((got[n] - p).norm() <= 1e-5 * p.norm() for n, p in want.items())


@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_touched_is_put_back(stage, launched, tmp_path):
    run_ranks(1, touches, stage, launched, str(tmp_path))


def constructed_under_zero3(sp_size):
    """A model that is never whole on any rank: HfDeepSpeedConfig, then parallelize, then initialize."""
    import torch._dynamo
    from models import tiny_config
    from transformers import DeepseekV3ForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import ds_mla_ulysses as dmu

    config = engine_config(3, sequence_parallel_size=sp_size)
    keep = HfDeepSpeedConfig(config)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM._from_config(tiny_config("deepseek_v3"), dtype=torch.float32)
    partitioned = all(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters() if p.ndim > 1)
    del keep
    handle = dmu.parallelize(model, sp_size=sp_size)
    engine, losses, _ = engine_steps(model.train(), handle, config, 2, 1)
    engine.destroy()
    return partitioned, losses


def test_construction_under_zero3():
    answers = run_ranks(2, constructed_under_zero3, 2)
    assert all(partitioned for partitioned, _ in answers)
    assert answers[0][1] == answers[1][1] and answers[0][1][1] != answers[0][1][0]


def brings_its_data():
    """training_data: DeepSpeed's loader gives the ranks of a group the same samples and groups different ones."""
    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.float32)
    handle = dmu.parallelize(model, sp_size=2)
    data = [{"input_ids": torch.full((8,), i)} for i in range(8)]
    engine, _, loader, _ = dmu.initialize(model=model, config=engine_config(1), handle=handle, training_data=data)
    seen = [batch["input_ids"][:, 0].tolist() for batch in loader]
    size = engine.train_batch_size()
    engine.destroy()
    return seen, size


def test_data_of_deepspeeds_own_loader():
    answers = run_ranks(4, brings_its_data)
    (first, size), (second, _), (third, _), (fourth, _) = answers
    assert first == second and third == fourth
    assert sorted(i for part in first + third for i in part) == list(range(8))
    assert size == 4  # 2 samples x 2 data-parallel groups


def bad_config(change):
    import deepspeed
    from deepspeed.utils import groups

    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.float32)
    handle = dmu.parallelize(model)
    config, auto = engine_config(1), {}
    if change == "mesh":
        groups.mesh_device = object()
        try:
            return dmu.initialize(model=model, config=config, handle=handle)
        finally:
            groups.mesh_device = None
    if change == "restored":
        handle.restore()
    if change == "other model":
        model = tiny_model("youtu", torch.float32)
    if change == "auto":
        config["optimizer"]["params"]["lr"] = config["gradient_accumulation_steps"] = "auto"
        auto = {"lr": 0.1}
    if change == "unused":
        auto = {"lr": 0.1}
    if change == "mics":
        config["zero_optimization"]["mics_shard_size"] = 2
    if change == "unmanaged":
        config["managed_gradient_accumulation"] = False
    if change in ("prescale_gradients", "gradient_predivide_factor", "sequence_parallel_size"):
        config[change] = {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "sequence_parallel_size": 4}[
            change
        ]
    if change == "twice":
        dmu.initialize(model=model, config=config, handle=handle)
    deepspeed.zero  # noqa: B018
    return dmu.initialize(model=model, config=config, handle=handle, **auto)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ("mesh", RuntimeError, "device mesh"),
        ("restored", RuntimeError, "restored"),
        ("other model", ValueError, "another model"),
        ("auto", ValueError, r"leaves gradient_accumulation_steps \"auto\": give initialize"),
        ("unused", ValueError, "lr: no key of that name"),
        ("prescale_gradients", ValueError, "prescale_gradients changes the gradient scale"),
        ("gradient_predivide_factor", ValueError, "gradient_predivide_factor changes"),
        (
            "sequence_parallel_size",
            ValueError,
            "sequence_parallel_size is 4 in the DeepSpeed config, but the handle has 2",
        ),
        ("mics", ValueError, "mics_shard_size changes"),
        ("unmanaged", ValueError, "managed_gradient_accumulation=false changes"),
        ("twice", RuntimeError, "already has an engine"),
    ],
)
def test_refused(change, error, message):
    raises_on_ranks(2, error, message, bad_config, change)


def test_configs_merge_key_by_key(tmp_path):
    from ds_mla_ulysses.integrations.deepspeed import load_config

    file = tmp_path / "base.json"
    file.write_text('{"zero_optimization": {"stage": 3, "overlap_comm": true}, "bf16": {"enabled": true}}')
    merged = load_config([str(file), {"zero_optimization": {"overlap_comm": False}}, {"bf16": {"enabled": "auto"}}])
    assert merged == {"zero_optimization": {"stage": 3, "overlap_comm": False}, "bf16": {"enabled": "auto"}}


def partial_sums_dtype(given):
    import ds_mla_ulysses as dmu

    model = tiny_model("youtu", torch.bfloat16)
    handle = dmu.parallelize(model)
    config = engine_config(2, bf16={"enabled": True}, **given)
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    dtype = engine.communication_data_type
    engine.destroy()
    return dtype


@pytest.mark.parametrize(
    "given,dtype",
    [
        ({}, torch.float32),
        ({"seq_parallel_communication_data_type": "bf16"}, torch.bfloat16),
        ({"communication_data_type": "bf16"}, torch.bfloat16),
    ],
)
def test_partial_sums_travel_in_fp32(given, dtype):
    assert run_ranks(2, partial_sums_dtype, given) == [dtype] * 2
