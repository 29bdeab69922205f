"""`check` notices a model with one line broken, tells apart what went wrong, and cuts configs without losing a kind of layer."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from entries import entries

import ds_mla_ulysses as dmu
from ds_mla_ulysses.checking import recipe
from ds_mla_ulysses.checking.report import Report, Row
from ds_mla_ulysses.checking.request import CASES
from ds_mla_ulysses.checking.run import Worker, make_request
from ds_mla_ulysses.cli import main

# Starts processes, or runs for many seconds in all.
pytestmark = pytest.mark.slow

BROKEN = Path(__file__).parent / "broken_models.py"
LLAMA = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def worker():
    with Worker() as started:
        yield started


def check_broken(worker, name, **kwargs):
    return worker.check(make_request(LLAMA, strategy="packed", model_code=f"{BROKEN}:{name}", **kwargs))


def test_a_right_model_is_equal(worker):
    report = check_broken(worker, "Right")
    assert report.verdict == "equal" and report.exit_status == 0 and report.strategies == ("packed",), str(report)
    assert report.model_class == "Right" and [row.case for row in report.rows] == list(CASES)
    assert "verdict: equal within 1e-10 with packed" in str(report)


@pytest.mark.parametrize(
    "name,is_forward_right", [("DropsDocuments", False), ("BringsMask", False), ("LosesGradient", True)]
)
def test_one_broken_line_is_noticed(worker, name, is_forward_right):
    report = check_broken(worker, name)
    if report.verdict == "refused":  # by name, before anything runs
        assert name != "LosesGradient" and report.exit_status == 3 and report.reason
        return
    # Lost documents are noticed in the first forward already.
    noticed = "fails" if name == "DropsDocuments" else "different"
    assert report.verdict == noticed and report.exit_status == 1, str(report)
    assert {row.verdict for row in report.rows} == {noticed}
    for row in report.rows:
        if noticed == "fails":
            assert "called without the keyword arguments of the model's forward" in row.reason
        else:
            assert (row.loss <= 1e-10 and row.logits <= 1e-10) == is_forward_right, str(report)
            assert row.gradient > 1e-3 and row.parameter, str(report)


def test_a_fault_in_the_ninth_digit_is_noticed(worker):
    report = check_broken(worker, "SlightlyOff")
    assert report.verdict == "different", str(report)
    assert all(1e-10 < max(row.loss, row.logits, row.gradient) < 1e-7 for row in report.rows), str(report)


def test_no_model_amplifies_rounding(worker):
    for name in ("dory", "llama"):
        report = worker.check(make_request(name, strategy="packed"))
        assert report.verdict == "equal" and report.tolerance == 1e-10, str(report)
        assert all(max(row.loss, row.logits, row.gradient) < 1e-12 for row in report.rows), str(report)


@pytest.mark.parametrize(
    "name,said", [("Raises", "IndexError: not among the layers"), ("Dies", "on rank 1 only: the process died")]
)
def test_a_late_failure_is_in_the_report(worker, name, said):
    report = check_broken(worker, name)
    assert report.verdict == "fails" and report.exit_status == 1, str(report)
    (row,) = report.rows
    assert (row.strategy, row.case) == ("packed", "plain") and said in row.reason, str(report)
    assert "packed, plain fails:" in str(report)


def test_a_failure_does_not_reach_the_next_strategy(worker):
    request = make_request(LLAMA, strategy=("packed", "gather_kv"), model_code=f"{BROKEN}:Raises")
    assert [(row.strategy, row.verdict) for row in worker.check(request).rows] == [
        ("packed", "fails"),
        ("gather_kv", "fails"),
    ]


def test_a_model_that_cannot_be_built_is_not_checked(worker):
    report = check_broken(worker, "DoesNotBuild")
    assert report.verdict == "not checked" and report.exit_status == 2
    assert "needs a kernel" in report.problem and "verdict: not checked" in str(report)


def test_refusals_come_from_parallelize(worker):
    report = worker.check(make_request("deepseek_v32", strategy="packed"))
    assert report.verdict == "refused" and report.exit_status == 3 and "sparse indexer" in report.reason
    assert [row.case for row in report.rows] == [""]


def test_strategies_that_a_model_does_not_allow_are_no_failure(worker):
    report = worker.check(make_request(LLAMA, strategy=("packed", "latent_kv"), cases=("plain",)))
    assert report.verdict == "equal" and report.strategies == ("packed",)
    assert [(row.strategy, row.verdict) for row in report.rows] == [("packed", "equal"), ("latent_kv", "refused")]


def test_head_chunks(worker):
    report = worker.check(make_request(LLAMA, head_chunks=2))
    assert report.verdict == "equal" and {row.strategy for row in report.rows if row.case} == {"packed", "gather_kv"}
    report = worker.check(make_request(LLAMA, strategy="packed", head_chunks=9))
    assert report.verdict == "refused" and "head_chunks=9 must be from 1 to" in report.rows[0].reason


def test_four_ranks(worker):
    report = worker.check(make_request(LLAMA, 4, "packed", cases=("packed", "right")))
    assert report.verdict == "equal" and report.ranks == 4, str(report)


def test_the_reference_of_dynamic_rope_is_the_whole_row(worker):
    ropes = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    report = worker.check(make_request(LLAMA | {"rope_parameters": ropes}, strategy="packed"))
    assert report.verdict == "equal", str(report)
    assert report.config["rope_type"] == "dynamic"


def test_the_worker_reports_its_own_end():
    with Worker() as worker:
        worker._start()
        worker._process.kill()
        worker._process.wait()
        report = worker.check(make_request(LLAMA))
        assert report.verdict == "not checked" and "ended" in report.problem
        # The next check starts another one.
        assert worker.check(make_request(LLAMA, strategy="packed", cases=("plain",))).verdict == "equal"


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": {"quant_method": "fp8"}}))
    before = dict(os.environ)
    with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as end:
        main(["check", "--model", str(tmp_path), "--strategy", "packed", "--head-chunks", "2", "--json"])
    assert end.value.code == 0 and dict(os.environ) == before
    found = json.loads(said.getvalue())
    assert found["verdict"] == "equal" and found["config"]["num_key_value_heads"] == 2
    assert Report.from_dict(found).to_dict() == found


@pytest.mark.parametrize(
    "words,problem",
    [
        (["--model", "no/such/folder"], "neither a config.json"),
        (["--model", "llama", "--sp", "1"], "from 2 to 8"),
        (["--model", "llama", "--head-chunks", "0"], "head_chunks must be an int >= 1, got 0"),
        (["--model", "llama", "--model-code", "missing.py:Class"], "FILE.py:Class"),
    ],
)
def test_wrong_arguments_of_the_command(words, problem, capsys):
    with pytest.raises(SystemExit) as end:
        main(["check", *words])
    assert end.value.code == 2 and problem in capsys.readouterr().err


def test_check_in_python():
    report = dmu.check("no_such_type", strategy="packed")
    assert isinstance(report, dmu.Report)
    assert report.verdict == "not checked" and "does not know the model type 'no_such_type'" in report.problem
    with pytest.raises(ValueError, match="strategy must be one of"):
        dmu.check("llama", strategy="ring")
    with pytest.raises(ValueError, match="no model_type"):
        dmu.check({"hidden_size": 4})


def test_the_worst_row_is_the_verdict():
    rows = (Row("packed", "plain", "equal", 0.0, 0.0, 0.0), Row("packed", "left", "different", 1.0, 1.0, 0.0))
    assert Report("x", rows=rows).verdict == "different"
    assert Report("x", rows=(*rows, Row("gather_kv", "plain", "fails", reason="r"))).verdict == "different"
    assert Report("x", rows=(rows[0], Row("gather_kv", "", "refused", reason="r"))).verdict == "equal"
    assert Report("x", rows=(Row("gather_kv", "", "refused", reason="r"),)).verdict == "refused"
    assert Report("x").verdict == "not checked"


def test_layers_to_keep():
    kinds = ["a"] * 20 + ["b"] + ["a"] * 9 + ["c", "a"]
    assert recipe.layers_to_keep(32, [kinds]) == [0, 1, 20, 30]
    moe = ["dense"] * 3 + ["sparse"] * 29
    kept = recipe.layers_to_keep(32, [kinds, moe])
    assert {(kinds[i], moe[i]) for i in kept} == set(zip(kinds, moe, strict=True))
    assert recipe.layers_to_keep(2, []) == [0, 1]


def kinds_of(config):
    """The values of each per-layer setting, in the config and in the configs in it."""
    found = {}
    for name, value in vars(config).items():
        if name in recipe.LAYER_KINDS and value is not None:
            found[name] = set(value)
        elif hasattr(value, "model_type"):
            found |= {f"{name}.{inner}": kinds for inner, kinds in kinds_of(value).items()}
    return found


def test_the_small_config_has_every_kind_of_layer():
    from transformers import CONFIG_MAPPING

    compared = 0
    for kind in {entry.model_type for entry in entries().values()}:
        if recipe.FACTS.get(kind, recipe.Facts()).is_small:
            continue
        request = make_request(kind)
        whole = kinds_of(CONFIG_MAPPING[kind](**recipe.FACTS.get(kind, recipe.Facts()).init))
        small = kinds_of(recipe.small_config(request)) if whole else {}
        assert small == whole, kind
        compared += bool(whole)
    assert compared > 40
