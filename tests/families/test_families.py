"""A part of `make families`, and the page that is written from its result."""

from __future__ import annotations

import json

import pytest
from entries import VARIANTS, entries
from sweep import check_entry
from table import PAGE, TESTED, module_of_types, newest_result, page

from ds_mla_ulysses.checking.run import Worker

# Starts processes, or runs for many seconds in all.
pytestmark = pytest.mark.slow

RESULT = json.loads(newest_result().read_text())
#: One of each kind: MLA, grouped heads, experts, windows, sinks, two attentions in a layer, RoPE by length, an encoder as
#: a decoder, a wrapper, and those that are refused.
FAST = (
    "deepseek_v3",
    "longcat_flash",
    "llama",
    "qwen3_moe",
    "gemma3_text",
    "gpt_oss",
    "phi3, longrope",
    "cohere2",
    "olmo3",
    "roberta",
    "deepseek_v32",
    "qwen3_next",
    "stablelm",
    "gemma3",
    "gemma4",
    "qwen2_vl",
    "llava",
    "molmo2",
    "smolvlm",
    "paligemma, causal",
    "lfm2_vl",
    "blip-2",
)
#: Model types whose layers do not hand on their documents: right only if they are refused.
NOT_EQUAL = ("stablelm", "nemotron", "doge")


@pytest.fixture(scope="module")
def worker():
    with Worker() as started:
        yield started


@pytest.mark.parametrize("name", FAST)
def test_as_stored(worker, name):
    report = check_entry(worker, name, entries()[name], strategies=("packed",))
    stored = RESULT["models"][name]
    if name in NOT_EQUAL:
        assert report.verdict in ("different", "refused"), str(report)
        return
    assert report.verdict == stored["verdict"], str(report)
    if report.verdict == "equal":
        assert "packed" in stored["strategies"]


def test_every_model_type_has_a_verdict():
    assert set(entries()) == set(RESULT["models"])
    assert set(VARIANTS) <= set(RESULT["models"])


def test_the_page_is_that_of_the_newest_result():
    assert PAGE.read_text(encoding="utf-8") == page(RESULT)


def test_the_list_of_tested_model_types_is_that_of_the_newest_result():
    assert TESTED.read_text(encoding="utf-8") == module_of_types(RESULT)


def test_every_model_type_is_equal_or_refused_with_a_sentence():
    for name, row in RESULT["models"].items():
        assert row["verdict"] in ("equal", "refused"), name
        assert row["verdict"] == "equal" or len(row["reason"].split()) > 5, name
        # Some have too few heads for their strategy on 4 ranks.
        assert row["verdict"] == "refused" or row["on 4 ranks"] in ("equal", "refused"), name


def test_float64_results_are_within_the_tolerance():
    for name, row in RESULT["models"].items():
        if row["verdict"] == "equal" and row["dtype"] == "float64":
            assert row["largest error"] <= 1e-10, name
