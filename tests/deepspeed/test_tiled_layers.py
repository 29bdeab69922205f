"""Tiles of norms, MLPs and experts in DeepSpeed engines: updates equal those of one process, and weights stay sharded."""

import itertools
from unittest import mock

import pytest
import torch
from models import random_batch, token_loss
from rank_pool import run_ranks
from test_initialize import LR, full_parameters
from transformers import PreTrainedModel
from updates import WAYS, build, compare_update, zero_config

MODELS = ("llama", "gemma2", "deepseek_v2", "deepseek_v3")
#: Of the product with four stages, each pair occurs.
CASES = [(MODELS[m], WAYS[(m + stage) % 3], stage) for m in range(4) for stage in range(4)]


@pytest.mark.parametrize("name,way,stage", CASES)
def test_updates(name, way, stage):
    """Tiles of 5 of a rank's 22 tokens."""
    run_ranks(2, compare_update, name, way, stage, loss_tile=None, mlp_tile=5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name,way,stage", [case for case in itertools.product(MODELS, WAYS, range(4)) if case not in CASES]
)
def test_every_model_at_every_stage(name, way, stage):
    run_ranks(2, compare_update, name, way, stage, loss_tile=None, mlp_tile=5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_recomputation(name, stage):
    run_ranks(2, compare_update, name, "uneven", stage, loss_tile=None, mlp_tile=5, checkpointing=True)


def with_inputs_on_the_host(name, stage, **settings):
    """Without a GPU, transformers' offload has no memory to pin, so that copies take the place of its moves."""
    moved = []

    def save_on_cpu(pin_memory, device_type):
        assert pin_memory
        return torch.autograd.graph.saved_tensors_hooks(lambda x: moved.append(x.shape) or x.clone(), torch.clone)

    with mock.patch("transformers.modeling_utils.save_on_cpu", save_on_cpu):
        compare_update(name, "uneven", stage, mlp_tile=5, checkpointing="offload", **settings)
    # Two layers, two micro-batches and two steps. Nothing but the input [B, T, D] of a layer is that large.
    assert sum(len(shape) == 3 and shape[-1] == 48 for shape in moved) == 2 * 2 * 2, moved


@pytest.mark.parametrize("stage", range(4) if hasattr(PreTrainedModel, "activation_checkpointing_enable") else [])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_layer_inputs_on_the_host(name, stage):
    run_ranks(2, with_inputs_on_the_host, name, stage)


def groups_of_other_lengths(stage):
    """One step of two groups, whose sequences have 13 and 40 tokens: 2 and 5 tiles, and other experts."""
    import ds_mla_ulysses as dmu

    batches = [random_batch(1, length, seed=length) for length in (13, 40)]
    items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    plain = build("deepseek_v3", "uneven")
    start = {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = build("deepseek_v3", "uneven")
    handle = dmu.parallelize(model, sp_size=2, mlp_tile=4)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    config = zero_config(stage) | {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    shard = handle.shard(batches[handle.data_rank])
    engine.backward(handle.loss(engine(**shard.inputs).logits, shard, handle.num_items([shard])))
    engine.step()
    if stage == 3:
        assert {p.ds_status.name for p in model.parameters()} == {"NOT_AVAILABLE"}
    got = full_parameters(model, stage)
    engine.destroy()
    for batch in batches:
        token_loss(plain(input_ids=batch["input_ids"], use_cache=False).logits, batch["labels"], items).backward()
    for name, p in plain.named_parameters():
        want = start[name] - LR * p.grad
        assert (got[name] - want).norm() <= 1e-3 * (want - start[name]).norm() + 1e-6 * want.norm(), name


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_groups_of_other_lengths(stage):
    run_ranks(4, groups_of_other_lengths, stage)
