"""Everything that makes sequences longer at once, in DeepSpeed engines: updates equal those of one process."""

import itertools

import pytest
from rank_pool import run_ranks
from updates import MODELS, WAYS, compare_update

#: DeepSeek-V2-Lite has no latent of queries.
ALL_MODELS = (*MODELS, "deepseek_v2")
TILES = dict(loss_tile=4, mlp_tile=5, checkpointing=True)
#: Head chunks recompute attention, which recompute="keep_attention" keeps.
SETTINGS = {"chunks": TILES | dict(head_chunks=2), "kept": TILES | dict(recompute="keep_attention")}
#: Of models, ways, stages and settings each pair occurs.
CASES = [
    (ALL_MODELS[m], WAYS[(m + stage) % 3], stage, list(SETTINGS)[(m + stage // 2) % 2])
    for m in range(6)
    for stage in range(4)
]


@pytest.mark.parametrize("name,way,stage,settings", CASES)
def test_everything(name, way, stage, settings):
    run_ranks(2, compare_update, name, way, stage, **SETTINGS[settings])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,way,stage,settings",
    [case for case in itertools.product(ALL_MODELS, WAYS, range(4), SETTINGS) if case not in CASES],
)
def test_everything_for_every_model_at_every_stage(name, way, stage, settings):
    run_ranks(2, compare_update, name, way, stage, **SETTINGS[settings])


def test_each_pair_occurs():
    for i, j in itertools.combinations(range(4), 2):
        found = {(case[i], case[j]) for case in CASES}
        assert found == set(itertools.product(*({case[k] for case in CASES} for k in (i, j))))


@pytest.mark.parametrize(
    "strategy,split", [("latent_kv", "contiguous"), ("latent_qkv", "contiguous"), ("gather_kv", "head_tail")]
)
@pytest.mark.parametrize("settings", SETTINGS)
def test_strategies(settings, strategy, split):
    run_ranks(2, compare_update, "deepseek_v3", "uneven", 3, **SETTINGS[settings], strategy=strategy, split=split)
