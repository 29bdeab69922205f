"""Names, configuration and errors of the public functions."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
import torch

from ds_mla_ulysses.moba import (
    MoBAConfig,
    choose_implementation,
    flash_implementation,
    moba_attention,
    moba_attn_varlen,
    moba_select,
)
from ds_mla_ulysses.moba.config import IMPLEMENTATIONS


def test_config():
    config = MoBAConfig()
    assert asdict(config) == {
        "block_size": 4096,
        "top_k": 12,
        "full_attention_layers": (),
        "dense": "sdpa",
        "implementation": "auto",
    }
    assert MoBAConfig(**json.loads(json.dumps(asdict(config)))) == config
    assert hash(replace(config, full_attention_layers=[3, -1])) == hash(MoBAConfig(full_attention_layers=(3, -1)))
    with pytest.raises(FrozenInstanceError):
        config.top_k = 3


def test_layers():
    config = MoBAConfig(full_attention_layers=(0, -1, -2))
    assert [config.blocks_of(i, 5) is None for i in range(5)] == [True, False, False, True, True]
    assert MoBAConfig().blocks_of(0, 1) == (4096, 12)
    for layer, layers in ((5, 5), (0, 1)):
        with pytest.raises(ValueError, match=f"is not in a model of {layers} layers"):
            config.blocks_of(layer, layers)
    config = MoBAConfig(block_size=[8, 16, 32], top_k=3, full_attention_layers=[-2])
    assert [config.blocks_of(i, 3) for i in range(3)] == [(8, 3), None, (32, 3)]
    assert MoBAConfig(**json.loads(json.dumps(asdict(config)))) == config
    with pytest.raises(ValueError, match="block_size has 3 numbers, but the model has 4 layers"):
        config.blocks_of(0, 4)


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"block_size": 0}, ValueError, "block_size must be an integer >= 1, got 0"),
        ({"block_size": 64.0}, TypeError, "block_size must be an integer >= 1, got 64.0"),
        ({"top_k": True}, TypeError, "top_k must be an integer >= 1, got True"),
        ({"top_k": -1}, ValueError, "top_k must be an integer >= 1, got -1"),
        ({"full_attention_layers": 3}, TypeError, "full_attention_layers must be a tuple of layer indices, got 3"),
        ({"full_attention_layers": ("last",)}, TypeError, "full_attention_layers must be a tuple of layer indices"),
        ({"dense": ""}, ValueError, "dense must be the name"),
        ({"dense": None}, TypeError, "dense must be the name of an attention implementation, got None"),
        (
            {"implementation": "fast"},
            ValueError,
            "unknown MoBA implementation 'fast': choose 'auto' or one of 'reference', 'torch', 'flash', 'triton'",
        ),
        ({"implementation": None}, TypeError, "unknown MoBA implementation None: choose 'auto' or one of 'reference'"),
        ({"top_k": (2, 0)}, ValueError, "top_k must be an integer >= 1, got 0"),
        ({"top_k": (2, "3")}, TypeError, "top_k must be an integer >= 1, got '3'"),
        ({"block_size": ()}, ValueError, "block_size must have one integer >= 1 for each layer"),
    ],
)
def test_bad_config(change, error, message):
    with pytest.raises(error, match=message):
        MoBAConfig(**change)


def test_implementations(monkeypatch):
    assert choose_implementation() == choose_implementation("auto", "cuda") == "torch"
    assert choose_implementation("auto", "cpu", torch.bfloat16) == "torch"
    monkeypatch.setattr(flash_implementation, "is_available", lambda device: device.type == "cuda")
    assert choose_implementation("auto", "cuda", torch.bfloat16) == "flash"
    assert choose_implementation("auto", "cuda") == choose_implementation("auto", "cpu", torch.bfloat16) == "torch"
    assert [choose_implementation(name) for name in IMPLEMENTATIONS] == list(IMPLEMENTATIONS)
    x = torch.randn(9, 2, 4)
    auto, chosen = (moba_attn_varlen(x, x, x, None, None, 4, 2, implementation=name) for name in ("auto", "torch"))
    assert torch.equal(auto, chosen)
    for name, error in (("fast", ValueError), (None, TypeError)):
        with pytest.raises(error, match="choose 'auto' or one of 'reference', 'torch'"):
            moba_attn_varlen(x, x, x, None, None, 4, 2, implementation=name)


def bad(change):
    q, k, v = torch.randn(20, 4, 6), torch.randn(20, 2, 6), torch.randn(20, 2, 5)
    cu, longest, block_size, top_k, settings = torch.tensor([0, 5, 20]), None, 4, 2, {}
    if change == "rank":
        q = q[None]
    if change == "tokens":
        v = v[1:]
    if change == "queries":
        q = q[1:]
    if change == "widths":
        k = k[..., 1:]
    if change == "heads":
        k, v = torch.randn(20, 3, 6), torch.randn(20, 3, 5)
    if change == "no heads":
        q = q[:, :0]
    if change == "dtypes":
        v = v.bfloat16()
    if change == "integers":
        q, k, v = q.long(), k.long(), v.long()
    if change == "array":
        k = k.numpy()
    if change == "device":
        k = k.to("meta")
    if change == "cu dtype":
        cu = cu.float()
    if change == "cu list":
        cu = [0, 5, 20]
    if change == "cu end":
        cu = torch.tensor([0, 5, 19])
    if change == "cu start":
        cu = torch.tensor([1, 20])
    if change == "cu order":
        cu = torch.tensor([0, 9, 5, 20])
    if change == "cu empty":
        cu = cu[:0]
    if change == "max_seqlen":
        longest = 14
    if change == "only queries":
        cu, settings = None, {"cu_seqlens_q": cu}
    if change == "documents":
        settings["cu_seqlens_q"] = torch.tensor([0, 20])
    if change == "too many queries":
        settings["cu_seqlens_q"] = torch.tensor([0, 6, 20])
    if change == "more queries than keys":
        cu, k, v = None, k[:7], v[:7]
    if change == "block size":
        block_size = 0
    if change == "top-k":
        top_k = 1.5
    return (q, k, v, cu, longest, block_size, top_k), settings


@pytest.mark.parametrize("implementation", ["reference", "torch"])
@pytest.mark.parametrize(
    "change,message",
    [
        ("rank", "q must be .*got q .1, 20, 4, 6.*flatten a batch"),
        ("tokens", "q must be"),
        ("queries", "got 19 queries and 20 keys: pass cu_seqlens_q"),
        ("widths", "q must be"),
        ("heads", "query heads must be a multiple of the number of KV heads, got q .20, 4, 6., k .20, 3, 6."),
        ("no heads", "q must be"),
        ("dtypes", "one dtype, .* got q torch.float32, k torch.float32, v torch.bfloat16"),
        ("integers", "one dtype"),
        ("array", "k must be a tensor, got ndarray"),
        ("device", "one device, got q cpu, k meta, v cpu"),
        ("cu dtype", "cu_seqlens must be an int32 or int64 tensor .*got torch.float32 .3,."),
        ("cu list", "cu_seqlens must be an int32 or int64 tensor .*got list"),
        ("cu end", "cu_seqlens must rise from 0 to the number of tokens, 20, got .0, 5, 19."),
        ("cu start", "must rise from 0"),
        ("cu order", "must rise from 0"),
        ("cu empty", "must rise from 0"),
        ("max_seqlen", "max_seqlen is 14, but a document of cu_seqlens has 15 tokens"),
        ("only queries", "cu_seqlens_q was given without cu_seqlens"),
        ("documents", "the same documents, got 1 and 2"),
        ("too many queries", "document 0..5 has 6 queries but 5 keys"),
        ("more queries than keys", "document 0..7 has 20 queries but 7 keys"),
        ("block size", "moba_chunk_size must be an integer >= 1, got 0"),
        ("top-k", "moba_topk must be an integer >= 1, got 1.5"),
    ],
)
def test_bad_input(change, message, implementation):
    args, settings = bad(change)
    error = TypeError if change in ("array", "cu list", "top-k") else ValueError
    with pytest.raises(error, match=message):
        moba_attn_varlen(*args, **settings, implementation=implementation)
    if change not in ("tokens", "dtypes", "max_seqlen"):
        q, k, _, cu, _, block_size, top_k = args
        message = message.replace("moba_chunk_size", "block_size").replace("moba_topk", "top_k").replace(", v cpu", "")
        with pytest.raises(error, match=message):
            moba_select(q, k, cu, block_size, top_k, **settings)


def test_good_input_is_what_bad_input_changes():
    args, settings = bad(None)
    assert moba_attn_varlen(*args, **settings).shape == (20, 4, 5)


def test_bad_batches():
    x = torch.randn(2, 9, 2, 4)
    for q, k in ((x[0], x), (x, x[:1])):
        with pytest.raises(ValueError, match="must be .batch, tokens, heads, width. of one batch"):
            moba_attention(q, k, k, 4, 2)
    with pytest.raises(ValueError, match="each row has 9 queries but 5 keys"):
        moba_attention(x, x[:, :5], x[:, :5], 4, 2)
    with pytest.raises(ValueError, match="^block_size must be an integer >= 1, got 0"):
        moba_attention(x, x, x, 0, 2)
    with pytest.raises(TypeError, match="^top_k must be an integer >= 1, got '2'"):
        moba_attention(x, x, x, 4, "2")
    with pytest.raises(TypeError, match="^v must be a tensor, got NoneType"):
        moba_attention(x, x, None, 4, 2)


def test_benchmark_runs(monkeypatch, capsys):
    script = Path(__file__).parents[2] / "benchmarks" / "moba.py"
    spec = importlib.util.spec_from_file_location("moba_benchmark", script)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    options = ["--block-size", "32", "--threads", str(torch.get_num_threads()), "--pairs", "1", "--no-memory", "--json"]
    monkeypatch.setattr(sys, "argv", ["moba.py", "--tokens", "300", "500", *options])
    benchmark.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["tokens"] for row in rows] == [300, 500] and rows[0]["ms"][options[3]]["pairs"] == 1

    command = [sys.executable, script, "--tokens", "4096", "--block-size", "64", "--memory-of", "moba"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 28 <= float(done.stdout) < 80  # seven tensors of 4 MiB are inputs and gradients


@pytest.mark.parametrize("boundaries", [None, [0, 30, 30, 47, 60, 90, 120]])
@pytest.mark.parametrize("first,T", [(0, 60), (0, 17), (13, 31), (37, 23), (59, 1), (20, 0)])
def test_some_queries_of_whole_rows(first, T, boundaries):
    """They equal rows of the result for all queries. Documents begin and end inside and outside of the queries."""
    torch.manual_seed(0)
    B, S = 2, 60
    q, k, v = (torch.randn(B, S, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    cu = None if boundaries is None else torch.tensor(boundaries)
    mine, grad = slice(first, first + T), torch.randn(B, T, 4, 8, dtype=torch.float64)
    whole = moba_attention(q, k, v, 7, 2, cu_seqlens=cu)[:, mine]
    part = moba_attention(q[:, mine], k, v, 7, 2, cu_seqlens=cu, first_query=first)
    torch.testing.assert_close(part, whole, rtol=0, atol=1e-12)
    if T:
        for got, want in zip(*(torch.autograd.grad(x, (q, k, v), grad) for x in (part, whole)), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_bad_rows():
    x = torch.randn(2, 10, 2, 8)
    with pytest.raises(ValueError, match="queries 8..12 are not among 10 keys: see first_query"):
        moba_attention(x[:, :4], x, x, 4, 2, first_query=8)
    with pytest.raises(ValueError, match="cu_seqlens must begin a document at each row of 10 tokens"):
        moba_attention(x[:, :4], x, x, 4, 2, cu_seqlens=torch.tensor([0, 15, 20]))
    with pytest.raises(TypeError, match="cu_seqlens must be an int32 or int64 tensor"):
        moba_attention(x, x, x, 4, 2, cu_seqlens=[0, 10, 20])
