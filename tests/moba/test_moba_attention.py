"""Exactness: the oracle equals the definition, and "torch" equals the oracle, at odd sizes."""

import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from moba_cases import check_exact, inputs, matrix, product, random_case, run, seeds

from ds_mla_ulysses.moba import (
    api,
    dense_attention,
    moba_attention,
    moba_attn_varlen,
    moba_select,
    torch_implementation,
)
from ds_mla_ulysses.moba.reference import reference_attention


def by_definition(q, k, v, block_size, top_k, scale):
    """Computes one document, one query and head at a time."""
    S, (T, H, _) = k.shape[0], q.shape
    out = torch.zeros(T, H, v.shape[-1], dtype=q.dtype)
    for t, h in itertools.product(range(T), range(H)):
        position, g = S - T + t, h * k.shape[1] // H
        current = position // block_size
        scores = [float(q[t, h] @ k[n * block_size : (n + 1) * block_size, g].mean(0)) for n in range(current)]
        picked = sorted(range(current), key=lambda n: (-scores[n], n))[: top_k - 1]
        keys = [s for s in range(position + 1) if s // block_size in (*picked, current)]
        weights = [math.exp(scale * float(q[t, h] @ k[s, g])) for s in keys]
        out[t, h] = sum(w * v[s, g] for w, s in zip(weights, keys, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize(
    "T,S,H,G,block_size,top_k", [(23, 23, 2, 1, 4, 3), (5, 23, 2, 2, 4, 2), (23, 23, 1, 1, 1, 4), (9, 9, 1, 1, 4, 1)]
)
@pytest.mark.parametrize("implementation", ["reference", "torch"])
def test_the_definition(implementation, T, S, H, G, block_size, top_k):
    qkv = [x.detach() for x in inputs(S, H, G, 3, 2, T)]
    out = moba_attn_varlen(*qkv, None, S, block_size, top_k, scale=0.7, implementation=implementation)
    torch.testing.assert_close(out, by_definition(*qkv, block_size, top_k, 0.7), rtol=0, atol=1e-12)


@product(S=[1, 61, 128, 251], top_k=[1, 2, 3, 5], block_size=[1, 5, 16, 60, 64, 128])
def test_odd_sizes(S, block_size, top_k):
    check_exact(inputs(S, 2, 1, 8, seed=S + block_size), None, block_size, top_k)


@pytest.mark.parametrize(
    "S,block_size,top_k",
    [
        (700, 300, 2),
        pytest.param(1537, 512, 2, marks=matrix),
        (1300, 257, 3),
        pytest.param(2200, 1025, 2, marks=matrix),
    ],
)
def test_blocks_that_are_halved(S, block_size, top_k):
    check_exact(inputs(S, 1, 1, 4), None, block_size, top_k)


def test_routed_calls_of_several_tiles():
    check_exact(inputs(700, 8, 1, 4), None, 50, 4)  # up to 5600 rows of one KV head pick a block


@seeds(12, kept=6)
def test_documents(seed):
    """Random documents, also empty ones, with all queries or only the last ones, grouped heads and unequal widths."""
    qkv, cu, block_size, top_k, settings = random_case(seed)
    check_exact(qkv, cu, block_size, top_k, **settings)


def test_nothing():
    for cu in (None, torch.tensor([0]), torch.tensor([0, 0])):
        q, k, v = (torch.randn(0, 2, 4, requires_grad=True) for _ in range(3))
        out = moba_attn_varlen(q, k, v, cu, 0, 4, 2)
        out.sum().backward()
        assert out.shape == q.grad.shape == k.grad.shape == (0, 2, 4)
    q, k, v = torch.randn(0, 2, 4, requires_grad=True), *torch.randn(2, 30, 2, 4).unbind()
    assert moba_attn_varlen(q, k, v, None, 30, 4, 2).shape == (0, 2, 4)
    assert moba_select(k, k, torch.tensor([0, 30]), 4, 1).shape == (30, 2, 0)


@pytest.mark.parametrize("layout", ["tokens", "heads"])
@pytest.mark.parametrize("T", [75, 20, 1])
def test_batches_are_documents(T, layout):
    """Each row equals its result alone, for [B, tokens, heads, width] and for views of [B, heads, tokens, width]."""
    torch.manual_seed(0)
    tokens = [torch.randn(3, n, heads, 8, dtype=torch.float64) for n, heads in ((T, 4), (75, 2), (75, 2))]
    if layout == "heads":
        tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens]
    out = moba_attention(*tokens, 16, 2, scale=0.4)
    assert out.is_contiguous()
    for b in range(3):
        want = check_exact([x[b].clone().requires_grad_() for x in tokens], None, 16, 2, scale=0.4)
        torch.testing.assert_close(out[b], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(moba_attention(*(x[b : b + 1] for x in tokens), 16, 2, scale=0.4)[0], want)


def test_strides_and_gradients_without_strides():
    buffer = torch.randn(90, 100, dtype=torch.float64)
    parts = [buffer[:, a:b].unflatten(1, (2, -1)).requires_grad_() for a, b in ((0, 24), (30, 54), (60, 84))]
    odd = [torch.randn(2, 12, 90, dtype=torch.float64).permute(2, 0, 1).requires_grad_() for _ in range(3)]
    for qkv in (parts, odd):
        got, want = (
            torch.autograd.grad(moba_attn_varlen(*qkv, None, None, 16, 2, implementation=name).sum(), qkv)
            for name in ("torch", "reference")
        )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def errors(got, want):
    """Returns relative root mean square errors."""
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]


@product(dtype=[torch.bfloat16, torch.float16, torch.float32], sizes=[(700, 50, 4), (900, 300, 2), (800, 16, 30)])
def test_rounding(dtype, sizes, monkeypatch):
    """The error is little more than that of dense attention, however many partial results are summed."""
    S, block_size, top_k = sizes
    qkv = inputs(S, 4, 2, 32, dtype=dtype)
    blocks = moba_select(*qkv[:2], None, block_size, top_k)
    wide = [x.detach().double().requires_grad_() for x in qkv]
    dense = errors(run(qkv, None, S, 1), run(wide, None, S, 1))
    # Rounded means choose other blocks if scores nearly tie, so the reference is given the same blocks.
    monkeypatch.setattr(api, "reference_attention", functools.partial(reference_attention, blocks_THJ=blocks))
    found = errors(run(qkv, None, block_size, top_k), run(wide, None, block_size, top_k, implementation="reference"))
    assert all(0 < mine <= 1.4 * theirs for mine, theirs in zip(found, dense, strict=True)), (found, dense)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=matrix), torch.bfloat16])
