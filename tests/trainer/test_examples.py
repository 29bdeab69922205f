"""The examples of Trainer and TRL as a user starts them: through each launcher, over processes on the CPU.

A launch costs as much as ten runs on the ranks of a pool, so a script is launched only if the launcher matters.
"""

import json
from pathlib import Path

import pytest
from launching import ROOT, launch, run_script

HF_TRAINER = ROOT / "examples" / "train_trainer.py"
MOBA_TRAINER = Path(__file__).parent / "moba_trainer.py"
# Odd lengths, two samples in a micro-batch, and steps that end within a round of the loader.
SMALL = ("--verify", "--steps", "2", "--seq-len", "63", "--accumulation", "3")


def equals_one_process(result, file):
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads(file.read_text())
    for key in ("loss", "grad_norm", "eval_loss"):
        assert said[key] == pytest.approx(said["of_one"][key], rel=1e-5)
    assert len(said["loss"]) == len(said["grad_norm"]) == 2
    assert said["equal"] and all(value <= 1e-4 for value in said["largest_difference"].values())
    assert "parameter to change" in said["largest_difference"]
    assert "one process" in result.stdout and "equal" in result.stdout


def test_trainer_equals_a_plain_one(tmp_path):
    options = ("--sp-size", 2, "--zero-stage", 0, "--output", tmp_path, "--json", tmp_path / "result.json")
    result = run_script(4, HF_TRAINER, *SMALL, *options)
    equals_one_process(result, tmp_path / "result.json")


def test_accelerate_launch_with_our_config(tmp_path):
    """The config file sets ZeRO-3 and two processes for each sequence. MoBA runs in the first half of the steps."""
    options = ("--sp-in-eval", "--attn", "moba", "--output", tmp_path, "--json", tmp_path / "result.json")
    result = launch("accelerate", MOBA_TRAINER, *SMALL, *options)
    equals_one_process(result, tmp_path / "result.json")


def test_verify_fails_if_the_gradient_is_wrong(tmp_path):
    """By 1%, and in the launched processes only: the process to compare with starts the example itself."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"""
import runpy
from accelerate import Accelerator

backward = Accelerator.backward
Accelerator.backward = lambda self, loss, **others: backward(self, 1.01 * loss, **others)
runpy.run_path({str(HF_TRAINER)!r}, run_name="__main__")
""")
    # One step: in the next one, routers may send tokens to other experts, which is a larger difference.
    options = ("--steps", 1, "--output", tmp_path, "--json", tmp_path / "result.json")
    result = launch("deepspeed", wrong, *SMALL, *options)
    assert result.returncode == 1 and "DIFFERENT" in result.stdout, result.stdout + result.stderr
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["loss"][0] == pytest.approx(said["of_one"]["loss"][0], rel=1e-6)
    assert said["grad_norm"] == pytest.approx([1.01 * said["of_one"]["grad_norm"][0]], rel=1e-5)
    assert said["largest_difference"]["grad norm"] == pytest.approx(0.01, rel=0.1)
    assert said["largest_difference"]["parameter to change"] == pytest.approx(0.01, rel=0.3)


def test_sft_of_packed_documents(tmp_path):
    options = ("--sp-size", 2, "--zero-stage", 3, "--lora", "--verify", "--steps", 3, "--seq-len", 255)
    options += ("--output", tmp_path, "--json", tmp_path / "result.json")
    result = launch("deepspeed", ROOT / "examples" / "train_sft.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "'train_loss'" in result.stdout
    assert (tmp_path / "adapter_model.safetensors").exists()
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["equal"] and len(said["loss"]) == len(said["of_one"]["loss"]) == 3
    assert said["loss"] == pytest.approx(said["of_one"]["loss"], rel=1e-5)


# This script does not import this package.
SCRIPT = """
import argparse, json, os, sys

import torch
from accelerate.utils import ParallelismConfig
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.add_argument("file")
file = parser.parse_args().file

parallel = {}
if "WORLD_SIZE" in os.environ and "ACCELERATE_USE_DEEPSPEED" not in os.environ:
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    parallel["deepspeed"] = auto | {"zero_optimization": {"stage": 3}}
    parallel["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=2)
args = TrainingArguments(
    output_dir=os.path.dirname(file), per_device_train_batch_size=1, max_steps=2, learning_rate=0.1, optim="sgd",
    use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], train_sampling_strategy="sequential", **parallel,
)
torch.manual_seed(0)
model = DeepseekV3ForCausalLM(DeepseekV3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    first_k_dense_replace=2, initializer_range=0.3, max_position_embeddings=64,
))
rows = torch.randint(2, 64, (4, 21)).tolist()
trainer = Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
trainer.train()
if trainer.is_world_process_zero():
    logs = trainer.state.log_history
    result = {key: [log[key] for log in logs if key in log] for key in ("loss", "grad_norm")}
    result["is_installed"] = "ds_mla_ulysses" in sys.modules
    with open(file, "w") as out:
        json.dump(result, out)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The script, and its numbers in one process."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text(SCRIPT)
    result = launch("python", folder / "train.py", folder / "plain.json")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "train.py", json.loads((folder / "plain.json").read_text())


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "accelerate"])
def test_run_module_trains_a_script_that_does_not_install(launcher, script, tmp_path):
    path, plain = script
    result = launch(launcher, "--module", "ds_mla_ulysses.run", path, tmp_path / "result.json")
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["is_installed"] and not plain["is_installed"]
    for key in ("loss", "grad_norm"):
        assert len(said[key]) == 2 and said[key] == pytest.approx(plain[key], rel=1e-5)
