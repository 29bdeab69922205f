"""Every config trains, on a CPU and without a compiler; what is left open is refused by its key."""

import json
from pathlib import Path

import pytest
from rank_pool import raises_on_ranks, run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"
NAMES = ("zero1", "zero2", "zero3", "zero3_offload", "zero3_long")
#: What the host keeps.
OFFLOADED = {"zero3_offload": ["offload_optimizer", "offload_param"], "zero3_long": ["offload_optimizer"]}
AUTO = {"lr": 1e-2, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
_losses: dict[str, list[float]] = {}


def _engine(name, override, auto, dtype="float32"):
    import torch
    from models import tiny_model

    import ds_mla_ulysses as dmu

    model = tiny_model("deepseek_v3", getattr(torch, dtype))
    handle = dmu.parallelize(model)
    config = [CONFIGS / f"{name}.json", CONFIGS / "cpu.json", *override]
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle, **auto)
    return dmu, model, handle, engine


def _train(name, override, dtype):
    """Losses of 3 forwards around 2 steps, and the sum of each parameter."""
    import torch
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.utils import safe_get_full_fp32_param
    from models import random_batch

    def compiles(self, *args, **kwargs):
        raise AssertionError(f"{self.name} is compiled")

    before, OpBuilder.jit_load = OpBuilder.jit_load, compiles
    try:
        _, model, handle, engine = _engine(name, override, AUTO, dtype)
        shards = [handle.shard(random_batch(2, 17, seed)) for seed in range(2)]
        items, losses = handle.num_items(shards), []
        for step in range(3):
            losses.append(0.0)
            for shard in shards:
                with torch.set_grad_enabled(step < 2):
                    loss = handle.loss(engine(**shard.inputs).logits, shard, num_items=items)
                losses[-1] += loss.item()
                if step < 2:
                    engine.backward(loss)
                    engine.step()
        sums = {}
        for key, parameter in model.named_parameters():
            whole = parameter.detach()
            if hasattr(parameter, "ds_id"):
                from deepspeed.runtime.zero import GatheredParameters

                with GatheredParameters([parameter]):
                    whole = parameter.detach().clone()
            sums[key] = (tuple(whole.shape), whole.double().sum().item(), whole.double().square().sum().item())
        assert engine.gradient_clipping() == 1.0
        assert engine.zero_optimization_stage() == int(name[4])
        state = safe_get_full_fp32_param(model.lm_head.weight)
        assert state.device.type == "cpu" and state.dtype == torch.float32
        engine.destroy()
        return losses, sums
    finally:
        OpBuilder.jit_load = before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_trains(name, dtype):
    override = [] if dtype == "float32" else [{"bf16": {"enabled": True}}]
    results = run_ranks(2, _train, name, override, dtype)
    losses, sums = results[0]
    assert all(abs(loss) < 100 for loss in losses)  # also refuses NaN
    assert losses[2] < losses[1] < losses[0]
    assert results[1] == (losses, sums)
    if dtype == "float32":  # whatever is split and wherever it lies, the numbers are the same
        assert losses == pytest.approx(_losses.setdefault(dtype, losses), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("missing", AUTO)
def test_what_is_left_auto_is_refused_by_key(name, missing):
    given = {key: value for key, value in AUTO.items() if key != missing}
    path = "optimizer.params.lr" if missing == "lr" else missing
    raises_on_ranks(
        2, ValueError, rf"leaves {path} \"auto\": give initialize\({missing}=\.\.\.\)", _engine, name, [], given
    )


@pytest.mark.parametrize("name", NAMES)
def test_states_clipping_and_a_bucket(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    assert config["gradient_clipping"] == 1.0 and config["bf16"]["enabled"]
    zero = config["zero_optimization"]
    assert zero["overlap_comm"] and zero["reduce_bucket_size"] < 1e9
    offloaded = [key for key in ("offload_optimizer", "offload_param") if zero.get(key, {}).get("device") == "cpu"]
    assert offloaded == OFFLOADED.get(name, [])
