"""Checkpoints: another sp, another world size, DeepSpeed's own fp32 export, and `save_pretrained`."""

import json
import subprocess
import sys

import pytest
from rank_pool import run_ranks

MICRO_BATCHES = 4  # of a step, over all data-parallel groups
FAMILY = "deepseek_v3"
#: What makes sequences longer, in two settings: what one of them keeps for recomputation, the other one frees.
TILED = dict(loss_tile=4, mlp_tile=5)
CHUNKS, KEPT = TILED | dict(head_chunks=2), TILED | dict(recompute="keep_attention")


def _start(stage, sp, optimizer="Adam", universal=False, settings=None):
    import torch
    from models import tiny_model

    import ds_mla_ulysses as dmu

    model = tiny_model(FAMILY, torch.float32)
    handle = dmu.parallelize(model, sp_size=sp, **(settings or {}))
    if settings is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    parameters = {"lr": 1e-2, "torch_adam": True} if optimizer == "Adam" else {"lr": 0.1, "momentum": 0.9}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": MICRO_BATCHES // handle.data_size,
        "gradient_clipping": 0.5,
        "optimizer": {"type": optimizer, "params": parameters},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    return model, handle, engine


def _step(handle, engine, seed):
    from models import random_batch

    batches = [random_batch(1, 17 + i, 10 * seed + i) for i in range(MICRO_BATCHES)]
    shards = [handle.shard(batch) for batch in batches[handle.data_rank :: handle.data_size]]
    num_items = handle.num_items(shards)
    for shard in shards:
        engine.backward(handle.loss(engine(**shard.inputs).logits, shard, num_items=num_items))
        engine.step()


def _whole(model):
    """Parameters, as arrays."""
    from deepspeed.runtime.zero import GatheredParameters

    values = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]):
            values[name] = parameter.detach().float().numpy().copy()
    return values


def train_save_train(folder, stage, sp, optimizer="Adam", settings=None):
    """Two steps, a checkpoint, one more step: parameters at the checkpoint and at the end."""
    model, handle, engine = _start(stage, sp, optimizer, settings=settings)
    for seed in range(2):
        _step(handle, engine, seed)
    engine.save_checkpoint(folder, tag="two", client_state={"step": 2})
    saved = _whole(model)
    _step(handle, engine, 2)
    end = _whole(model)
    engine.destroy()
    handle.restore()
    return saved, end


def load_train(folder, stage, sp, universal=False, optimizer="Adam", settings=None):
    """The same step from the checkpoint: parameters after loading and at the end."""
    model, handle, engine = _start(stage, sp, optimizer, universal, settings)
    path, state = engine.load_checkpoint(folder)
    assert path is not None and state["step"] == 2
    loaded = _whole(model)
    _step(handle, engine, 2)
    end = _whole(model)
    engine.destroy()
    handle.restore()
    return loaded, end


def apart(got, want):
    """Largest relative distance of a parameter, and its name."""
    import numpy as np

    assert set(got) == set(want)
    norm = np.linalg.norm
    distances = [(float(norm(got[name] - want[name]) / norm(want[name])), name) for name in want]
    assert all(np.isfinite(distance) for distance, _ in distances), distances  # max would overlook a NaN
    return max(distances)


def assert_continues(results, saved, end):
    for loaded, continued in results:
        assert apart(loaded, saved)[0] == 0.0
        assert apart(continued, end)[0] < 1e-5, apart(continued, end)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("size", "before", "after"), [(2, 2, 1), (4, 2, 4)])
def test_other_sp_on_the_same_ranks(tmp_path, size, before, after, stage, optimizer):
    saved, end = run_ranks(size, train_save_train, str(tmp_path), stage, before, optimizer)[0]
    assert apart(end, saved)[0] > 1e-3  # the step that is compared does something
    results = run_ranks(size, load_train, str(tmp_path), stage, after, False, optimizer)
    assert_continues(results, saved, end)


@pytest.mark.parametrize("stage", [2, 3])
def test_with_everything_that_makes_sequences_longer(tmp_path, stage):
    """Saved with it, continued with it in other settings, and without it."""
    saved, end = run_ranks(2, train_save_train, str(tmp_path), stage, 2, settings=CHUNKS)[0]
    for sp, settings in ((2, CHUNKS), (2, KEPT), (1, None)):
        assert_continues(run_ranks(2, load_train, str(tmp_path), stage, sp, settings=settings), saved, end)


@pytest.mark.parametrize("stage,settings", [(1, None), (2, None), (3, None), (2, KEPT), (3, CHUNKS)])
def test_other_number_of_ranks(tmp_path, stage, settings):
    """By DeepSpeed's universal checkpoint: 4 ranks in groups of 2, then 2 ranks."""
    saved, end = run_ranks(4, train_save_train, str(tmp_path), stage, 2, settings=settings)[0]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    folders = ["--input_folder", str(tmp_path / "two"), "--output_folder", str(tmp_path / "two_universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    converted = subprocess.run([*command, *folders, *workers], capture_output=True, text=True, timeout=120)
    assert converted.returncode == 0, converted.stdout + converted.stderr
    for sp in (2, 1):
        results = run_ranks(2, load_train, str(tmp_path), stage, sp, True, settings=settings)
        assert_continues(results, saved, end)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp32_export_equals_the_model(tmp_path, stage):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from models import tiny_model

    saved, _ = run_ranks(2, train_save_train, str(tmp_path), stage, 2)[0]
    exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert apart({name: exported[name].detach().numpy() for name in saved}, saved)[0] == 0.0
    assert set(exported) == set(tiny_model(FAMILY).state_dict())  # buffers too, and nothing of ours


def train_save_pretrained(folder, stage, restore):
    import torch
    import torch.distributed as dist
    from models import random_batch

    model, handle, engine = _start(stage, 2)
    _step(handle, engine, 0)
    state = engine._zero3_consolidated_16bit_state_dict() if stage == 3 else model.state_dict()
    if restore:
        handle.restore()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    whole = _whole(model)
    logits = None
    if stage < 3:
        with torch.no_grad():
            logits = model.eval()(random_batch(2, 17, 5)["input_ids"], use_cache=False).logits.numpy()
    engine.destroy()
    return whole, logits


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_save_pretrained_loads_in_plain_transformers(tmp_path, stage, restore):
    import torch
    from models import random_batch, tiny_model
    from transformers import AutoModelForCausalLM

    plain = tiny_model(FAMILY, torch.float32)
    plain.save_pretrained(tmp_path / "plain")
    whole, logits = run_ranks(2, train_save_pretrained, str(tmp_path / "trained"), stage, restore)[0]
    loaded, said = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", output_loading_info=True)
    assert not any(said.values()), said
    assert set(loaded.state_dict()) == set(plain.state_dict())
    assert apart({name: p.detach().numpy() for name, p in loaded.named_parameters()}, whole)[0] == 0.0

    # `loaded` chooses its experts' implementation anew: the tiny models run them eagerly.
    loaded.config._experts_implementation = "eager"
    ids = random_batch(2, 17, 5)["input_ids"]
    with torch.no_grad():
        got = loaded.eval()(ids, use_cache=False).logits
        for name, parameter in plain.named_parameters():
            parameter.copy_(torch.from_numpy(whole[name]))
        assert torch.equal(got, plain.eval()(ids, use_cache=False).logits)
    if logits is not None:
        assert torch.allclose(got, torch.from_numpy(logits), rtol=1e-5, atol=1e-5)

    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "trained")]
    assert configs[0] == configs[1]
    assert "ulysses" not in json.dumps(configs[1]).lower()
