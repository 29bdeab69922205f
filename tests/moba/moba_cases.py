"""Inputs of MoBA tests, and both sides' outputs and gradients."""

import torch

from ds_mla_ulysses.moba import moba_attn_varlen


def inputs(S, H=2, G=None, K=16, V=None, T=None, dtype=torch.float64, seed=0):
    """q [T, H, K], k [S, G, K], v [S, G, V], unit normal, with gradients."""
    torch.manual_seed(seed)
    shapes = (T or S, H, K), (S, G or H, K), (S, G or H, V or K)
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(qkv, cu_seqlens, block, topk, **settings):
    """[out, dq, dk, dv] for one gradient that depends on the shape only."""
    out = moba_attn_varlen(*qkv, cu_seqlens, None, block, topk, **settings)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def check_exact(qkv, cu_seqlens, block, topk, **settings):
    """fp64: forward and all gradients are the oracle's; returns the output."""
    got, want = (run(qkv, cu_seqlens, block, topk, implementation=name, **settings) for name in ("torch", "reference"))
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    return got[0]


def random_documents(generator, documents, longest):
    """cu_seqlens of documents of 0..longest tokens."""
    lengths = torch.randint(0, longest + 1, (documents,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
