"""PEFT, Liger and TRL on top of sequence-parallel training."""

import dataclasses
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from models import assert_gradients, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from test_install import installed
from trainer_runs import (
    Hashed,
    Run,
    assert_equal,
    build,
    fresh_state,
    over_ranks,
    parameters,
    reference,
    result,
    samples,
    training_arguments,
)

MLA = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
GQA = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(model, targets):
    """Returns adapters with two random factors, so that the gradient of neither is zero at the first step."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


mla_lora, gqa_lora = functools.partial(lora, targets=MLA), functools.partial(lora, targets=GQA)


def wants_gradients(trainer):
    return {name: p.requires_grad for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("stage,checkpointing", [(0, False), (2, True), (3, False)])
@pytest.mark.parametrize("family,prepare,targets", [("deepseek_v3", mla_lora, MLA), ("llama", gqa_lora, GQA)])
def test_lora(family, prepare, targets, stage, checkpointing):
    """Adapters on every projection of attention change as in one process, and frozen weights do not change."""
    run = Run(family, prepare=prepare, stage=stage, extra=wants_gradients)
    args = (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", Hashed(use_reentrant=False)))
    for answer in over_ranks(2, Run(**{**vars(run), "args": args}) if checkpointing else run):
        assert_equal(answer, reference(run))
        for name, change in answer["change"].items():
            assert bool(change.any()) == ("lora_" in name), name
            assert answer["extra"][name] == ("lora_" in name)
        assert all(any(target in name for name, x in answer["change"].items() if x.any()) for target in targets)


def saves_adapters(run, folder):
    import torch.distributed as dist

    with installed():
        trainer = build(run, dist.get_world_size())
        trainer.train()
        trainer.save_model(folder)
        return parameters(trainer.model)


def test_adapters_are_loaded_by_peft_alone():
    import json

    from peft import PeftModel

    folder = tempfile.mkdtemp()
    try:
        want = run_ranks(2, saves_adapters, Run(prepare=mla_lora), folder)[0]
        assert not (Path(folder) / "model.safetensors").exists()
        assert "ulysses" not in json.dumps(json.loads((Path(folder) / "adapter_config.json").read_text()))
        loaded = PeftModel.from_pretrained(tiny_model("deepseek_v3", torch.float32), folder)
        assert_gradients({name: p.detach() for name, p in loaded.named_parameters()}, want, 1e-7)
    finally:
        shutil.rmtree(folder)


def adapter_forward():
    """PEFT calls `forward` of the model that it wraps, which runs no hooks, so our hook has to be on the outermost model."""
    import ds_mla_ulysses as dmu

    model = mla_lora(tiny_model("deepseek_v3"))
    handle = dmu.parallelize(model)
    shard = handle.shard({"input_ids": torch.arange(4, 12).view(1, 8)})
    model(**shard.inputs, labels=shard.inputs["input_ids"])


def test_labels_are_refused_beneath_peft_too():
    raises_on_ranks(2, ValueError, "labels cannot be given", adapter_forward)


LIGER = {"llama": "logits", "deepseek_v3": "fused"}


@pytest.fixture(scope="module")
def liger_runs():
    """One new process runs all cases, because it spends most of its time on imports."""
    script = [sys.executable, str(Path(__file__).parent / "liger_run.py"), *(x for pair in LIGER.items() for x in pair)]
    return subprocess.run(script, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize("family", LIGER)
def test_liger(family, liger_runs):
    """Liger's loss without logits is this rank's share of the group's loss. liger_run.py says what runs on a CPU."""
    assert f"{family} equal [" in liger_runs.stdout and liger_runs.returncode == 0, liger_runs.stderr[-4000:]


# TRL


