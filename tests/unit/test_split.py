"""Which tokens a rank holds: contiguous, and head and tail."""

import pytest
import torch

from ds_mla_ulysses.comm.group import SequenceGroup
from ds_mla_ulysses.layout.batch import shard_batch
from ds_mla_ulysses.layout.shard import ShardLayout
from ds_mla_ulysses.layout.split import by_rank, in_order, local_runs

SPLITS = pytest.mark.parametrize("split", ["contiguous", "head_tail"])


def groups(size, split):
    return [SequenceGroup(None, rank, size, split) for rank in range(size)]


def tokens(runs):
    return [i for run in runs for i in range(run.start, run.stop)]


def test_chunks_from_both_ends():
    """Two chunks of three tokens each, of twelve or twenty-four."""
    assert [tokens(local_runs(g, 6)) for g in groups(2, "head_tail")] == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert local_runs(groups(2, "head_tail")[1], 6) == [slice(3, 9)]  # neighbours are one run
    assert local_runs(groups(4, "head_tail")[1], 6) == [slice(3, 6), slice(18, 21)]
    assert local_runs(groups(4, "contiguous")[1], 6) == [slice(6, 12)]
    assert local_runs(groups(1, "head_tail")[0], 5) == [slice(0, 5)]


@SPLITS
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_token_has_one_rank_and_comes_back_in_order(size, split):
    held = [tokens(local_runs(g, 4)) for g in groups(size, split)]
    gathered = torch.tensor(held).flatten()
    assert gathered.sort().values.tolist() == list(range(4 * size))
    for group in groups(size, split):
        assert in_order(gathered, group).tolist() == list(range(4 * size))
        assert torch.equal(by_rank(in_order(gathered, group), group), gathered)
        rows = torch.stack([gathered, -gathered])
        assert torch.equal(in_order(rows, group, dim=1)[1], -torch.arange(4 * size))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_causal_pairs_are_equal(size):
    pairs = [sum(i + 1 for i in tokens(local_runs(g, 10))) for g in groups(size, "head_tail")]
    assert len(set(pairs)) == 1 and sum(pairs) == 10 * size * (10 * size + 1) // 2


def test_tokens_that_do_not_divide():
    with pytest.raises(ValueError, match="a rank has 5 tokens, .* into 2: pad the sequence to a multiple of 4"):
        local_runs(groups(2, "head_tail")[0], 5)


@pytest.mark.parametrize("S", [1, 3, 12, 13, 15])
def test_batches_of_head_and_tail(S):
    """Padded to twice the ranks; labels are shifted before the split; positions are the two runs."""
    batch = {"input_ids": torch.arange(1, S + 1)[None], "labels": torch.arange(1, S + 1)[None], "other": "kept"}
    size, width = 2, -(-S // 4)
    parts = [shard_batch(batch, group, check=False) for group in groups(size, "head_tail")]
    labels = [*range(2, S + 1), *[-100] * (4 * width - S + 1)]
    ids = [*range(1, S + 1), *[0] * (4 * width - S)]
    positions = [*range(S), *range(4 * width - S)]
    for rank, part in enumerate(parts):
        mine = [*range(rank * width, (rank + 1) * width), *range((3 - rank) * width, (4 - rank) * width)]
        for name, whole in (("input_ids", ids), ("shift_labels", labels), ("position_ids", positions)):
            assert (part.shift_labels if name == "shift_labels" else part.inputs[name]).tolist() == [
                [whole[i] for i in mine]
            ], name
        assert part.inputs["other"] == "kept"
        assert part.layout == ShardLayout("head_tail", 2, rank, 4 * width, S) == part.inputs["ulysses_layout"]
        assert part.layout.local_tokens == sum(i < S for i in mine)


@pytest.mark.parametrize("S", [1, 7, 8])
def test_local_tokens_of_contiguous_shards(S):
    parts = [shard_batch({"input_ids": torch.ones(1, S)}, group, check=False) for group in groups(4, "contiguous")]
    assert [part.layout.local_tokens for part in parts] == [int(part.inputs["input_ids"].sum()) for part in parts]


def test_the_group_says_how():
    batch, group = {"input_ids": torch.arange(8)[None]}, SequenceGroup(None, 0, 1)
    assert shard_batch(batch, group).layout.kind == "contiguous"
    assert shard_batch(batch, group.with_split("head_tail")).layout.kind == "head_tail"
    with pytest.raises(ValueError, match=r"split must be one of \['contiguous', 'head_tail'\], got 'zigzag'"):
        group.with_split("zigzag")
