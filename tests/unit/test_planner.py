"""The planner: its bytes are the meter's, its numbers those of the models, and its choice has a reason."""

import ast
import json
import re
import time
from pathlib import Path

import pytest
from test_planned_bytes import CASES

import ds_mla_ulysses
from ds_mla_ulysses.cli import main
from ds_mla_ulysses.hf.configs import find_widths
from ds_mla_ulysses.hf.strategies import LAYER_STRATEGIES
from ds_mla_ulysses.layout.heads import HeadPartition
from ds_mla_ulysses.layout.widths import HeadWidths, MLAWidths
from ds_mla_ulysses.planner.cost import choose, estimate, estimates, sent_elements
from ds_mla_ulysses.planner.models import PRESETS
from ds_mla_ulysses.planner.strategies import (
    STRATEGIES,
    names_that_call_projections_whole,
    names_with_split,
    one_of,
    table,
)
from ds_mla_ulysses.planner.work import Machine, Work

PACKAGE = Path(ds_mla_ulysses.__file__).parent
V3 = PRESETS["deepseek-v3"].widths


@pytest.mark.parametrize(
    "strategy,elements", [("packed", 64_960), ("latent_kv", 39_872), ("latent_qkv", 29_120), ("gather_kv", 4_032)]
)
def test_deepseek_v3_on_eight_ranks(strategy, elements):
    assert sent_elements(V3, strategy, 8, 3) == (elements, elements)


def test_every_strategy_has_two_homes():
    """One file with its numbers and rules, and one with the classes of the layers that it supports."""
    assert all(name == rules.name for name, rules in STRATEGIES.items())
    assert {layer.rules.name for layer in LAYER_STRATEGIES} == set(STRATEGIES)
    for name, rules in STRATEGIES.items():
        layers = [layer for layer in LAYER_STRATEGIES if layer.rules.name == name]
        assert len(layers) == len(rules.descriptions) and {type(layer.rules) for layer in layers} == {type(rules)}
        assert type(rules).__module__ == f"ds_mla_ulysses.planner.strategies.{name}"
        assert {layer.__module__ for layer in layers} == {f"ds_mla_ulysses.hf.strategies.{name}"}
        for folder in ("planner", "hf"):
            assert len((PACKAGE / folder / "strategies" / f"{name}.py").read_text().splitlines()) <= 250


def test_attention_classes_support_the_splits_of_their_strategy():
    for layer in LAYER_STRATEGIES:
        assert layer.attention_class.splits == layer.rules.splits, layer


def names_asked_for(tree):
    """Strings that code compares with, looks up, or matches by."""
    for node in ast.walk(tree):
        asked = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Dict):
            asked = node.keys
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.MatchValue):
            asked = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked = node.args if node.func.attr in ("startswith", "endswith", "get", "index", "count") else []
        for part in asked:
            for constant in ast.walk(part) if part is not None else ():
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    yield constant.value


@pytest.mark.parametrize(
    "line,found",
    [
        ("a = x == 'packed'", True),
        ("a = 'latent_kv' != x", True),
        ("a = x in ('auto', 'gather_kv')", True),
        ("a = {'packed': 1}", True),
        ("a = numbers['packed']", True),
        ("a = x.startswith('latent')", True),
        ("def f(strategy='packed'): return f(strategy='gather_kv')", False),
    ],
)
def test_names_of_strategies_are_found(line, found):
    assert any(asks_for_a_strategy(name) for name in names_asked_for(ast.parse(line))) == found


def asks_for_a_strategy(text):
    return any(name.startswith(text) or name.endswith(text) for name in STRATEGIES if len(text) > 2)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nobody_asks_for_a_strategy_by_its_name(path):
    asked = {name for name in names_asked_for(ast.parse(path.read_text())) if asks_for_a_strategy(name)}
    # A case of check has the name "packed" too: packed documents.
    assert asked == ({"packed"} if path.name == "cases.py" else set())


def value_of(formula, widths, ranks, rank):
    """The elements that a formula of the documentation's table gives for one rank."""
    letters = {"H": widths.heads, "K": widths.key, "V": widths.value, "n": ranks}
    if isinstance(widths, MLAWidths):
        letters |= {"P": widths.nope + widths.value, "R": widths.rope, "L": widths.latent, "Q": widths.query_latent}
    else:
        letters |= {"G": widths.kv_heads}
        kv_heads = HeadPartition(widths.kv_heads, ranks, widths.heads).count if ranks <= widths.heads else None
        letters |= {"J": kv_heads}
    letters |= {"M": HeadPartition(widths.heads, ranks).count if ranks <= widths.heads else None, "r": rank}
    total = 0
    for term in re.split(r" \+ (?![^\[]*\])", formula):
        # Factors that stand side by side are multiplied: M(p)(K+P) is M(p)*(K+P).
        product = re.sub(r"(?<=[A-Z)\]])(?=[A-Z(\[])", "*", term.removeprefix("Σ ")).translate(
            str.maketrans("[]", "()")
        )
        product = re.sub(r"([MJ])\*\(", r"\1(", product)
        over = [p for p in range(ranks) if p != rank] if term.startswith("Σ") else [rank]
        total += sum(eval(product, {"__builtins__": {}}, letters | {"p": p}) for p in over)
    return total


