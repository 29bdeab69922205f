"""The planner: its bytes are the meter's, its numbers those of the models, and its choice has a reason."""

import ast
import json
import re
from pathlib import Path

import pytest
from rank_pool import run_ranks

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
V3 = PRESETS["deepseek-v3"]


@pytest.mark.parametrize(
    "strategy,elements", [("packed", 64_960), ("latent_kv", 39_872), ("latent_qkv", 29_120), ("gather_kv", 4_032)]
)
def test_deepseek_v3_on_eight_ranks(strategy, elements):
    assert sent_elements(V3, strategy, 8, 3) == (elements, elements)


def counted(cases):
    """What the meter counts of one rank of fake groups: forward and backward of one layer."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ds_mla_ulysses as dmu

    found, T = [], 2

    def leaf(*shape):
        return torch.zeros(1, T, *shape, dtype=torch.bfloat16, requires_grad=True)

    for widths, strategy, ranks, rank in cases:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        group = dmu.SequenceGroup.of(dist.group.WORLD)

        with dmu.TrafficMeter() as meter:
            if isinstance(widths, HeadWidths):
                q, k, v = (leaf(h, d) for h, d in ((widths.heads, widths.key), (widths.kv_heads, widths.key), (widths.kv_heads, widths.value)))  # fmt: skip

                def local(q, k, v, first_query=0):
                    return q.new_zeros(*q.shape[:3], v.shape[-1]) + q.sum() + k.sum() + v.sum()

                attention = (dmu.GatherKVAttention if strategy == "gather_kv" else dmu.UlyssesAttention)(local, group)
                attention(q, k, v).sum().backward()
            else:
                step_of_mla(widths, strategy, group, leaf)
        directions = ("forward", "backward")
        found.append(
            [sum(n for (_, d), n in meter.bytes.items() if d == direction) // (2 * T) for direction in directions]
        )
    dist.destroy_process_group()
    return found


def step_of_mla(w, strategy, group, leaf):
    import torch

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.layout.exchange import HeadsToTokens
    from ds_mla_ulysses.layout.gather import gather_rows

    def local(q, k, v, first_query=0):
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + q.sum() + k.sum() + v.sum()

    def expand(latent, heads):
        return latent.sum(-1)[..., None, None].expand(-1, -1, heads.stop - heads.start, w.nope + w.value)

    dims = dict(nope_dim=w.nope, rope_dim=w.rope, value_dim=w.value)
    latent, shared = leaf(w.latent), leaf(w.rope)
    if strategy == "latent_qkv":
        query = leaf(w.query_latent)
        attention = dmu.LatentKVMLAAttention(local, group, **dims)
        own = attention.query_heads(w.heads)
        q_BSQ, kv_BSD = gather_rows([query, torch.cat([latent, shared], -1)], group, True)
        k, v = attention.latents.expand(*kv_BSD.split([w.latent, w.rope], -1), True, own, expand)
        q = q_BSQ.sum(-1)[..., None, None].expand(-1, -1, own.stop - own.start, w.key)
        HeadsToTokens.apply(local(q, k, v).transpose(0, 1), w.heads, group, True).sum().backward()
        return
    kinds = {
        "packed": dmu.UlyssesMLAAttention,
        "latent_kv": dmu.LatentKVMLAAttention,
        "gather_kv": dmu.GatherKVMLAAttention,
    }
    attention, q = kinds[strategy](local, group, **dims), leaf(w.heads, w.key)
    if strategy == "packed":
        attention(q, leaf(w.heads, w.nope + w.value), shared).sum().backward()
    else:
        attention(q, latent, shared, expand=expand).sum().backward()


SMALL = MLAWidths(20, 6, 2, 4, 12, 16)
CASES = [
    (widths, strategy, ranks, rank)
    for widths, strategies in (
        (SMALL, ("packed", "latent_kv", "latent_qkv", "gather_kv")),
        (MLAWidths(64, 6, 2, 4, 12, 16), ("packed", "latent_kv", "latent_qkv", "gather_kv")),
        (HeadWidths(64, 8, 6, 6), ("packed", "gather_kv")),
        (HeadWidths(6, 3, 5, 4), ("packed", "gather_kv")),
    )
    for strategy in strategies
    for ranks in (1, 2, 3, 4, 6, 8, 16, 20, 64)
    for rank in sorted({0, ranks // 2, ranks - 1})
    if ranks <= widths.heads or strategy == "gather_kv"
]


def test_bytes_are_those_that_the_meter_counts():
    import rank_pool

    pool = rank_pool._Pool(1)  # of its own, since the worker's process group is replaced
    try:
        ((status, *answer),) = pool.call(counted, (CASES,), {}, 200)
    finally:
        pool.kill()
    assert status == "ok", answer[1]
    for (widths, strategy, ranks, rank), got in zip(CASES, answer[0], strict=True):
        assert tuple(got) == sent_elements(widths, strategy, ranks, rank), (widths, strategy, ranks, rank)


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
    assert not [name for name in names_asked_for(ast.parse(path.read_text())) if asks_for_a_strategy(name)]


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
    work = Work(PRESETS["glm-4.7-flash"], 8, 8192)
    assert estimate(work, "packed", Machine()).imbalance == pytest.approx(3 / 2.5)
    assert estimate(work, "gather_kv", Machine()).imbalance == pytest.approx(2 - 1 / 8)
    assert estimate(Work(PRESETS["glm-4.7-flash"], 8, 8192, split="head_tail"), "gather_kv", Machine()).imbalance == 1
    assert estimate(Work(V3, 8, 8192, keys_per_query=1024), "gather_kv", Machine()).imbalance == 1


def test_extra_products():
    """Even heads compute nothing beyond their share; gather_kv expands every head on every rank."""
    for strategy in ("packed", "latent_kv", "latent_qkv"):
        assert estimate(Work(V3, 8, 8192), strategy, Machine()).extra_tflop == pytest.approx(0, abs=1e-9)
    of_kv = 3 * 2 * 512 * 256 * 128 * 8192 * (1 - 1 / 8) / 1e12
    assert estimate(Work(V3, 8, 8192, split="head_tail"), "gather_kv", Machine()).extra_tflop == pytest.approx(of_kv)


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
    found, why = choose(estimates(Work(PRESETS[model], ranks, tokens), Machine(link_gbps=link)))
    assert found.strategy == best and why.startswith(best), why


MLA = dict(num_attention_heads=20, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, q_lora_rank=768)  # fmt: skip


@pytest.mark.parametrize(
    "config,wanted",
    [
        (MLA, PRESETS["glm-4.7-flash"]),
        ({"model_type": "of remote code", "text_config": MLA}, PRESETS["glm-4.7-flash"]),
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
        ({k: v for k, v in MLA.items() if k != "qk_rope_head_dim"}, "says no qk_rope_head_dim: name it"),
        (MLA | dict(v_head_dim=0), "v_head_dim 0, which must be a positive whole number"),
        (HEADS | dict(num_attention_heads="32"), "num_attention_heads '32', which must be"),
        (HEADS | dict(num_attention_heads=-4), "num_attention_heads -4, which must be"),
        (HEADS | dict(num_attention_heads=None), "says no num_attention_heads"),
        (HEADS | dict(num_key_value_heads=[8]), r"num_key_value_heads \[8\], which must be"),
        (HEADS | dict(hidden_size=None), "says no hidden_size"),
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
    for version, state in (("0.19.0rc1", "missing"), ("0.19.0", "ok"), ("0.19.8+local", "ok"), ("0.20rc1", "note")):
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


def chosen(model_kind, auto, split="contiguous"):
    from models import packed_batch, tiny_model
    from peft import LoraConfig, get_peft_model
    from test_parity import DOCUMENTS, sharded_step

    import ds_mla_ulysses as dmu

    if model_kind == "moba":
        dmu.register_moba(dmu.MoBAConfig(4, 3), "moba_auto")
    is_dense = model_kind in ("llama", "moba")
    attends = "moba_auto" if model_kind == "moba" else "sdpa"
    kv_heads = dict(kv_heads=1) if is_dense else {}
    model = tiny_model("llama" if is_dense else "deepseek_v3", attn_implementation=attends, **kv_heads)
    if model_kind == "adapters":
        model = get_peft_model(model, LoraConfig(target_modules=["kv_b_proj"])).double()
    handle = dmu.parallelize(model, strategy=auto, split=split)
    loss, _, _ = sharded_step(model, packed_batch(DOCUMENTS), handle)
    return handle.strategy, handle.why, round(loss, 6)


@pytest.mark.parametrize(
    "model,gbps,split,best",
    [
        ("mla", 0.001, "contiguous", {"gather_kv"}),
        ("mla", 1e9, "contiguous", {"packed", "latent_kv", "latent_qkv"}),
        ("llama", 1e9, "contiguous", {"packed"}),
        ("adapters", 1e9, "contiguous", {"packed"}),
        ("mla", 1e9, "head_tail", {"gather_kv"}),
    ],
)
def test_auto(model, gbps, split, best):
    from ds_mla_ulysses import Auto

    answers = run_ranks(2, chosen, model, Auto(tokens=4096, link_gbps=gbps, tflops=1.0), split)
    assert len(set(answers)) == 1 and answers[0][0] in best, answers
    assert "(given)" in answers[0][1]


def test_auto_measures_what_is_not_given():
    answers = run_ranks(2, chosen, "mla", "auto")
    assert len(set(answers)) == 1 and answers[0][1].count("(measured on cpu)") == 2, answers


def test_auto_alone():
    assert run_ranks(1, chosen, "mla", "auto")[0][:2] == ("packed", "packed: a group of one sends nothing")
    assert run_ranks(1, chosen, "mla", "auto", "head_tail")[0][0] == "gather_kv"


@pytest.mark.parametrize("model,best", [("llama", "packed"), ("moba", "gather_kv")])
def test_auto_knows_what_moba_reads(model, best):
    """With one key-value head gathering sends less; full attention over consecutive tokens would be uneven."""
    from ds_mla_ulysses import Auto

    answers = run_ranks(2, chosen, model, Auto(tokens=2**20, link_gbps=400, tflops=1.0))
    assert [answer[0] for answer in answers] == [best] * 2


@pytest.mark.parametrize(
    "given,message",
    [
        (dict(link_gbps=-1), r"Auto\(link_gbps=-1\) must be a positive number"),
        (dict(tflops=float("inf")), r"Auto\(tflops=inf\) must be a positive number"),
        (dict(tokens=0.5), r"Auto\(tokens=0.5\) must be a positive whole number"),
        (dict(sequence=True), r"Auto\(sequence=True\) must be a positive whole number"),
        (dict(dtype="bf16"), r"Auto\(dtype='bf16'\) must be a torch.dtype"),
    ],
)
def test_auto_takes_numbers(given, message):
    from ds_mla_ulysses import Auto

    with pytest.raises(ValueError, match=message):
        Auto(**given)


def test_auto_takes_one_sequence_where_it_is_more():
    from ds_mla_ulysses import Auto

    ((_, why, _), _) = run_ranks(2, chosen, "mla", Auto(sequence=32768, link_gbps=1.0, tflops=1.0))
    assert "; 32,768 tokens (assumed" in why and "float64 (the parameters')" in why


def decided(dtype):
    import torch

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.planner.auto import Auto, decide

    auto = Auto(tokens=8192, link_gbps=400, tflops=400, dtype=dtype)
    group = SequenceGroup.of(torch.distributed.group.WORLD)
    return decide(auto, Work(PRESETS["glm-4.7-flash"], 2, 0), {}, group, torch.float32, torch.device("cpu"))


def test_auto_counts_the_bytes_of_what_the_model_trains_in():
    """A model that is loaded in fp32 for an engine that trains it in bf16."""
    import torch

    of_fp32, of_bf16 = run_ranks(2, decided, None)[0], run_ranks(2, decided, torch.bfloat16)[0]
    assert of_fp32[0] != of_bf16[0], (of_fp32, of_bf16)
    assert "float32 (the parameters')" in of_fp32[1] and "bfloat16 (given)" in of_bf16[1]


@pytest.mark.parametrize(
    "backends,at,wanted",
    [
        ("cpu:gloo,cuda:gloo", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", "cuda:1", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "cuda:3"),
        ("cuda:nccl", "cpu", "cuda:3"),
        ("cuda:nccl", "meta", "cuda:3"),
        ("cuda:gloo", "cpu", None),
    ],
)
def test_auto_measures_where_the_job_runs(backends, at, wanted, monkeypatch):
    """A model is often still on the CPU when it is parallelized."""
    import torch

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.planner import auto

    monkeypatch.setattr(auto.dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    if wanted is None:
        with pytest.raises(ValueError, match="move the model to its device first"):
            auto._device_of_job(SequenceGroup(None, 0, 2), torch.device(at))
    else:
        assert auto._device_of_job(SequenceGroup(None, 0, 2), torch.device(at)) == torch.device(wanted)


def other_names(kind):
    from transformers import AutoConfig, AutoModelForCausalLM

    import ds_mla_ulysses as dmu

    config = AutoConfig.for_model(kind, n_head=4, n_embd=32, n_layer=1, vocab_size=128, rotary_dim=4)
    model = AutoModelForCausalLM.from_config(config)
    return dmu.parallelize(model, strategy=dmu.Auto(link_gbps=1.0, tflops=1.0)).strategy


@pytest.mark.filterwarnings("ignore:.* was not tested itself")
def test_auto_knows_heads_by_the_names_of_each_config():
    assert run_ranks(2, other_names, "gptj")[0] in ("packed", "gather_kv")


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