def test_two_runs_give_the_same_bits(dtype):
    torch.set_num_threads(2)
    qkv = inputs(700, 4, 1, 32, dtype=dtype)
    first = run(qkv, torch.tensor([0, 200, 700]), 50, 4)
    for _ in range(3):
        assert all(map(torch.equal, run(qkv, torch.tensor([0, 200, 700]), 50, 4), first))


@pytest.mark.parametrize("cu", [None, [0, 40, 40, 131, 200]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_that_top_k_blocks_cover_are_dense(cu, dtype):
    """The results are bit for bit those of SDPA's flash operator."""
    qkv = inputs(200, 4, 2, dtype=dtype)
    block_size = 50 if cu is None else 23
    got = run(qkv, None if cu is None else torch.tensor(cu), block_size, 4)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(qkv[0].shape, generator=generator, dtype=torch.float64).to(dtype)
    for a, b in itertools.pairwise(cu or [0, 200]):
        if a == b:
            continue
        parts = [x.detach()[None, a:b].transpose(1, 2).requires_grad_() for x in qkv]
        out = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        want = [out, *torch.autograd.grad(out, parts, grad[None, a:b].transpose(1, 2))]
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x[a:b], y[0].transpose(0, 1))


def test_key_value_heads_are_not_copied(monkeypatch):
    q, k, v = (x.detach() for x in inputs(300, 6, 2))
    seen, attend = [], torch_implementation.attend

    def watched(q_, k_, v_, *settings):
        seen.append((k_, v_))
        return attend(q_, k_, v_, *settings)

    monkeypatch.setattr(torch_implementation, "attend", watched)
    moba_attn_varlen(q, k, v, None, None, 32, 3)
    assert len(seen) > 10
    for k_, v_ in seen:
        assert k_.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        assert v_.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()


def test_cu_seqlens_may_change_before_backward():
    q, k, v = qkv = inputs(128)
    cu = torch.tensor([0, 64, 128])
    want = run(qkv, cu.clone(), 16, 2)
    out = moba_attn_varlen(q, k, v, cu, None, 16, 2)
    cu[1] = 96
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert all(map(torch.equal, torch.autograd.grad(out, qkv, grad), want[1:]))


def test_autocast_changes_nothing():
    qkv = inputs(200, dtype=torch.float32)
    want, blocks = run(qkv, None, 16, 3), moba_select(*qkv[:2], None, 16, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, run(qkv, None, 16, 3), want))
        assert torch.equal(moba_select(*qkv[:2], None, 16, 3), blocks)


def test_compiles_to_one_graph():
    qkv, cu = inputs(120, 4, 2), torch.tensor([0, 50, 120])
    want = run(qkv, cu, 16, 2)
    step = torch.compile(lambda *x: moba_attn_varlen(*x, None, 16, 2), backend="aot_eager", fullgraph=True)
    out = step(*qkv, cu)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for x, y in zip([out, *torch.autograd.grad(out, qkv, grad)], want, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def plain(monkeypatch):
    """Runs as on a device without the flash operator, in many tiles."""
    for module in (api, dense_attention):
        monkeypatch.setattr(module, "has_flash", lambda device: False)
    monkeypatch.setattr(dense_attention, "_TILE_SCORES", 5000)


@pytest.mark.parametrize("T,S,H,G,K,V,block_size,top_k", [(150, 150, 4, 2, 8, 5, 16, 3), (31, 150, 2, 2, 5, 8, 33, 2)])
def test_plain_matmuls(plain, T, S, H, G, K, V, block_size, top_k):
    check_exact(inputs(S, H, G, K, V, T), None, block_size, top_k)
    check_exact(inputs(S, H, G, K, V, T), None, S, 1)


def test_plain_matmuls_in_bf16(plain):
    qkv = inputs(150, 4, 2, dtype=torch.bfloat16)
    want = run([x.detach().double().requires_grad_() for x in qkv], None, 150, 1)
    for x, y in zip(run(qkv, torch.tensor([0, 150]), 150, 1), want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2**-7, atol=2**-7)


def test_without_the_operator_dense_is_sdpa(plain, monkeypatch):
    qkv = inputs(100, 4, 2, 8, 5)
    want = run(qkv, None, 25, 4, implementation="reference")
    monkeypatch.setattr(torch_implementation, "attend", None)
    for x, y in zip(run(qkv, None, 25, 4), want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
