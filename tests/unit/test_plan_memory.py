"""`plan --memory`: its numbers are those that are known of models and of published runs, and bad input is refused."""

import json
import re
from pathlib import Path

import pytest

from ds_mla_ulysses.cli import main
from ds_mla_ulysses.hf.configs import find_model
from ds_mla_ulysses.planner import memory
from ds_mla_ulysses.planner.memory import GB, Machines, Setting, ladder, step_memory
from ds_mla_ulysses.planner.models import PRESETS, Experts

LADDER = {setting.name: setting for setting in ladder(4)}
PAGE = Path(__file__).parents[2] / "docs" / "long-sequences.md"
#: The machines of the table in the documentation, as arguments of the command.
SMALL = "--gpus 8 --memory 80 --host-memory 1900"
MACHINES = {"deepseek-v3": "--gpus 128 --sp 32 --memory 141 --host-memory 30400"}


@pytest.mark.parametrize(
    "name,billions",
    [
        ("llama-3-8b", 8.03),
        ("qwen3-8b", 8.19),
        ("deepseek-v2-lite", 15.7),
        ("glm-4.7-flash", 29.9),
        ("deepseek-v3", 671),
        ("kimi-k2", 1026),
    ],
)
def test_parameters(name, billions):
    assert PRESETS[name].parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_presets_are_transformers_configs(tmp_path):
    """The classes' defaults are those of DeepSeek-V3 and GLM-4.7-Flash; Llama's config.json names the rest."""
    of_llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    configs = {
        "deepseek-v3": {"model_type": "deepseek_v3"},
        "glm-4.7-flash": {"model_type": "glm4_moe_lite"},
        "llama-3-8b": {"model_type": "llama", "vocab_size": 128256, **of_llama},
    }
    for name, config in configs.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert find_model(str(tmp_path)) == find_model(name.upper()) == PRESETS[name]


@pytest.mark.parametrize(
    "config,experts,dense_layers",
    [
        ({"model_type": "qwen3_moe"}, Experts(128, 8, 768, 0), 0),
        ({"model_type": "mixtral"}, Experts(8, 2, 14336, 0), 0),
        ({"model_type": "qwen2"}, None, 32),
    ],
)
def test_experts_of_configs(config, experts, dense_layers, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_model(str(tmp_path))
    assert (model.experts, model.dense_layers) == (experts, dense_layers)
    assert model.normalizes_heads == (config["model_type"] == "qwen3_moe")


def test_a_published_run():
    """TRL 1.13 measured 56.2 GB with Qwen3-8B and 1,048,576 tokens on 8 H100: bf16 on all GPUs, a chunked loss, layer inputs
    on the host.
    """
    setting = Setting("TRL", tiles_loss=True, offloads_inputs=True)
    step = step_memory(PRESETS["qwen3-8b"], "packed", Machines(8, 8, 3, 80 * GB), setting)
    assert step.peak(2**20 / 8) / GB == pytest.approx(56.2, rel=0.05)


def test_longest_is_the_longest():
    machines = Machines(8, 8, 3, 80 * GB)
    for name in ("llama-3-8b", "deepseek-v2-lite", "glm-4.7-flash"):
        for strategy in ("packed", "gather_kv"):
            for setting in ladder(2):
                step = step_memory(PRESETS[name], strategy, machines, setting)
                tokens, limit = step.longest(machines)
                assert tokens and limit == "GPU memory"
                assert step.peak(tokens) <= 75 * GB < step.peak(tokens + 1)


def test_host_memory_is_a_limit():
    machines = Machines(8, 8, 3, 80 * GB, host_memory=400 * GB)
    step = step_memory(PRESETS["llama-3-8b"], "packed", machines, LADDER["offload"])
    tokens, limit = step.longest(machines)
    assert limit == "host memory" and step.host(tokens) <= 400 * GB < step.host(tokens + 1)
    nothing = Machines(8, 8, 3, 80 * GB, host_memory=100 * GB)
    assert step.longest(nothing) == (0, "host memory")


@pytest.mark.parametrize("stage,bytes_of_parameter", [(0, 16), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)])
def test_stages(stage, bytes_of_parameter):
    model, buckets = PRESETS["llama-3-8b"], 0.2 * GB
    fixed = step_memory(model, "packed", Machines(8, 8, stage, 80 * GB), LADDER["as it is"]).fixed
    assert fixed == pytest.approx(bytes_of_parameter * model.parameters + buckets)
    if stage:
        moved = step_memory(model, "packed", Machines(8, 8, stage, 80 * GB), LADDER["offload"])
        assert moved.host_fixed == 18 * model.parameters
        left = {1: 4, 2: 2, 3: 2 / 8}[stage]
        assert moved.fixed == pytest.approx(left * model.parameters + buckets)


def test_data_parallel_groups_share_the_model_but_not_the_sequence():
    one, two = (
        step_memory(PRESETS["llama-3-8b"], "packed", Machines(gpus, 8, 3, 80 * GB), LADDER["offload"])
        for gpus in (8, 16)
    )
    assert one.kept == two.kept and one.largest(1e5) == two.largest(1e5)
    assert two.fixed < one.fixed and two.host(1e5) - one.host(1e5) == pytest.approx(one.host_kept * 1e5)


