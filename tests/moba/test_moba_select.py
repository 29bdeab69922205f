"""The gate: the picked blocks and their number, ties, precision and memory."""

import pytest
import torch
from moba_cases import inputs, product, random_documents
from torch.utils._python_dispatch import TorchDispatchMode

from ds_mla_ulysses.moba import moba_select, routing
from ds_mla_ulysses.moba.reference import chosen_blocks


def documents_of(cu, T):
    return [(a, b) for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False) if b > a]


def ordered(blocks_THJ):
    """Sorts the blocks in rising order, with -1 at the end."""
    none = blocks_THJ.shape[0] * 1000
    found = blocks_THJ.masked_fill(blocks_THJ < 0, none).sort(-1).values
    return found.masked_fill(found == none, -1).int()


def check_against_oracle(q, k, cu, block_size, top_k):
    got = moba_select(q, k, cu, block_size, top_k)
    assert got.dtype == torch.int32 and got.shape == (*q.shape[:2], top_k - 1)
    for a, b in documents_of(cu, len(q)):
        k_SHK = k[a:b].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        assert torch.equal(got[a:b], ordered(chosen_blocks(q[a:b], k_SHK, 0, block_size, top_k)))


@pytest.mark.parametrize("seed", range(8))
def test_the_oracle_picks_the_same(seed):
    generator = torch.Generator().manual_seed(seed)
    cu = random_documents(generator, 4, 200)
    H, G = [(2, 2), (4, 2), (3, 1), (6, 3)][seed % 4]
    q, k, _ = (x.detach() for x in inputs(int(cu[-1]), H, G, 9, seed=seed))
    check_against_oracle(q, k, cu, [1, 5, 16, 40][seed // 2], 2 + seed % 5)


@product(dtype=[torch.float64, torch.float32, torch.bfloat16], top_k=[2, 3, 6], tile=[16, 50, 1024])
def test_ties(dtype, top_k, tile, monkeypatch):
    """With small integers, scores are exact in any dtype and most of them tie."""
    monkeypatch.setattr(routing, "_TILE_QUERIES", (tile, tile))
    torch.manual_seed(0)
    q = torch.randint(-1, 2, (200, 4, 2)).to(dtype)
    k = torch.randint(-1, 2, (25, 2, 2)).repeat_interleave(8, 0).to(dtype)
    check_against_oracle(q, k, torch.tensor([0, 77, 200]), 8, top_k)


@pytest.mark.parametrize("S,block_size,H,D", [(256, 64, 2, 16), (1000, 7, 3, 33), (2048, 32, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_blocks_of_equal_means_tie_whatever_a_product_rounds(dtype, S, block_size, H, D):
    torch.manual_seed(0)
    q, k = torch.randn(S, H, D, dtype=dtype), torch.randn(1, H, D, dtype=dtype).expand(S, H, D)
    current = torch.arange(S)[:, None, None] // block_size
    want = torch.arange(3).expand(S, H, 3)
    assert torch.equal(moba_select(q, k, None, block_size, 4), want.masked_fill(want >= current, -1).int())


def margins(q, k, blocks, block_size):
    """Returns how far the worst picked score is above the best one not picked, in fp64, and the largest score."""
    N = k.shape[0] // block_size
    means = (
        k[: N * block_size]
        .double()
        .unflatten(0, (N, block_size))
        .mean(1)
        .repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    )
    scores = torch.einsum("thk,nhk->thn", q.double(), means)
    competes = torch.arange(N) < (torch.arange(len(q)) // block_size)[:, None]
    picked = torch.zeros(*q.shape[:2], N + 1, dtype=torch.bool).scatter_(-1, blocks.long() % (N + 1), True)[..., :N]
    worst = scores.masked_fill(~picked, float("inf")).amin(-1)
    best = scores.masked_fill(picked | ~competes[:, None], float("-inf")).amax(-1)
    return worst - best, scores.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision(dtype):
    """Picks are right up to fp32 rounding of the scores, whatever the dtype of the inputs."""
    q, k, _ = (x.detach() for x in inputs(2000, 4, 2, 64, dtype=dtype))
    margin, size = margins(q, k, moba_select(q, k, None, 20, 5), 20)
    assert margin.min() >= -(2**-18) * size


def test_precision_is_seen():
    """Means that are rounded to bf16 fail the check above."""
    q, k, _ = (x.detach() for x in inputs(2000, 4, 2, 64, dtype=torch.bfloat16))
    means = k.unflatten(0, (100, 20)).mean(1).repeat_interleave(20, 0)
    margin, size = margins(q, k, moba_select(q, means, None, 20, 5), 20)
    assert margin.min() < -(2**-12) * size


@pytest.mark.parametrize("top_k", [2, 4, 9])
def test_counts(top_k):
    """min(top_k - 1, complete past blocks) are picked, each once, and never the current block or a later one."""
    q, k, _ = (x.detach() for x in inputs(330, 3, 1, dtype=torch.float32))
    blocks = moba_select(q, k, torch.tensor([0, 330]), 32, top_k)
    current = torch.arange(330)[:, None] // 32
    assert torch.equal((blocks >= 0).sum(-1), current.clamp(max=top_k - 1).expand(330, 3))
    assert (blocks < current[..., None]).all()
    rising = (blocks[..., 1:] > blocks[..., :-1]) | (blocks[..., 1:] < 0)
    assert rising.all()


def test_the_query_is_taken_as_it_is():
    """The picked blocks depend neither on the length of the query nor on other heads."""
    q, k, _ = (x.detach() for x in inputs(300, 2))
    blocks = moba_select(q, k, None, 20, 4)
    assert torch.equal(moba_select(q * 0.25, k, None, 20, 4), blocks)
    assert torch.equal(moba_select(q[:, 1:], k[:, 1:], None, 20, 4), blocks[:, 1:])
    assert not torch.equal(blocks[:, 0], blocks[:, 1])


def test_last_queries():
    q, k, _ = (x.detach() for x in inputs(300, 4, 2))
    blocks = moba_select(q, k, None, 20, 4)
    for n in (1, 33, 300):
        assert torch.equal(moba_select(q[-n:], k, None, 20, 4), blocks[-n:])


def test_scores_exist_in_tiles_only(monkeypatch):
    """A [blocks, H, T] tensor would be 64 times the largest that is made."""
    monkeypatch.setattr(routing, "_TILE_SCORES", 2**12)
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            sizes.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(x))
            return out

    q, k = torch.randn(2, 2048, 2, 1).unbind()
    with Watch():
        blocks = moba_select(q, k, None, 16, 3)
    assert max(sizes) == blocks.numel() == 2048 * 2 * 2 < 2048 * 2 * 128 / 60
