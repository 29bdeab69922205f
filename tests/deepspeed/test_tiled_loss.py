"""The loss without whole logits, in DeepSpeed engines: updates equal those of one process, and the head stays sharded."""

import itertools

import pytest
import torch
from models import token_loss
from rank_pool import raises_on_ranks, run_ranks
from test_initialize import LR, full_parameters
from updates import MODELS, WAYS, build, compare_update, micro_batches, zero_config

#: Of the product with four stages, each pair occurs.
PAIRS = [(MODELS[m], WAYS[(m + stage) % 3], stage) for m in range(5) for stage in range(4)]


@pytest.mark.parametrize("name,way,stage", PAIRS)
def test_updates(name, way, stage):
    run_ranks(2, compare_update, name, way, stage)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,way,stage", [case for case in itertools.product(MODELS, WAYS, range(4)) if case not in PAIRS]
)
def test_every_model_at_every_stage(name, way, stage):
    run_ranks(2, compare_update, name, way, stage)


@pytest.mark.parametrize("stage", [2, 3])
def test_label_smoothing_and_recomputation(stage):
    run_ranks(2, compare_update, "llama", "uneven", stage, smoothing=0.1, checkpointing=True)


def zero3(tile=4, **more):
    import ds_mla_ulysses as dmu

    model = build("llama", "uneven")
    handle = dmu.parallelize(model, loss_tile=tile, **more)
    engine, *_ = dmu.initialize(model=model, config=zero_config(3), handle=handle)
    (batch, _) = micro_batches("uneven", 0)
    shard = handle.shard(batch)
    return engine, handle, shard, handle.num_items([shard])


def made_on(some, when):
    """Makes the logits on some of the ranks, before or after the loss."""
    engine, handle, shard, items = zero3()
    logits = engine(**shard.inputs).logits
    if when == "before" and handle.group.rank in some:
        logits.argmax(-1)
    loss = handle.loss(logits, shard, items)
    if when == "after" and handle.group.rank in some:
        logits.argmax(-1)
    engine.backward(loss)
    engine.step()
    states = {p.ds_status.name for p in engine.module.lm_head.parameters()}
    engine.destroy()
    return states


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_rank_makes_logits(when):
    assert run_ranks(2, made_on, (0, 1), when) == [{"NOT_AVAILABLE"}] * 2


@pytest.mark.parametrize(
    "rank,when,match",
    [
        (0, "before", "rank 0 is about to make the logits whole and rank 1 to compute the loss"),
        (1, "before", "rank 0 is about to compute the loss and rank 1 to make the logits whole"),
        (0, "after", "rank 0 is about to make the logits whole and rank 1 to run backward"),
    ],
)
def test_one_rank_makes_logits(rank, when, match):
    raises_on_ranks(2, RuntimeError, match, made_on, (rank,), when)


def problem_of_one_rank(kind):
    engine, handle, shard, items = zero3()
    logits = engine(**shard.inputs).logits
    if handle.group.rank == 1:
        items = "many" if kind == "items" else items
        logits = logits[:, 1:] if kind == "logits of another shape" else None if kind == "no logits" else logits
    handle.loss(logits, shard, items)


@pytest.mark.parametrize(
    "kind,error,match",
    [
        ("items", TypeError, "num_items must be what"),
        ("no logits", TypeError, "must be tensors, got NoneType and Tensor"),
    ],
)
def test_problems_are_raised_before_the_head_is_gathered(kind, error, match):
    raises_on_ranks(2, error, match, problem_of_one_rank, kind)


def own_loss(stage):
    """A loss of real logits, and torch's own backward, which DeepSpeed divides by the accumulation steps at the outputs."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    model, plain = build("gemma2", "uneven"), build("gemma2", "uneven")
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    handle = dmu.parallelize(model, loss_tile=4)
    engine, *_ = dmu.initialize(model=model, config=zero_config(stage), handle=handle)
    batches = micro_batches("uneven", 0)
    shards = [handle.shard(batch) for batch in batches]
    items = handle.num_items(shards)
    for batch, shard in zip(batches, shards, strict=True):
        logits = engine(**shard.inputs).logits
        # The mean of the ranks' gradients and of the steps' is taken.
        loss = handle.loss(logits, shard, items) + logits.logsumexp(-1).masked_fill(shard.shift_labels == -100, 0).sum()
        loss.backward()
        engine.step()
        want = plain(input_ids=batch["input_ids"], use_cache=False).logits
        kept = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:] == -100
        extra = want.logsumexp(-1).masked_fill(kept, 0).sum() / (2 * dist.get_world_size())
        (token_loss(want, batch["labels"], items) + extra).backward()
    got = full_parameters(model, stage)
    engine.destroy()
    for name, p in plain.named_parameters():
        want = start[name] - LR * p.grad
        assert (got[name] - want).norm() <= 1e-3 * (want - start[name]).norm() + 1e-6 * want.norm(), name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_real_logits_and_backward_without_the_engine(stage):
    run_ranks(2, own_loss, stage)