def test_formulas_of_the_table_are_those_of_the_code():
    for widths, strategy, ranks, rank in CASES:
        rules = STRATEGIES[strategy]
        described = rules.descriptions[0 if isinstance(widths, MLAWidths) else -1]
        want = tuple(value_of(formula, widths, ranks, rank) for formula in (described.forward, described.backward))
        assert rules.sent_elements(widths, ranks, rank) == want, (strategy, widths, ranks, rank)


def test_table():
    lines = table().splitlines()
    assert len(lines) == 2 + sum(len(rules.descriptions) for rules in STRATEGIES.values())
    assert lines[0].startswith("| strategy | layers |") and len({line.count("|") for line in lines}) == 1
    assert [line.split("`")[1] for line in lines[2:]] == [n for n, s in STRATEGIES.items() for _ in s.descriptions]


def test_sentences_that_name_strategies():
    assert names_with_split("head_tail") == ["gather_kv"] and names_with_split("contiguous") == list(STRATEGIES)
    assert names_that_call_projections_whole() == ["packed", "gather_kv"]
    assert one_of(["a"]) == "'a'" and one_of(["a", "b"]) == "'a' or 'b'" and one_of("abc") == "'a', 'b' or 'c'"


def test_keys_and_values_of_all_heads():
    """DeepSeek-V3 at 128K tokens: 10.7 GB a layer, of the own heads an eighth."""
    work = Work(V3, 8, 131072)
    assert estimate(work, "gather_kv", Machine()).kv_bytes == pytest.approx(10.7e9, rel=0.01)
    assert estimate(work, "latent_kv", Machine()).kv_bytes == pytest.approx(10.7e9 / 8, rel=0.01)


def test_uneven_heads():
    """20 heads on 8 ranks: some have 3, the mean is 2.5."""
    work = Work(PRESETS["glm-4.7-flash"].widths, 8, 8192)
    assert estimate(work, "packed", Machine()).imbalance == pytest.approx(3 / 2.5)
    assert estimate(work, "gather_kv", Machine()).imbalance == pytest.approx(2 - 1 / 8)
    assert (
        estimate(Work(PRESETS["glm-4.7-flash"].widths, 8, 8192, split="head_tail"), "gather_kv", Machine()).imbalance
        == 1
    )
    assert estimate(Work(V3, 8, 8192, keys_per_query=1024), "gather_kv", Machine()).imbalance == 1


def test_extra_products():
    """Even heads compute nothing beyond their share; gather_kv expands every head on every rank."""
    for strategy in ("packed", "latent_kv", "latent_qkv"):
        assert estimate(Work(V3, 8, 8192), strategy, Machine()).extra_tflop == pytest.approx(0, abs=1e-9)
    of_kv = 3 * 2 * 512 * 256 * 128 * 8192 * (1 - 1 / 8) / 1e12
    assert estimate(Work(V3, 8, 8192, split="head_tail"), "gather_kv", Machine()).extra_tflop == pytest.approx(of_kv)


def test_head_chunks_cost_latency():
    """Queries and output travel in chunks, keys and values once; the bytes stay the same."""
    llama, machine = HeadWidths(32, 8, 128, 128), Machine(latency_us=10)
    one, four = (estimate(Work(llama, 8, 8192, head_chunks=n), "packed", machine) for n in (1, 4))
    assert (one.collectives, four.collectives) == (4, 18) and one.sent_bytes == four.sent_bytes
    assert four.send_ms - one.send_ms == pytest.approx(14 * 0.01)
    assert estimate(Work(llama, 8, 8192, head_chunks=5), "packed", machine).refused == (
        "5 head chunks are more than the 4 heads of a rank"
    )
    assert estimate(Work(llama, 8, 8192, head_chunks=32), "gather_kv", machine).collectives == 2
    assert [STRATEGIES[name].collectives(V3, 4) for name in STRATEGIES] == [18, 18, 4, 2]


