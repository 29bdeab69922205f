"""Bugs that users of other implementations reported, with the inputs that show them, in fp32 as reported."""

import pytest
import torch
from moba_cases import check_exact, inputs, run

from ds_mla_ulysses.moba import moba_attention, moba_attn_varlen, moba_select


def fp32(S, H=2, G=None, K=16, V=None):
    torch.manual_seed(0)
    return [torch.randn(S, heads, width) for heads, width in ((H, K), (G or H, K), (G or H, V or K))]


def oracle(q, k, v, cu, block_size, top_k, **settings):
    wide = [x.detach().double() for x in (q, k, v)]
    return moba_attn_varlen(*wide, cu, None, block_size, top_k, implementation="reference", **settings)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-6)


def blockwise(q, k, v, block_size):
    """Computes causal attention within blocks."""
    parts = (x.double().unflatten(0, (-1, block_size)).transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    return out.transpose(1, 2).flatten(0, 1)


def test_top_k_1_is_attention_within_blocks():
    qkv = fp32(256)
    out = moba_attn_varlen(*qkv, None, 256, 64, 1)
    close(out, blockwise(*qkv, 64))
    assert (out - moba_attn_varlen(*qkv, None, 256, 256, 1)).abs().max() > 1  # which is not dense attention


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_current_block_counts(top_k):
    """A query attends to top_k blocks, including its current block."""
    q, k, _ = fp32(256)
    v = torch.eye(4).repeat_interleave(64, 0)[:, None].expand(256, 2, 4)  # each value names its block
    attended = (moba_attn_varlen(q, k, v.contiguous(), None, None, 64, top_k) > 0).sum(-1)
    assert torch.equal(attended, torch.arange(1, 5).clamp(max=top_k).repeat_interleave(64)[:, None].expand(256, 2))


def test_cu_seqlens_changed_in_place():
    qkv, cu = fp32(256), torch.tensor([0, 128, 256], dtype=torch.int32)
    before = moba_attn_varlen(*qkv, cu, None, 64, 2)
    close(before, oracle(*qkv, cu, 64, 2))
    cu[1] = 64
    after = moba_attn_varlen(*qkv, cu, None, 64, 2)
    close(after, oracle(*qkv, cu.clone(), 64, 2))
    assert (after - before).abs().max() > 0.1


@pytest.mark.parametrize("S", [256, 64])
def test_grouped_heads(S):
    q, k, v = fp32(S, 4, 2)
    out = moba_attn_varlen(q, k, v, None, None, 64, 3)
    repeated = [x.repeat_interleave(2, dim=1) for x in (k, v)]
    close(out, oracle(q, *repeated, None, 64, 3))
    close(moba_attn_varlen(q, *repeated, None, None, 64, 3), out.double())


@pytest.mark.parametrize("S,block_size,top_k", [(251, 60, 3), (40, 1, 5), (250, 63, 2), (13, 4, 2)])
def test_any_block_size(S, block_size, top_k):
    qkv = fp32(S)
    close(moba_attn_varlen(*qkv, None, None, block_size, top_k), oracle(*qkv, None, block_size, top_k))


def test_a_document_inside_padding():
    """If 40 tokens of left padding are a document, the real rows equal those of the 160 other tokens alone."""
    qkv = fp32(200)
    out = moba_attn_varlen(*qkv, torch.tensor([0, 40, 200]), None, 64, 2)
    close(out[40:], oracle(*(x[40:] for x in qkv), None, 64, 2))
    assert out.isfinite().all()


@pytest.mark.parametrize("first", [0, 1, 37, 64])
def test_blocks_restart_at_every_document(first):
    qkv = fp32(256)
    cu = torch.tensor([0, first, 256])
    close(moba_attn_varlen(*qkv, cu, None, 64, 2)[first:], oracle(*(x[first:] for x in qkv), None, 64, 2))


@pytest.mark.parametrize("top_k", [2, 3])
def test_equal_keys(top_k):
    """Exactly top_k blocks are attended to, and ties go to the earlier blocks."""
    q, k, _ = fp32(256)
    k = k[:1].expand(256, 2, 16)
    blocks = moba_select(q, k, None, 64, top_k)
    for n in range(4):
        want = [*range(min(n, top_k - 1)), *[-1] * (top_k - 1 - n)]
        assert torch.equal(blocks[64 * n : 64 * (n + 1)], torch.tensor(want).int().expand(64, 2, top_k - 1))


def test_the_last_queries_only():
    """The last 64, 1 and 100 of 256 queries give the same rows as all queries."""
    q, k, v = fp32(256)
    whole = oracle(q, k, v, None, 64, 2)
    for n in (64, 1, 100):
        close(moba_attn_varlen(q[-n:], k, v, None, None, 64, 2), whole[-n:])
        close(moba_attention(q[None, -n:], k[None], v[None], 64, 2)[0], whole[-n:])


def test_scale_is_applied():
    qkv = fp32(256)
    for scale in (0.05, 2.0):
        out = moba_attn_varlen(*qkv, None, None, 64, 2, scale=scale)
        close(out, oracle(*qkv, None, 64, 2, scale=scale))
        assert (out - moba_attn_varlen(*qkv, None, None, 64, 2)).abs().max() > 0.1
    close(moba_attn_varlen(*qkv, None, None, 64, 2), oracle(*qkv, None, 64, 2, scale=0.25))


@pytest.mark.parametrize("K,V", [(24, 16), (16, 24), (7, 1)])
def test_unequal_widths(K, V):
    qkv = fp32(256, K=K, V=V)
    close(moba_attn_varlen(*qkv, None, None, 64, 3), oracle(*qkv, None, 64, 3))
    check_exact(inputs(256, K=K, V=V), None, 64, 3)


def test_int64_cu_seqlens():
    qkv, cu = inputs(256), torch.tensor([0, 70, 256], dtype=torch.int32)
    assert all(map(torch.equal, run(qkv, cu, 64, 2), run(qkv, cu.long(), 64, 2)))
