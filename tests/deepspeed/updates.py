"""Updates of DeepSpeed engines, compared with those of one process: for the tests of what saves memory."""

import pytest
import torch
from models import random_batch, tiny_model, token_loss
from test_initialize import LR, engine_config, full_parameters

#: Tied and untied heads, a soft cap, a scale, and MLA with experts.
MODELS = ("llama tied", "llama", "gemma2", "granite", "deepseek_v3")
WAYS = ("uneven", "no labels", "lora")
TOKENS = 21


def build(name, way):
    family, *tied = name.split()
    settings = dict(tie_word_embeddings=bool(tied) or family == "gemma2")
    if family == "granite":
        from transformers import AutoConfig, AutoModelForCausalLM

        sizes = dict(vocab_size=128, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        scales = dict(num_key_value_heads=2, logits_scaling=4.0, embedding_multiplier=3.0, initializer_range=0.1)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granite", **sizes, **scales)).float().train()
    else:
        attention = "eager" if family == "gemma2" else "sdpa"
        cap = dict(final_logit_softcapping=2.0) if family == "gemma2" else {}
        model = tiny_model(family, torch.float32, attention, initializer_range=0.1, **settings, **cap)
    if way == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        adapter = LoraConfig(r=3, target_modules=["lm_head", "o_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, adapter)
    return model


def micro_batches(way, step):
    batches = [random_batch(2, TOKENS, seed=10 * step + micro) for micro in range(2)]
    batches[0]["labels"][:, :18] = -100
    if way == "no labels":  # all labels of the second half of the tokens, which the second rank holds
        for batch in batches:
            batch["labels"][:, 11:] = -100
            batch["labels"][:, 2:10] = batch["input_ids"][:, 2:10]
    return batches


def plain_steps(name, way, steps, smoothing):
    model = build(name, way)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for step in range(steps):
        batches = micro_batches(way, step)
        items = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        total = 0.0
        for batch in batches:
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
            if smoothing:
                shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), shifted, reduction="sum", label_smoothing=smoothing
                )
                loss = loss / items
            else:
                loss = token_loss(logits, batch["labels"], items)
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


def zero_config(stage, **more):
    config = engine_config(stage, accumulation=2, **more)
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return config


def compare_update(name, way, stage, *, loss_tile=4, smoothing=0.0, checkpointing=False, steps=2, **settings):
    """Tiles of 4 of a rank's 22 tokens, two micro-batches with different numbers of labels.

    Args:
        checkpointing: whether layers are recomputed; with "offload" their inputs are kept on the host.
        settings: further arguments of `parallelize`.
    """
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.lazy_logits import LazyLogits

    model = build(name, way)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    handle = dmu.parallelize(model, loss_tile=loss_tile, **settings)
    if checkpointing:
        more = dict(offload=True) if checkpointing == "offload" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False), **more)
    engine, *_ = dmu.initialize(model=model, config=zero_config(stage), handle=handle)
    losses = []
    for step in range(steps):
        shards = [handle.shard(batch) for batch in micro_batches(way, step)]
        assert way != "no labels" or handle.group.rank == 0 or all((s.shift_labels == -100).all() for s in shards)
        items, total = handle.num_items(shards), 0.0
        for shard in shards:
            out = engine(**shard.inputs)
            assert isinstance(out.logits, LazyLogits) == (loss_tile is not None)
            loss = handle.loss(out.logits, shard, items, label_smoothing=smoothing)
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total)
        if stage == 3:
            states = {p.ds_status.name for p in model.parameters()}
            assert states == {"NOT_AVAILABLE"}, states
    got = full_parameters(model, stage)
    engine.destroy()
    want_losses, want = plain_steps(name, way, steps, smoothing)
    assert losses == pytest.approx(want_losses, rel=1e-5), (losses, want_losses)
    for parameter, expected in want.items():
        error = (got[parameter] - expected).norm()
        change = (expected - start[parameter]).norm()
        assert error <= 1e-3 * change + 1e-6 * expected.norm(), (parameter, float(error), float(change))
