"""Inputs of MoBA tests, and the outputs and gradients that they compare."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from ds_mla_ulysses.moba import moba_attn_varlen

matrix = pytest.mark.matrix


def product(**axes):
    """Parametrizes a test with the product of all axes, most of it under the marker `matrix`.

    Unmarked are cases that together contain every pair of values of two axes, or every value if there are two axes.
    """
    cases = list(itertools.product(*axes.values()))
    strength = min(2, len(axes) - 1)

    def kinds(case):
        return set(itertools.combinations(enumerate(case), strength))

    missing, kept = set().union(*map(kinds, cases)), []
    while missing:
        best = max(cases, key=lambda case: len(kinds(case) & missing))
        missing -= kinds(best)
        kept.append(best)
    values = [pytest.param(*case, marks=() if case in kept else matrix) for case in cases]
    return pytest.mark.parametrize(",".join(axes), values)


def seeds(count, kept):
    """Parametrizes a test with `count` seeds, those from `kept` on under the marker `matrix`."""
    return pytest.mark.parametrize("seed", [pytest.param(i, marks=() if i < kept else matrix) for i in range(count)])


def inputs(S, H=2, G=None, K=16, V=None, T=None, dtype=torch.float64, seed=0):
    """Returns q [T, H, K], k [S, G, K] and v [S, G, V], normally distributed, requiring gradients."""
    torch.manual_seed(seed)
    shapes = (T or S, H, K), (S, G or H, K), (S, G or H, V or K)
    return [torch.randn(s, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def run(qkv, cu_seqlens, block_size, top_k, **settings):
    """Returns [out, dq, dk, dv] for a gradient that depends on the shape only."""
    out = moba_attn_varlen(*qkv, cu_seqlens, None, block_size, top_k, **settings)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def check_exact(qkv, cu_seqlens, block_size, top_k, **settings):
    """Checks in fp64 that the output and all gradients equal those of the oracle. Returns the output."""
    got, want = (
        run(qkv, cu_seqlens, block_size, top_k, implementation=name, **settings) for name in ("torch", "reference")
    )
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
    return got[0]


def random_documents(generator, documents, longest):
    """Returns the cu_seqlens of documents with 0 to `longest` tokens."""
    lengths = torch.randint(0, longest + 1, (documents,), generator=generator)
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()


def random_case(seed):
    """Returns (qkv, cu_seqlens, block_size, top_k, settings) for random documents with all queries or the last ones."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*values):
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    cu = random_documents(generator, pick(1, 3, 7), pick(20, 90, 150))
    block_size, top_k, (H, G) = pick(1, 7, 16, 33), pick(1, 2, 3, 4), pick((2, 2), (4, 2), (6, 3), (3, 1))
    settings, queries = {"scale": pick(None, 0.05, 1.3)}, cu
    if seed % 2:
        lengths = (torch.rand(len(cu) - 1, generator=generator) * (cu.diff() + 1)).int()
        queries = settings["cu_seqlens_q"] = F.pad(lengths.cumsum(0), (1, 0))
    torch.manual_seed(seed)
    S, T = int(cu[-1]), int(queries[-1])
    K, V = pick((5, 5), (24, 16), (6, 9))
    shapes = (T, H, K), (S, G, K), (S, G, V)
    qkv = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    return qkv, cu, block_size, top_k, settings
