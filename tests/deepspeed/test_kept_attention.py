"""recompute="keep_attention" in DeepSpeed engines: updates equal those of one process, and forward exchanges happen once."""

import pytest
from rank_pool import run_ranks
from test_tiled_loss import compare_update

import ds_mla_ulysses as dmu


def compare(name, way, stage, recompute):
    with dmu.TrafficMeter() as meter:
        compare_update(name, way, stage, checkpointing=True, recompute=recompute)
    steps, micro_batches, layers = 2, 2, 2
    return meter.calls["all_to_all", "forward"] / (steps * micro_batches * layers)


@pytest.mark.parametrize(
    "name,way,stage,recompute,exchanges",
    [
        ("llama", "uneven", 0, "keep_attention", 2),
        ("deepseek_v3", "no labels", 1, "keep_attention", 2),
        ("gemma2", "uneven", 2, "keep_attention", 2),
        ("deepseek_v3", "uneven", 3, "keep_attention", 2),
        ("deepseek_v3", "uneven", 3, "keep_output", 3),
        ("llama tied", "lora", 3, "keep_attention", 2),
        ("llama", "uneven", 3, None, 4),
    ],
)
def test_updates(name, way, stage, recompute, exchanges):
    """An exchange in front of attention and one back, in each layer; and what recomputation repeats."""
    assert run_ranks(2, compare, name, way, stage, recompute) == [exchanges] * 2
