"""The kernels of the implementation "triton".

They run on a GPU if there is one, and otherwise in Triton's interpreter. It takes about a millisecond per program, so
all inputs are small.

The oracle is given the blocks that the kernels picked; the gate has its own tests. The tolerance is a multiple of the
error of the implementation "torch" for the same blocks in the same dtype.
"""

import importlib
import importlib.util
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from moba_cases import inputs, matrix, random_documents, run

from ds_mla_ulysses.moba import moba_attention, moba_attn_varlen, torch_implementation
from ds_mla_ulysses.moba import triton_implementation as host
from ds_mla_ulysses.moba.boundaries import Document, read_documents
from ds_mla_ulysses.moba.reference import chosen_blocks, reference_attention

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
#: The multiple. "triton" adds in another order, and in 16 bits it rounds weights at another place.
FACTOR = 4
NAMES = "out", "dq", "dk", "dv"


def interpreted(module):
    from triton import JITFunction

    return not any(isinstance(x, JITFunction) for x in vars(module).values())


def matmul(a, b, dtype=None):
    """Sums each element of the result in the same order, as tensor cores do. On some CPUs, numpy's BLAS does not."""
    return np.einsum("xk,ky->xy", a.astype(dtype), b.astype(dtype))


def reload_language():
    """Defines Triton's functions again, because Triton decides at their definition whether to interpret them."""
    language = importlib.import_module("triton.language")
    importlib.reload(language.standard)
    importlib.reload(language)


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """The module with the kernels, interpreted if there is no GPU. Afterwards everything is as before."""
    name = "ds_mla_ulysses.moba.triton_kernels"
    if GPU:
        yield importlib.import_module(name)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.delitem(sys.modules, name, raising=False)
        late = not interpreted(importlib.import_module("triton.language.standard"))
        if late:
            reload_language()
        from triton.runtime import interpreter

        patch.setattr(interpreter, "np", SimpleNamespace(**vars(interpreter.np) | {"matmul": matmul}))
        yield importlib.import_module(name)
        sys.modules.pop(name)
    if late:
        reload_language()


@pytest.fixture(autouse=True)
def poison():
    """Fills new memory with NaN, so that values that were never written are found."""
    torch.use_deterministic_algorithms(True, warn_only=GPU)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_tiles(monkeypatch):
    """Makes several tiles per block, the last of them partial."""
    for name in ("_forward_sizes", "_backward_sizes"):
        monkeypatch.setattr(host, name, lambda *args: host._Sizes(32, 16, {}))


def on(device, qkv, dtype=None):
    return [x.detach().to(device, dtype).requires_grad_() for x in qkv]


def gradient(out):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.device, out.dtype)


def results(qkv, cu, block_size, top_k, **settings):
    """Returns [out, dq, dk, dv] of the kernels, and the blocks that they picked, all on the CPU."""
    qkv = on(DEVICE, qkv)
    out = moba_attn_varlen(*qkv, cu, None, block_size, top_k, implementation="triton", **settings)
    blocks = out.grad_fn.saved_tensors[5]
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, qkv, gradient(out)))], blocks.cpu()


