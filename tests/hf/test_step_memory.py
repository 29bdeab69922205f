"""The planner's memory is that of real models: peaks counted over fake tensors at real widths agree within 5%."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_mla_ulysses.planner.memory import GB, Machines, ladder, most_head_chunks, step_memory
from ds_mla_ulysses.planner.models import PRESETS
from ds_mla_ulysses.planner.strategies import STRATEGIES

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import long_context

TOKENS = 2**20
RANKS = 8
LADDER = {setting.name: setting for setting in ladder(4, ("inputs",))}


def setting_of(name, setting):
    """A rung, with as many head chunks as the model can have on the ranks."""
    chunks = min(LADDER[setting].head_chunks, most_head_chunks(PRESETS[name], "packed", RANKS))
    return replace(LADDER[setting], head_chunks=chunks)


def measure(*args, rank=0, **kwargs):
    with long_context.fake_ranks(RANKS, rank):
        return long_context.measure(*args, **kwargs)


def planned(name, setting, strategy="packed", **changes):
    """Stage 0: what ZeRO gathers is no part of a model's forward and backward."""
    machines = Machines(RANKS, RANKS, 0, 80 * GB)
    return step_memory(replace(PRESETS[name], **changes), strategy, machines, setting)


def kinds_of(name):
    return {"dense layer": "dense"} | ({"layer with experts": "sparse"} if PRESETS[name].experts else {})


def check(measured, plan):
    print(f"measured {measured / GB:.3f} GB, planned {plan / GB:.3f} GB")
    assert plan == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("setting", ["as it is", "tiled layers", "head chunks"])
@pytest.mark.parametrize("name", long_context.MODEL_TYPES)
def test_layers(name, setting):
    on_gpu = replace(setting_of(name, setting), offloads_inputs=False)  # the layer's input is given, and not counted
    components = {c.name: c for c in planned(name, on_gpu).components}
    for component, kind in kinds_of(name).items():
        peak = measure(name, [kind], on_gpu, TOKENS)
        check(peak.peak, components[component].largest(peak.tokens).at(peak.tokens))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in ("packed",)])
def test_strategies(strategy):
    setting, rank = LADDER["as it is"], 0 if STRATEGIES[strategy].exchanges_heads else RANKS - 1
    component = planned("deepseek-v3", setting, strategy).components[0]
    peak = measure("deepseek-v3", ["dense"], setting, TOKENS, strategy=strategy, rank=rank)
    check(peak.peak, component.largest(peak.tokens).at(peak.tokens))


@pytest.mark.parametrize("setting", ["tiled loss", "tiled layers"])
@pytest.mark.parametrize("name", long_context.MODEL_TYPES)
def test_head_and_loss(name, setting):
    component = planned(name, LADDER[setting]).components[-1]
    peak = measure(name, [], LADDER[setting], TOKENS, has_head=True)
    check(peak.peak, component.largest(peak.tokens).at(peak.tokens))


@pytest.mark.parametrize(
    "setting", [pytest.param(s, marks=[] if s in ("offload", "head chunks") else pytest.mark.matrix) for s in LADDER]
)
@pytest.mark.parametrize("name", long_context.MODEL_TYPES)
def test_whole_step(name, setting):
    """Three layers, head and loss: the inputs that are kept, and the largest moment."""
    kinds = ["dense", "sparse", "sparse"] if PRESETS[name].experts else ["dense"] * 3
    rung = setting_of(name, setting)
    step = planned(name, rung, layers=3, dense_layers=kinds.count("dense"))
    peak = measure(name, kinds, rung, TOKENS, has_head=True)
    # The first layer's input is given, and not counted. On the host it is not counted either.
    given = 0 if rung.offloads_inputs else 2 * PRESETS[name].hidden * peak.tokens
    check(peak.peak + given, step.peak(peak.tokens) - step.fixed)
