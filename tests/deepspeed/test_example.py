"""The examples of loops as a user starts them, through the deepspeed launcher, and on the ranks of a pool."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT, launch, run_script

EXAMPLE = ROOT / "examples" / "train_loop.py"
LONG, LONG_LOOP = (ROOT / "examples" / name for name in ("train_long.py", "train_long_loop.py"))
RESUMED_LOOP = Path(__file__).parent / "resumed_loop.py"
SMALL = ("--seq-len", "63")


def equals_one_process(result, file):
    """Three steps that equal those of one process; what `--json` wrote."""
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads(file.read_text())
    for name in ("loss", "grad_norm"):
        assert len(said[name]) == len(said["of_one"][name]) == 3
        assert said[name] == pytest.approx(said["of_one"][name], rel=1e-5)
    assert said["equal"] and all(value <= 1e-4 for value in said["largest_difference"].values())
    assert {"loss", "parameter to norm", "parameter to change"} <= set(said["largest_difference"])
    assert "one process" in result.stdout and "equal" in result.stdout
    return said


def test_verify_at_stage_2(tmp_path):
    options = ("--verify", "--steps", 3, "--zero-stage", 2, "--json", tmp_path / "result.json")
    said = equals_one_process(launch("deepspeed", EXAMPLE, *SMALL, *options), tmp_path / "result.json")
    # 16 heads of K 48, P 64 and V 32 over 2 ranks, and a shared RoPE key of 16: elements of 4 bytes, in forward and
    # backward; 63 tokens are padded to 64.
    assert said["sent"] == pytest.approx((16 * (48 + 64 + 32) / 2 + 16) * 8 * 64 / 63)
    assert said["sent_by_three_all_to_alls"] == 16 * (48 + 48 + 32 + 32) / 2 * 8


def test_verify_of_two_groups(tmp_path):
    """Four processes, of which every two share a sequence: one process trains on the data of both groups."""
    options = ("--verify", "--steps", 3, "--sp-size", 2, "--zero-stage", 3, "--json", tmp_path / "result.json")
    equals_one_process(run_script(4, EXAMPLE, *SMALL, *options), tmp_path / "result.json")


def test_the_longest_sequence_that_fits(tmp_path):
    """The length follows from the memory, also in the one process, which alone would plan another one."""
    options = ("--verify", "--steps", 3, "--memory", 0.013, "--json", tmp_path / "result.json")
    result = launch("deepspeed", LONG, *options)
    equals_one_process(result, tmp_path / "result.json")
    (tokens,) = re.findall(r"^(\d+) tokens on 2 processes\.", result.stdout, re.M)
    assert 200 < int(tokens) < 2000


@pytest.mark.parametrize("model,stage", [("llama", 2), ("deepseek_v3", 3)])
def test_long_sequences_in_a_loop(tmp_path, model, stage):
    options = ("--model", model, "--zero-stage", stage, "--seq-len", 333, "--steps", 3, "--verify")
    equals_one_process(run_script(2, LONG_LOOP, *options, "--json", tmp_path / "result.json"), tmp_path / "result.json")


def test_planned_and_measured_bytes():
    """In bf16, as planned. Attention on a CPU holds less than planned: it makes no sums in fp32."""
    result = run_script(2, LONG_LOOP, "--steps", 1, "--seq-len", 3000)
    assert result.returncode == 0, result.stdout + result.stderr
    measured, planned = map(
        float, re.search(r"A step holds (\S+) GB, planned in bf16: (\S+) GB", result.stdout).groups()
    )
    assert 0.7 * planned < measured < 1.05 * planned


def test_verify_fails_if_the_gradient_is_wrong(tmp_path):
    """By 1%, and in the first process only: the process to compare with starts the example itself."""
    (tmp_path / "wrong.py").write_text(f"""
import runpy
import ds_mla_ulysses as dmu

initialize = dmu.initialize

def wrong_initialize(**arguments):
    engine, *others = initialize(**arguments)
    backward = engine.backward
    engine.backward = lambda loss: backward(1.01 * loss)
    return engine, *others

dmu.initialize = wrong_initialize
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
""")
    options = ("--verify", "--steps", "2", "--json", str(tmp_path / "result.json"))
    command = [sys.executable, str(tmp_path / "wrong.py"), *SMALL, *options]  # one process will do
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert result.returncode == 1 and "DIFFERENT" in result.stdout, result.stdout + result.stderr
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["loss"][0] == pytest.approx(said["of_one"]["loss"][0], rel=1e-6)
    assert said["largest_difference"]["grad norm"] == pytest.approx(0.01, rel=0.1)


def test_resumed_run_continues_exactly(tmp_path):
    losses = {}
    for name, options in {
        "straight": ("--steps", 4),
        "first": ("--steps", 2, "--save", tmp_path / "checkpoint"),
        "resumed": ("--steps", 4, "--resume", tmp_path / "checkpoint"),
    }.items():
        words = (RESUMED_LOOP, *options, "--json", tmp_path / f"{name}.json")
        # One process will do. The run that resumes is a new process: it knows nothing but the checkpoint.
        result = launch("python", *words) if name == "resumed" else run_script(1, *words)
        assert result.returncode == 0, result.stdout + result.stderr
        losses[name] = json.loads((tmp_path / f"{name}.json").read_text())["loss"]
    assert losses["straight"] == losses["first"] + losses["resumed"]
    assert losses["straight"][-1] < losses["straight"][0]


@pytest.mark.parametrize(
    "launched,options",
    [
        (True, ("--model", "deepseek_v3", "--full-layers", -1, "--strategy", "auto", "--head-chunks", 2)),
        (False, ("--zero-stage", 3, "--strategy", "gather_kv", "--split", "head_tail", "--full-after", 0.5)),
    ],
)
def test_moba_equals_one_process(launched, options, tmp_path):
    words = (ROOT / "examples" / "train_moba.py", *SMALL, *options, "--verify", "--steps", 3, "--block-size", 8)
    words += ("--json", tmp_path / "result.json")
    result = launch("deepspeed", *words) if launched else run_script(2, *words)
    equals_one_process(result, tmp_path / "result.json")


def test_examples_are_short_enough_to_copy():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