def sft(run, world, **config):
    """SFTTrainer packs several documents into a row and marks them by position ids."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    of_sft = dict(bf16=False, gradient_checkpointing=False, max_length=64, remove_unused_columns=True)
    rows = [{"input_ids": row["input_ids"]} for row in samples()]
    model = tiny_model(run.family, torch.float32, **dict(run.model))
    if run.prepare is not None:
        model = run.prepare(model)
    trainer = SFTTrainer(
        model=model,
        args=training_arguments(run, world, kind=SFTConfig, **of_sft | config),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    before = parameters(trainer.model)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")
    metrics = [{name: entry[name] for name in names if name in entry} for entry in logs]
    return result(trainer, before) | {"metrics": metrics, "smoothing": trainer.args.label_smoothing_factor}


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(128)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<1>"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<0>", eos_token="<2>", unk_token="<1>")


def sft_on_rank(run, config):
    import torch.distributed as dist

    with installed():
        return sft(run, dist.get_world_size(), **config)


@pytest.mark.parametrize("packing", [False, "bfd", "wrapped"])
@pytest.mark.parametrize("family,stage", [("llama", 2), ("deepseek_v3", 3)])
def test_sft(family, stage, packing):
    config = dict(packing=bool(packing), padding_free=bool(packing))
    if packing:
        config["packing_strategy"] = packing
    run = Run(family, stage=stage, batch=1 if packing else 2)
    with fresh_state():
        want = sft(run, 0, **config)
    for answer in run_ranks(2, sft_on_rank, run, config):
        assert_equal(answer, want)
        for got, wanted in zip(answer["metrics"], want["metrics"], strict=True):
            assert got["entropy"] == pytest.approx(wanted["entropy"], rel=1e-4)
            assert got["num_tokens"] == wanted["num_tokens"]
            assert got["mean_token_accuracy"] == pytest.approx(wanted["mean_token_accuracy"], abs=1e-6)


@pytest.mark.parametrize("stage,packing", [(2, False), (3, True)])
def test_sft_with_label_smoothing(stage, packing):
    """TRL refuses it under DeepSpeed's sequence parallelism; its own loss in one process is that of its label smoother."""
    run = Run("llama", stage=stage, batch=1 if packing else 2, args=(("label_smoothing_factor", 0.2),))
    config = dict(packing=packing, padding_free=packing)
    with fresh_state():
        want = sft(run, 0, **config)
    for answer in run_ranks(2, sft_on_rank, run, config):
        assert_equal(answer, want)
        assert answer["smoothing"] == 0.2
        for got, wanted in zip(answer["metrics"], want["metrics"], strict=True):
            assert got["entropy"] == pytest.approx(wanted["entropy"], rel=1e-4)
            assert got["mean_token_accuracy"] == pytest.approx(wanted["mean_token_accuracy"], abs=1e-6)


def test_sft_with_lora():
    run = Run("deepseek_v3", prepare=mla_lora, batch=1)
    config = dict(packing=True, padding_free=True)
    with fresh_state():
        want = sft(run, 0, **config)
    for answer in run_ranks(2, sft_on_rank, run, config):
        assert_equal(answer, want)


@pytest.mark.parametrize("accumulation,packing", [(1, False), (2, False), (2, True)])
def test_sft_with_auxiliary_losses(accumulation, packing):
    """TRL averages them over micro-batches, where Trainer sums them."""
    run = Run("qwen3_moe", batch=1 if packing else 2, args=(("gradient_accumulation_steps", accumulation),))
    config = dict(packing=packing, padding_free=packing, router_aux_loss_coef=1.0)
    with fresh_state():
        want = sft(run, 0, **config)
    for answer in run_ranks(2, sft_on_rank, run, config):
        assert_equal(answer, want)
        for got, wanted in zip(answer["metrics"], want["metrics"], strict=True):
            assert got["aux_loss"] == pytest.approx(wanted["aux_loss"], rel=1e-4)


def test_sft_with_auxiliary_losses_of_two_groups():
    run = Run("qwen3_moe", stage=3, args=(("gradient_accumulation_steps", 2),))
    with fresh_state():
        want = sft(dataclasses.replace(run, args=(("gradient_accumulation_steps", 4),)), 0, router_aux_loss_coef=1.0)
    for answer in run_ranks(4, sft_on_rank, run, dict(router_aux_loss_coef=1.0)):
        assert_equal(answer, want)
