"""Everything that makes sequences longer at once, in DeepSpeed engines: updates equal those of one process."""

import itertools

import pytest
from rank_pool import run_ranks
from updates import MODELS, WAYS, compare_update

#: DeepSeek-V2-Lite has no latent of queries.
ALL_MODELS = (*MODELS, "deepseek_v2")
EVERYTHING = dict(loss_tile=4, mlp_tile=5, head_chunks=2, checkpointing=True)
#: Of models, ways and stages each pair occurs.
PAIRS = [(ALL_MODELS[m], WAYS[(m + stage) % 3], stage) for m in range(6) for stage in range(4)]


@pytest.mark.parametrize("name,way,stage", PAIRS)
def test_everything(name, way, stage):
    run_ranks(2, compare_update, name, way, stage, **EVERYTHING)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,way,stage", [case for case in itertools.product(ALL_MODELS, WAYS, range(4)) if case not in PAIRS]
)
def test_everything_for_every_model_at_every_stage(name, way, stage):
    run_ranks(2, compare_update, name, way, stage, **EVERYTHING)