def oracle(qkv, cu, block_size, top_k, blocks, cu_seqlens_q=None, scale=None):
    """Returns the same in fp64 for given blocks."""
    q, k, v = on("cpu", qkv, torch.float64)
    cu_k = torch.tensor([0, len(k)]) if cu is None else cu
    cu_q = torch.tensor([0, len(q)]) if cu is None else cu if cu_seqlens_q is None else cu_seqlens_q
    documents = read_documents(cu_q, cu_k, len(q), len(k))
    blocks = blocks.clone() if blocks.shape[-1] else torch.full((*q.shape[:2], top_k - 1), -1)
    for doc in documents:
        if doc.is_dense(block_size, top_k):  # no block was picked, since all past blocks are visible
            blocks[doc.q : doc.q + doc.queries] = torch.arange(top_k - 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = reference_attention(q, k, v, documents, block_size, top_k, scale, blocks)
    grad = gradient(out.to(qkv[0].dtype)).double()
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def check(monkeypatch, qkv, cu, block_size, top_k, **settings):
    got, blocks = results(qkv, cu, block_size, top_k, **settings)
    want = oracle(qkv, cu, block_size, top_k, blocks, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(torch_implementation, "select_blocks", lambda *args: blocks)
        usual = run(on("cpu", qkv), cu, block_size, top_k, implementation="torch", **settings)
    # Gradients may be zero because large terms cancel.
    rounding = torch.finfo(got[0].dtype).eps * max([y.abs().max() for y in want if y.numel()], default=0)
    for name, x, y, z in zip(NAMES, got, want, usual, strict=True):
        assert x.dtype == qkv[0].dtype and x.shape == y.shape, name
        assert x.isfinite().all(), name
        if x.numel():
            usual_error = (z - y).abs().max()
            assert usual_error <= 32 * rounding, f"{name}: the error of 'torch' itself is {usual_error:.1e}"
            budget = FACTOR * usual_error + rounding
            assert (x - y).abs().max() <= budget, f"{name}: {(x - y).abs().max():.1e} of {budget:.1e}"
    return got


# Numbers.


@pytest.mark.parametrize(
    "S,block_size,top_k",
    [
        (1, 1, 1),
        pytest.param(61, 5, 3, marks=matrix),
        pytest.param(128, 16, 2, marks=matrix),
        (251, 60, 3),
        pytest.param(14, 1, 5, marks=matrix),
        pytest.param(200, 64, 1, marks=matrix),
        (50, 16, 40),
    ],
)
def test_odd_sizes(S, block_size, top_k, monkeypatch):
    check(monkeypatch, inputs(S, 2, 1, 8, dtype=torch.float32, seed=S), None, block_size, top_k)


@pytest.mark.parametrize(
    "S,block_size,top_k,H,G",
    [pytest.param(110, 50, 2, 2, 1, marks=matrix), (70, 40, 2, 3, 1), (80, 80, 1, 2, 2)],
)
def test_tiles(S, block_size, top_k, H, G, small_tiles, monkeypatch):
    check(monkeypatch, inputs(S, H, G, dtype=torch.float32), None, block_size, top_k)


@pytest.mark.parametrize(
    "K,V", [(192, 128), pytest.param(24, 16, marks=matrix), (80, 7), pytest.param(1, 40, marks=matrix)]
)
def test_widths(K, V, monkeypatch):
    """192 = 128 + 64 and 80 = 64 + 16 are divided. The other widths are padded."""
    check(monkeypatch, inputs(90, 2, 1, K, V, dtype=torch.float32), None, 16, 3)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=matrix), 1, 2, pytest.param(3, marks=matrix)])
def test_documents(seed, small_tiles, monkeypatch):
    """Random documents, also empty and dense ones, with all queries or only the last ones, and grouped heads."""
    generator = torch.Generator().manual_seed(seed)
    cu = random_documents(generator, [3, 4, 1, 3][seed], 60)
    block_size, top_k, (H, G) = [7, 16, 20][seed % 3], 2 + seed % 2, [(2, 2), (4, 2), (3, 1), (2, 1)][seed]
    settings, T = {"scale": [None, 0.05, 1.3][seed % 3]}, int(cu[-1])
    if seed % 2:
        lengths = (torch.rand(len(cu) - 1, generator=generator) * (cu.diff() + 1)).int()
        settings["cu_seqlens_q"] = F.pad(lengths.cumsum(0), (1, 0))
        T = int(lengths.sum())
    check(monkeypatch, inputs(int(cu[-1]), H, G, T=T, dtype=torch.float32), cu, block_size, top_k, **settings)


@pytest.mark.parametrize("dtype", [torch.float16, *[torch.bfloat16] * GPU])
@pytest.mark.parametrize("K,V", [pytest.param(64, 64, marks=matrix), (192, 128)])
def test_16_bits(K, V, dtype, monkeypatch):
    check(monkeypatch, inputs(110, 4, 2, K, V, dtype=dtype), torch.tensor([0, 20, 110]), 25, 3)


