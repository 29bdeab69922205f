"""The exchange moves data exactly, for several blocks and from any strides, and each way is the other's adjoint."""

import pytest
import torch
from rank_pool import run_ranks


def blocks_of_the_world(size, T, B, heads, widths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size * T, B, h, d, generator=generator) for h, d in zip(heads, widths, strict=True)]


def owned(heads, query_heads):
    """The heads of every rank, spelled out: whatever its query heads read."""
    import torch.distributed as dist

    size = dist.get_world_size()
    queries = [query_heads // size + (rank < query_heads % size) for rank in range(size)]
    ends = [sum(queries[: rank + 1]) for rank in range(size)]
    return [
        sorted({q * heads // query_heads for q in range(end - n, end)}) for n, end in zip(queries, ends, strict=True)
    ]


def moves_exactly(heads, widths, B, batch_first):
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import heads_to_tokens, local_heads, tokens_to_heads

    group, T = SequenceGroup.of(dist.group.WORLD), 3
    whole = blocks_of_the_world(group.size, T, B, heads, widths)
    tokens = [x[group.rank * T : (group.rank + 1) * T] for x in whole]
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in tokens]  # as Hugging Face has q
    H = heads[0]
    owners = [owned(h, H) for h in heads]
    buffer = tokens_to_heads(strided, H, group, "forward")
    mine = local_heads(buffer, heads, widths, H, group)
    for got, x, of_ranks in zip(mine, whole, owners, strict=True):
        assert torch.equal(got, x[:, :, of_ranks[group.rank]])
        assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    back = heads_to_tokens(mine, heads, H, group, "forward", batch_first)
    times = [
        torch.tensor([sum(head in part for part in of_ranks) for head in range(h)])
        for h, of_ranks in zip(heads, owners, strict=True)
    ]
    tokens = [x * n.unsqueeze(-1) for x, n in zip(tokens, times, strict=True)]
    for got, x in zip(back, tokens, strict=True):
        assert torch.equal(got, x)
        assert (got.transpose(0, 1) if batch_first else got).is_contiguous()
    # A block in two pieces arrives as one.
    pieces = [part for x in mine for part in x.split([1, x.shape[3] - 1], dim=-1)]
    joined = heads_to_tokens(pieces, heads, H, group, "forward", batch_first, [2] * len(mine))
    assert all(torch.equal(a, b) for a, b in zip(joined, tokens, strict=True))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "heads,widths,B",
    [
        ([4], [5], 1),
        ([4], [5], 2),
        ([8, 8], [6, 3], 2),
        ([8, 4, 4], [6, 6, 2], 3),
        ([5, 5], [6, 3], 2),  # uneven
        ([4, 1, 1], [6, 6, 2], 2),  # one head for all
        ([6, 3, 3], [6, 6, 2], 2),  # neighbours share a head
        ([20, 4, 20], [3, 5, 2], 1),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_moves_exactly(size, heads, widths, B, batch_first):
    run_ranks(size, moves_exactly, heads, widths, B, batch_first)


def sums_round_once(heads, query_heads, batch_first):
    """bf16: what the owners say of a head arrives as their fp32 sum, in rank order, rounded once."""
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import heads_to_tokens

    group, T, B, D = SequenceGroup.of(dist.group.WORLD), 3, 2, 5
    of_ranks = owned(heads, query_heads)
    generator = torch.Generator().manual_seed(2)
    said = [torch.randn(group.size * T, B, len(own), D, generator=generator).bfloat16() for own in of_ranks]
    (got,) = heads_to_tokens([said[group.rank]], [heads], query_heads, group, "backward", batch_first)
    want, rounded_often = torch.zeros(T, B, heads, D), torch.zeros(T, B, heads, D, dtype=torch.bfloat16)
    for own, x in zip(of_ranks, said, strict=True):
        want[:, :, own] += x[group.rank * T : (group.rank + 1) * T].float()
        rounded_often[:, :, own] += x[group.rank * T : (group.rank + 1) * T]
    assert torch.equal(got, want.bfloat16())
    return torch.equal(rounded_often, want.bfloat16())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("size,heads,query_heads", [(2, 3, 6), (2, 1, 4), (4, 1, 4), (4, 3, 9), (4, 2, 4)])
def test_shared_heads_are_summed_in_fp32(size, heads, query_heads, batch_first):
    naive = run_ranks(size, sums_round_once, heads, query_heads, batch_first)
    assert (heads, size) != (1, 4) or not any(naive), "the data has to tell one rounding from several"


def heads_to_tokens_gradient():
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import HeadsToTokens

    group, T, B, H, D = SequenceGroup.of(dist.group.WORLD), 3, 2, 4, 5
    (whole,) = blocks_of_the_world(group.size, T, B, [H], [D])
    m = H // group.size
    own = slice(group.rank * m, (group.rank + 1) * m)
    x = whole[:, :, own].clone().requires_grad_()
    out = HeadsToTokens.apply(x, H, group, True)
    out.backward(2 * whole[group.rank * T : (group.rank + 1) * T])
    assert torch.equal(x.grad, 2 * whole[:, :, own])


def test_gradient_returns_exactly():
    run_ranks(2, heads_to_tokens_gradient)
