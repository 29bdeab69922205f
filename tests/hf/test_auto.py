"""strategy="auto" on the ranks of a job: the same choice everywhere, with a reason."""

import pytest
from rank_pool import run_ranks

from ds_mla_ulysses.planner.models import PRESETS
from ds_mla_ulysses.planner.work import Work


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
    return decide(auto, Work(PRESETS["glm-4.7-flash"].widths, 2, 0), {}, group, torch.float32, torch.device("cpu"))


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

    config = AutoConfig.for_model(kind, n_head=4, n_embd=32, n_layer=1, vocab_size=128)
    model = AutoModelForCausalLM.from_config(config)
    return dmu.parallelize(model, strategy=dmu.Auto(link_gbps=1.0, tflops=1.0)).strategy


@pytest.mark.filterwarnings("ignore:.* was not tested itself")
def test_auto_knows_heads_by_the_names_of_each_config():
    assert run_ranks(2, other_names, "gpt2")[0] in ("packed", "gather_kv")