def test_strides(monkeypatch):
    """Views of one buffer, and the gradient of a sum, whose strides are 0."""
    buffer = torch.randn(60, 3, 2, 24, generator=torch.Generator().manual_seed(0))
    views = [x.requires_grad_() for x in buffer.to(DEVICE).unbind(1)]
    copies = [x.detach().clone().requires_grad_() for x in views]
    for name in ("views", "copies"):
        qkv = locals()[name]
        out = moba_attn_varlen(*qkv, None, None, 16, 2, implementation="triton")
        grads = torch.autograd.grad(out.sum(), qkv)
        assert all(x.isfinite().all() for x in grads)
        if name == "views":
            want = out, *grads
    assert all(map(torch.equal, want, (out, *grads)))
    check(monkeypatch, [x.detach() for x in views], None, 16, 2)


def test_nothing():
    for T, S, cu in ((0, 0, [0, 0]), (0, 30, [0, 0])):
        qkv = on(DEVICE, inputs(S, T=T, dtype=torch.float32) if T else [torch.randn(n, 2, 16) for n in (T, S, S)])
        boundaries = torch.tensor([0, S]), torch.tensor(cu)
        out = moba_attn_varlen(*qkv, boundaries[0], S, 4, 2, cu_seqlens_q=boundaries[1], implementation="triton")
        grads = torch.autograd.grad(out.sum(), qkv)
        assert [x.shape for x in grads] == [x.shape for x in qkv] and not any(x.any() for x in grads)


def test_keys_of_documents_without_queries():
    """They belong to no segment, but their gradient must be zero."""
    qkv, cu = inputs(80, T=30, dtype=torch.float32), torch.tensor([0, 40, 80])
    (_, _, dk, dv), _ = results(qkv, cu, 8, 2, cu_seqlens_q=torch.tensor([0, 0, 30]))
    assert not dk[:40].any() and not dv[:40].any() and dk[40:].any() and dv[40:].any()


@pytest.mark.skipif(GPU, reason="takes 13 GB of a GPU")
@pytest.mark.parametrize("block_size", [8, pytest.param(33, marks=matrix)])
def test_far_apart_tokens(block_size):
    """Offsets beyond 32 bits. Memory that is never touched takes no space."""
    torch.use_deterministic_algorithms(False)  # they would fill the memory
    stride = 2**26 + 8
    assert 32 * stride > 2**31
    near = [x.detach() for x in inputs(33, 1, dtype=torch.float16)]
    views = (torch.empty(32 * stride + 16, dtype=torch.float16).as_strided(x.shape, (stride, 16, 1)) for x in near)
    far = [view.copy_(x) for view, x in zip(views, near, strict=True)]
    got, want = [], []
    for qkv, to in ((far, got), (near, want)):
        for x in qkv:
            x.requires_grad_()
        out = moba_attn_varlen(*qkv, None, None, block_size, 2, implementation="triton")
        to.extend([out, *torch.autograd.grad(out, qkv, gradient(out))])
    assert all(map(torch.equal, got, want))


@pytest.mark.skipif(GPU, reason="a compiled kernel does not read the constant again")
def test_an_error_of_1e_5_is_seen(kernels, monkeypatch):
    qkv = inputs(60, 2, 1, dtype=torch.float32)
    check(monkeypatch, qkv, None, 16, 2)
    monkeypatch.setattr(kernels, "_LOG2E", type(kernels._LOG2E)(kernels._LOG2E.value * 1.00001))
    with pytest.raises(AssertionError, match="out: .*e-0[56] of .*e-0[67]"):
        check(monkeypatch, qkv, None, 16, 2)


# The same bits.


