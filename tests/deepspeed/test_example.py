"""The examples of loops as a user starts them, through the deepspeed launcher, and on the ranks of a pool."""

import json
import subprocess
import sys

import pytest
from launching import ROOT, launch, run_script

EXAMPLE = ROOT / "examples" / "train_deepspeed.py"
SMALL = ("--seq-len", "63", "--accumulation", "2")


def test_verify_at_stage_2(tmp_path):
    result = launch(
        "deepspeed", EXAMPLE, *SMALL, "--verify", "--steps", 3, "--zero-stage", 2, "--json", tmp_path / "result.json"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["equal"] and len(said["losses"]) == len(said["losses_of_one"]) == 3
    assert said["losses"] == pytest.approx(said["losses_of_one"], rel=1e-5)
    assert all(value <= 1e-4 for value in said["largest_difference"].values())
    # 16 heads of K 48, P 64, V 32 over 2 ranks, and a shared key of 16: elements of 4 bytes, both ways;
    # 63 tokens are padded to 64.
    assert said["sent"] == pytest.approx((16 * (48 + 64 + 32) / 2 + 16) * 8 * 64 / 63)
    assert said["sent_by_three_all_to_alls"] == 16 * (48 + 48 + 32 + 32) / 2 * 8
    assert "one process" in result.stdout and "equal" in result.stdout


def test_verify_fails_if_the_gradient_is_wrong(tmp_path):
    text = EXAMPLE.read_text()
    wrong = text.replace("engine.backward(loss)", "engine.backward(1.01 * loss)")
    wrong = wrong.replace("Path(__file__).resolve().parents[1]", f"Path({str(ROOT)!r})")
    assert wrong.count("1.01") == 1
    (tmp_path / "wrong.py").write_text(wrong)
    command = [sys.executable, str(tmp_path / "wrong.py"), *SMALL, "--verify", "--steps", "2"]  # one process will do
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 1 and "DIFFERENT" in result.stdout, result.stdout + result.stderr


def test_resumed_run_continues_exactly(tmp_path):
    losses = {}
    for name, options in {
        "straight": ("--steps", 4),
        "first": ("--steps", 2, "--save", tmp_path / "checkpoint"),
        "resumed": ("--steps", 4, "--resume", tmp_path / "checkpoint"),
    }.items():
        words = (EXAMPLE, *SMALL, *options, "--json", tmp_path / f"{name}.json")
        # One process will do. That which resumes is new: it knows the checkpoint only.
        result = launch("python", *words) if name == "resumed" else run_script(1, *words)
        assert result.returncode == 0, result.stdout + result.stderr
        losses[name] = json.loads((tmp_path / f"{name}.json").read_text())["losses"]
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
    words = (ROOT / "examples" / "train_moba.py", *SMALL, *options, "--verify", "--steps", 3, "--block", 8)
    words += ("--json", tmp_path / "result.json")
    result = launch("deepspeed", *words) if launched else run_script(2, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    said = json.loads((tmp_path / "result.json").read_text())
    assert said["equal"] and len(said["losses"]) == len(said["losses_of_one"]) == 3
    assert said["losses"] == pytest.approx(said["losses_of_one"], rel=1e-5)