def test_command(capsys, tmp_path):
    words = ["plan", "--model", "llama-3-8b", "--gpus", "8", "--memory", "80"]
    main([*words, "--plot", str(tmp_path / "memory.png")])
    said = capsys.readouterr().out
    assert all(name in said for name in LADDER) and "8.03B parameters" in said and "ZeRO 3 on 8 GPUs of 80 GB" in said
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    main([*words, "--tokens", str(2**20), "--offload", "inputs", "--host-memory", "1900", "--json"])
    rows = {row["setting"]["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == list(LADDER)
    assert rows["as it is"]["largest"] == {"component": "head and loss", "phase": "whole logits"}
    assert rows["offload"]["host_at_tokens"] == 2**20 * 32 * 2 * 4096
    for row in rows.values():
        assert row["tokens"] == 2**20 and (row["longest"] >= 2**20) == (row["peak_at_tokens"] <= 75 * GB)
        assert row["peak"] <= 75 * GB
    main(["plan", "--model", "deepseek-v3", "--gpus", "8", "--memory", "80", "--offload", "none"])
    said = capsys.readouterr().out
    assert "No setting fits" in said and "offload  " not in said


def test_the_number_of_gpus_is_that_of_ranks(capsys):
    main(["plan", "--model", "deepseek-v3", "--gpus", "8", "--tokens", "8192"])
    one = capsys.readouterr().out
    main(["plan", "--model", "deepseek-v3", "--gpus", "16", "--sp", "8", "--tokens", "8192"])
    assert capsys.readouterr().out == one


@pytest.mark.parametrize(
    "words,message",
    [
        (["--tokens", "64"], "give --gpus, the number of ranks of the job, or --sp"),
        (["--gpus", "8"], "give --tokens, or --memory"),
        (["--gpus", "8", "--sp", "3", "--memory", "80"], "--gpus 8 must be a multiple of --sp 3"),
        (["--gpus", "8", "--memory", "0"], "must be positive"),
        (["--gpus", "8", "--memory", "4"], "--reserve 5 GB leaves nothing of --memory 4 GB"),
        (["--gpus", "8", "--memory", "80", "--tokens", "9"], "--tokens 9 must be a multiple of the 8 ranks"),
        (["--gpus", "8", "--memory", "80", "--dtype", "fp32"], "--memory plans for --dtype bf16, got fp32"),
        (["--gpus", "8", "--memory", "80", "--zero", "4"], "invalid choice: 4"),
        (["--gpus", "8", "--memory", "80", "--offload", "weights"], "must be none, or some of optimizer, inputs"),
        (["--gpus", "8", "--memory", "80", "--zero", "0"], "ZeRO 0 cannot keep the optimizer on the host"),
        (["--gpus", "8", "--memory", "80", "--strategy", "latent_kv"], "impossible: no latents"),
        (["--gpus", "64", "--memory", "80"], "impossible: 32 heads are fewer than the ranks"),
        (["--gpus", "8", "--memory", "80", "--plot", "/tmp"], "the name of a file to write"),
    ],
)
def test_command_refuses(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "llama-3-8b", *words])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_configs_without_what_memory_needs(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 8, "hidden_size": 64}))
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(tmp_path), "--gpus", "2", "--memory", "80"])
    assert "the config has no num_hidden_layers" in capsys.readouterr().err


def test_buckets_are_those_of_the_config():
    config = json.loads((Path(__file__).parents[2] / "configs" / "zero3_long.json").read_text())["zero_optimization"]
    assert config["reduce_bucket_size"] == memory._BUCKET
    assert config["stage3_prefetch_bucket_size"] == memory._PREFETCHED
    assert config["stage3_max_reuse_distance"] == 0  # parameters are not kept after they were used


def test_the_ladder_in_the_documentation(capsys):
    """The table is what the command says. If it changes, the assertion shows the new one."""
    models = ["llama-3-8b", "qwen3-8b", "deepseek-v2-lite", "glm-4.7-flash", "deepseek-v3"]
    lengths = {}
    for name in models:
        main(["plan", "--model", name, *MACHINES.get(name, SMALL).split(), "--json"])
        for row in json.loads(capsys.readouterr().out)["rows"]:
            lengths.setdefault(row["setting"]["name"], []).append(row["longest"])
    lines = [["setting", *models], *([name, *map(_millions, found)] for name, found in lengths.items())]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    table.insert(1, "|---|" + "--:|" * len(models))
    assert "\n".join(table) + "\n" in PAGE.read_text()


def _millions(tokens):
    return f"{tokens / 1e6:.2f}M" if tokens else "none"


def test_the_output_in_the_documentation(capsys):
    text = PAGE.read_text()
    (command,) = re.findall(r"^ds-mla-ulysses (plan --model llama-3-8b .*)$", text, re.M)
    main(command.split())
    assert f"```text\n{capsys.readouterr().out}```" in text


def test_goals():
    """Llama-3-8B on 8 GPUs of 80 GB: 5.2M tokens without head chunks; the GPUs hold 7M with them, the hosts 6.7M."""
    machines = Machines(8, 8, 3, 80 * GB, host_memory=1900 * GB)
    chunks = {"llama-3-8b": 4, "deepseek-v2-lite": 2, "glm-4.7-flash": 2}

    def longest(name, rung, machines=machines):
        setting = {s.name: s for s in ladder(chunks[name])}[rung]
        return 8 * step_memory(PRESETS[name], "packed", machines, setting).longest(machines)[0]

    assert longest("llama-3-8b", "tiled layers") >= 5.2e6
    assert longest("llama-3-8b", "head chunks", Machines(8, 8, 3, 80 * GB)) >= 7e6
    assert longest("deepseek-v2-lite", "tiled layers") >= 6e6
    assert longest("glm-4.7-flash", "tiled layers") >= 2e6
    step = step_memory(PRESETS["glm-4.7-flash"], "packed", machines, LADDER["tiled layers"])
    assert step.peak(2**20 / 8) <= 56 * GB