def test_two_runs_give_the_same_bits(small_tiles):
    qkv = inputs(70, 4, 1, dtype=torch.float16)
    first, second = (results(qkv, torch.tensor([0, 20, 70]), 16, 3)[0] for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("tokens,portions", [pytest.param(140, 2, marks=matrix), (30, 9)])
def test_portions(tokens, portions, monkeypatch):
    """Portions of heads change no bit. Portions of queries change only the order in which dk and dv are added."""
    qkv, cu = inputs(70, 3, 3, dtype=torch.float32), torch.tensor([0, 13, 70])
    whole = results(qkv, cu, 16, 3)[0]
    monkeypatch.setattr(host, "_PART_BYTES", tokens * 2 * 4 * 16)
    segments = host._Segments.of(read_documents(cu, cu, 70, 70), 16, 3)
    assert len(list(segments.portions(*qkv[:2], 2, 16))) == portions
    divided = check(monkeypatch, qkv, cu, 16, 3)
    assert all(map(torch.equal, divided[: 4 if tokens > 70 else 2], whole))


def test_portions_of_grouped_heads(monkeypatch):
    monkeypatch.setattr(host, "_PART_BYTES", 40 * 2 * 4 * 16)
    check(monkeypatch, inputs(90, 4, 2, dtype=torch.float32, T=70), None, 30, 2)


# The gate.


def select(q, k, documents, block_size, places):
    top_k = places + 1
    segments = host._Segments.of(documents, block_size, top_k)
    return host._select(
        host._kernels(), q.to(DEVICE), k.to(DEVICE), documents, segments, block_size, top_k, places
    ).cpu()


@pytest.mark.parametrize(
    "dtype,places", [pytest.param(torch.float32, 1, marks=matrix), (torch.float16, 2), (torch.float32, 5)]
)
def test_ties(dtype, places):
    """With small integers, scores are exact and most of them tie."""
    torch.manual_seed(0)
    q = torch.randint(-1, 2, (150, 4, 2)).to(dtype)
    k = torch.randint(-1, 2, (150, 2, 2)).to(dtype)
    got = select(q, k, [Document(0, 0, 20, 20), Document(20, 20, 130, 130)], 2, places)
    for rows in (slice(0, 20), slice(20, 150)):
        want = chosen_blocks(q[rows].float(), k[rows].float().repeat_interleave(2, 1), 0, 2, places + 1)
        assert torch.equal(got[rows], want.int())


def test_blocks_of_equal_means_tie():
    q, k = torch.randn(300, 2, 33), torch.randn(1, 2, 33).expand(300, 2, 33).contiguous()
    current = torch.arange(300)[:, None, None] // 3
    want = torch.arange(3).expand(300, 2, 3)
    assert torch.equal(select(q, k, [Document(0, 0, 300, 300)], 3, 3), want.masked_fill(want >= current, -1).int())


@pytest.mark.parametrize("dtype,K", [(torch.float32, 80), (torch.float16, 16), *[(torch.bfloat16, 64)] * GPU])
def test_picks_are_right_up_to_fp32_rounding(dtype, K):
    q, k, _ = (x.detach() for x in inputs(400, 2, 1, K, dtype=dtype))
    q = q[-130:]
    blocks = select(q, k, [Document(0, 0, 130, 400)], 5, 4)
    means = k.double().unflatten(0, (80, 5)).mean(1)
    scores = torch.einsum("thk,nk->thn", q.double(), means[:, 0])
    current = torch.arange(270, 400)[:, None] // 5
    competes = (torch.arange(80) < current)[:, None].expand_as(scores)
    assert (blocks >= 0).all() and (blocks < current[..., None]).all()
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, blocks.long(), True)
    assert (picked.sum(-1) == 4).all()
    worst = scores.masked_fill(~picked, float("inf")).amin(-1)
    best = scores.masked_fill(picked | ~competes, float("-inf")).amax(-1)
    assert (worst - best).min() >= -(2**-18) * scores.abs().max()
    ordered = scores.gather(-1, blocks.long())
    assert (ordered.diff(dim=-1) <= 2**-18 * scores.abs().max()).all()  # best first


def test_more_places_than_registers(monkeypatch):
    q, k, _ = (x.detach() for x in inputs(120, 2, 1, dtype=torch.float32))
    documents = [Document(0, 0, 120, 120)]
    want = select(q, k, documents, 8, 3)
    monkeypatch.setattr(host, "_GATE_PLACES", 2)
    assert torch.equal(select(q, k, documents, 8, 3), want)


# Bugs that users of other implementations reported.