@pytest.mark.parametrize(
    "model,ranks,tokens,link,best",
    [
        ("deepseek-v2-lite", 2, 4096, 1, "gather_kv"),
        ("deepseek-v2-lite", 2, 131072, 400, "latent_kv"),
        ("deepseek-v2-lite", 16, 131072, 400, "packed"),  # H*P/L is 8
        ("deepseek-v3", 8, 131072, 400, "latent_qkv"),  # H*K/Q is 16
        ("deepseek-v3", 32, 131072, 400, "latent_kv"),
        ("deepseek-v3", 128, 131072, 400, "packed"),  # H*P/L is 64
        ("kimi-k2", 4, 131072, 400, "latent_qkv"),  # H*K/Q is 8
        ("kimi-k2", 16, 131072, 400, "latent_kv"),
    ],
)
def test_choice(model, ranks, tokens, link, best):
    found, why = choose(estimates(Work(PRESETS[model].widths, ranks, tokens), Machine(link_gbps=link)))
    assert found.strategy == best and why.startswith(best), why


MLA = dict(num_attention_heads=20, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, q_lora_rank=768)  # fmt: skip


@pytest.mark.parametrize(
    "config,wanted",
    [
        (MLA, PRESETS["glm-4.7-flash"].widths),
        ({"model_type": "of remote code", "text_config": MLA}, PRESETS["glm-4.7-flash"].widths),
        (dict(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096), HeadWidths(32, 8, 128, 128)),
        (dict(num_attention_heads=32, hidden_size=4096), HeadWidths(32, 32, 128, 128)),
        # As on the hub: what is as in the class of the config is left out.
        ({"model_type": "gemma3", "text_config": dict(model_type="gemma3_text", hidden_size=3840, num_attention_heads=16, num_key_value_heads=8)}, HeadWidths(16, 8, 256, 256)),
        ({"model_type": "gemma3", "text_config": dict(model_type="gemma3_text", hidden_size=2560)}, HeadWidths(8, 4, 256, 256)),
        (dict(model_type="minicpm3", num_attention_heads=40, num_key_value_heads=40, qk_nope_head_dim=64, qk_rope_head_dim=32, q_lora_rank=768, kv_lora_rank=256), MLAWidths(40, 64, 32, 64, 256, 768)),
        (dict(model_type="gptj", n_head=4, n_embd=32), HeadWidths(4, 4, 8, 8)),
    ],
)  # fmt: skip
def test_widths_of_configs(config, wanted, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_widths(str(tmp_path)) == find_widths(str(tmp_path / "config.json")) == wanted


HEADS = dict(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)


@pytest.mark.parametrize(
    "config,message",
    [
        ({k: v for k, v in MLA.items() if k != "qk_rope_head_dim"}, "has no qk_rope_head_dim: add it"),
        (MLA | dict(v_head_dim=0), "v_head_dim in the config must be a positive whole number, got 0"),
        (HEADS | dict(num_attention_heads="32"), "num_attention_heads in the config must be .*, got '32'"),
        (HEADS | dict(num_attention_heads=-4), "num_attention_heads in the config must be .*, got -4"),
        (HEADS | dict(num_attention_heads=None), "has no num_attention_heads"),
        (HEADS | dict(num_key_value_heads=[8]), r"num_key_value_heads in the config must be .*, got \[8\]"),
        (HEADS | dict(hidden_size=None), "has no hidden_size"),
        ({"text_config": [1]}, r"an object of names and values, got \[1\]"),
        ({"model_type": "gemma3", "text_config": "x"}, "transformers cannot read this config of gemma3"),
        ([1], r"an object of names and values, got \[1\]"),
        (None, "an object of names and values, got None"),
    ],
)
def test_configs_that_say_no_widths(config, message, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        find_widths(str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", str(tmp_path), "--sp", "2", "--tokens", "64"])
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_command(capsys):
    main(["plan", "--model", "deepseek-v3", "--sp", "8", "--tokens", "131072"])
    said = capsys.readouterr().out
    assert "auto: latent_qkv, " in said and "10.7" in said and "gather_kv with split='head_tail' would take" in said
    main(["plan", "--model", "deepseek-v2-lite", "--sp", "2", "--tokens", "4096", "--link-gbps", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["auto"] == "gather_kv" and answer["rows"][0]["strategy"] == "packed"
    assert answer["rows"][0]["sent_bytes"] == 38273024  # as benchmarks/attention_layer.py counts
    assert answer["rows"][2] == {"strategy": "latent_qkv", "refused": "no query latent"}


def test_plot(tmp_path, capsys):
    main(["plan", "--model", "glm-4.7-flash", "--sp", "8", "--tokens", "8192", "--plot", str(tmp_path / "bytes.png")])
    assert (tmp_path / "bytes.png").read_bytes().startswith(b"\x89PNG")


def test_doctor(capsys, monkeypatch):
    from ds_mla_ulysses.cli import doctor
    from ds_mla_ulysses.version import REQUIREMENTS

    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "ok  torch 2." in said and "gloo found" in said, said
    monkeypatch.setitem(REQUIREMENTS, "transformers", ("99.0", "99.1"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert re.search(r"missing  transformers 5\.\S+, but at least 99.0 is needed: pip", capsys.readouterr().out)
    monkeypatch.setitem(REQUIREMENTS, "transformers", ("5.15.0", "5.23.0"))
    assert any("tested are 5.15.0 to 5.23.0: compare one step" in str(finding) for finding in doctor.examine())
    monkeypatch.setitem(REQUIREMENTS, "transformers", ("5.15.0", "5.24.0"))
    for version, state in (("0.19.6rc1", "missing"), ("0.19.6", "ok"), ("0.19.8+local", "ok"), ("0.20rc1", "note")):
        monkeypatch.setattr(doctor, "installed", lambda package, v=version: v)
        assert [f.state for f in doctor.examine() if f.what.startswith("deepspeed ")] == [state], version


@pytest.mark.parametrize(
    "words,message",
    [
        (["--model", "gpt-9", "--sp", "2", "--tokens", "64"], "neither one of deepseek-v2-lite"),
        (["--model", "deepseek-v3", "--sp", "3", "--tokens", "64"], "must be a multiple of --sp 3"),
        (["--model", "deepseek-v3", "--sp", "0", "--tokens", "64"], "must be positive"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "64", "--link-gbps", "-1"], "must be positive"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "64", "--sequence", "65"], "longer than all 64"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "64", "--plot", "/none/x.png"], "No such file"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "131k"], "invalid whole_number value"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "9" * 400], "not beyond 2**48, got 99999999999999999999"),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "64", "--link-gbps", "1e-320"], "that hardware can have"),
        (
            ["--model", "deepseek-v3", "--sp", "2", "--tokens", "6", "--split", "head_tail"],
            "multiple of 4, twice --sp 2",
        ),
        (["--model", "deepseek-v3", "--sp", "2", "--tokens", "64", "--plot", "/tmp"], "the name of a file to write"),
    ],
)
def test_command_refuses(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_without_torch():
    """The doctor is for machines on which something is missing."""
    import subprocess
    import sys

    code = "import sys; sys.modules['torch'] = None\nfrom ds_mla_ulysses import cli\n"
    code += "cli.doctor.installed = lambda package: None\ncli.main(sys.argv[1:])"
    words = {"doctor": ("doctor",), "plan": ("plan", "--model", "deepseek-v3", "--sp", "2", "--tokens", "64")}
    done = {
        command: subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True)
        for command, given in words.items()
    }
    assert (
        done["doctor"].returncode == 1
        and "missing  torch is not installed: pip install torch==" in done["doctor"].stdout
    ), done
    assert done["plan"].returncode == 2
    assert "torch is not installed: `ds-mla-ulysses doctor` shows" in done["plan"].stderr