@pytest.mark.parametrize(
    "case",
    # The marked cases are also covered by other tests.
    [
        "k=1",
        pytest.param("changed in place", marks=matrix),
        pytest.param("heads", marks=matrix),
        "ties",
        "last",
        pytest.param("dense", marks=matrix),
        pytest.param("scale", marks=matrix),
        pytest.param("int64", marks=matrix),
    ],
)
def test_reports(case, monkeypatch):
    qkv, cu, block_size, top_k, settings = inputs(96, 2, 1, dtype=torch.float32), None, 24, 2, {}
    if case == "k=1":
        out = check(monkeypatch, qkv, None, block_size, 1)[0]
        parts = [x.detach().unflatten(0, (-1, block_size)).transpose(1, 2) for x in qkv]
        want = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(out, want, rtol=0, atol=5e-6)
        return
    if case == "changed in place":
        cu = torch.tensor([0, 48, 96])
        before = results(qkv, cu, 12, 2)[0][0]
        cu[1] = 24
        assert (check(monkeypatch, qkv, cu, 12, 2)[0] - before).abs().max() > 0.1
        return
    if case == "heads":
        qkv = inputs(96, 4, 2, dtype=torch.float32)
        out = check(monkeypatch, qkv, None, block_size, 3)[0]
        q, k, v = (x.detach() for x in qkv)
        repeated = results([q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)], None, block_size, 3)[0][0]
        torch.testing.assert_close(out, repeated, rtol=0, atol=5e-6)
        return
    if case == "ties":
        qkv[1] = qkv[1].detach()[:1].expand(96, 1, 16).contiguous()
    if case == "last":
        whole = check(monkeypatch, qkv, None, block_size, top_k)[0]
        q, k, v = on(DEVICE, qkv)
        for n in (30, 1):
            out = moba_attention(q[None, -n:], k[None], v[None], block_size, top_k, implementation="triton")
            torch.testing.assert_close(out[0].detach().cpu(), whole[-n:], rtol=0, atol=5e-6)
        return
    if case == "dense":
        top_k = 4
    if case == "scale":
        settings = {"scale": 0.05}
    if case == "int64":
        cu = torch.tensor([0, 40, 96], dtype=torch.int32)
        first, second = (results(qkv, x, block_size, top_k)[0] for x in (cu, cu.long()))
        assert all(map(torch.equal, first, second))
    check(monkeypatch, qkv, cu, block_size, top_k, **settings)


# Errors.


def refusal(dtype=torch.float32, device=DEVICE, width=16, tokens=8):
    x = torch.empty(1, 2, width, dtype=dtype, device=device).expand(tokens, -1, -1)
    with pytest.raises(ValueError, match="choose 'torch'") as error:
        host.check(x, x[:, :1], x[:, :1])
    return str(error.value)


def test_refusals(monkeypatch, kernels):
    assert "supports fp32, bf16 and fp16, got torch.float64" in refusal(torch.float64)
    assert "does not support heads of widths 2000 and 2000" in refusal(width=2000)
    assert "counts tokens, times the query heads of a KV head, in 32 bits" in refusal(tokens=2**30)
    assert "runs on CUDA devices" in refusal(device="meta")
    if not GPU:
        assert "is wrong in bf16: use fp32 or fp16" in refusal(torch.bfloat16)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert re.search("TRITON_INTERPRET=1 .* got tensors on cpu", refusal(device="cpu"))
    x = torch.randn(8, 2, 4)
    with pytest.raises(ValueError, match="runs on CUDA devices"):
        moba_attn_varlen(x, x, x, None, None, 4, 1, implementation="triton")
    monkeypatch.setattr(host.importlib, "util", SimpleNamespace(find_spec=lambda name: None))
    assert "needs the package triton" in refusal()


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_device = get_current_stream = lambda self, *args: 0
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Hopper())
run = JITFunction.run

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    print(self.fn.__name__, kernel.metadata.shared, kernel.asm["ptx"].count("wgmma.mma_async"))

JITFunction.run = compile_only
from ds_mla_ulysses.moba import triton_implementation as host
from ds_mla_ulysses.moba.boundaries import Document
q, k, v = (torch.zeros(256, heads, width, dtype=torch.bfloat16) for heads, width in ((4, 192), (2, 192), (2, 128)))
documents = [Document(0, 0, 256, 256)]
out, lse, blocks = host.forward(q, k, v, documents, 64, 3, 2, 0.1)
host.backward(out, q, k, v, out, lse, blocks, documents, 64, 3, 0.1)
"""


def test_kernels_compile_for_hopper(tmp_path):
    """At the widths of MLA in bf16, the kernels use tensor cores and fit into shared memory. This needs no GPU."""
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {name: (int(shared), int(dots)) for name, shared, dots in map(str.split, done.stdout.splitlines())}
    assert len(rows) == 8
    for name, (shared, dots) in rows.items():
        assert shared <= 227 * 1024, name
        assert (dots > 0) == (name not in ("pool", "row_products")), name