_LLAMA = dict(model_type="llama", hidden_size=64, num_attention_heads=4)


@pytest.mark.parametrize("command", [("plan", "--sp", "2", "--tokens", "64"), ("check",)])
@pytest.mark.parametrize(
    "text,message",
    [
        ('{"a":' * 5000 + "1" + "}" * 5000, "config.json is nested too deeply"),
        ("[" * 5000 + "]" * 5000, "config.json is nested too deeply"),
        (json.dumps(_LLAMA)[:-1] + ', "x": ' + "[" * 900 + "]" * 900 + "}", "config.json is nested too deeply"),
        (json.dumps(_LLAMA | dict(num_hidden_layers=10**9)), "says num_hidden_layers 1000000000, which is more than"),
        (json.dumps(_LLAMA | dict(model_type="qwen2", num_hidden_layers=1e9)), "says num_hidden_layers 1000000000.0"),
        (json.dumps(dict(text_config=_LLAMA | dict(num_hidden_layers=10**9))), "says num_hidden_layers 1000000000"),
    ],
)
def test_configs_that_would_not_end(tmp_path, capsys, text, message, command):
    from ds_mla_ulysses.cli import main

    (tmp_path / "config.json").write_text(text)
    before = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        main([*command, "--model", str(tmp_path)])
    assert time.monotonic() - before < 1
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_values_that_would_not_end():
    """`check` takes a config as a dict too."""
    nested = {}
    for _ in range(5000):
        nested = {"a": nested}
    for values, message in (({"x": nested}, "nested too deeply"), ({"n_layers": 10**9}, "says n_layers 1000000000")):
        with pytest.raises(ValueError, match=message):
            ds_mla_ulysses.check(_LLAMA | values)
