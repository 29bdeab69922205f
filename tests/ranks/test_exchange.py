"""The exchange moves data exactly, for several blocks and any strides, and the two directions are each other's adjoint."""

import pytest
import torch
from rank_pool import run_ranks


def blocks_of_the_world(size, T, B, heads, widths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size * T, B, h, d, generator=generator) for h, d in zip(heads, widths, strict=True)]


def owned(heads, query_heads):
    """Returns the heads of every rank by the definition: all heads that its query heads read."""
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
    strided = [
        x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in tokens
    ]  # the strides of q in Hugging Face
    H = heads[0]
    ranks_of_heads = [owned(h, H) for h in heads]
    buffer = tokens_to_heads(strided, H, group, "forward")
    mine = local_heads(buffer, heads, widths, H, group)
    for got, x, of_ranks in zip(mine, whole, ranks_of_heads, strict=True):
        assert torch.equal(got, x[:, :, of_ranks[group.rank]])
        assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    back = heads_to_tokens(mine, heads, H, group, "forward", batch_first)
    times = [
        torch.tensor([sum(head in part for part in of_ranks) for head in range(h)])
        for h, of_ranks in zip(heads, ranks_of_heads, strict=True)
    ]
    tokens = [x * n.unsqueeze(-1) for x, n in zip(tokens, times, strict=True)]
    for got, x in zip(back, tokens, strict=True):
        assert torch.equal(got, x)
        assert (got.transpose(0, 1) if batch_first else got).is_contiguous()
    # A block that is sent in two pieces arrives as one.
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
        ([4, 1, 1], [6, 6, 2], 2),  # one KV head for all ranks
        ([6, 3, 3], [6, 6, 2], 2),  # neighbouring ranks share a KV head
        ([20, 4, 20], [3, 5, 2], 1),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_moves_exactly(size, heads, widths, B, batch_first):
    run_ranks(size, moves_exactly, heads, widths, B, batch_first)


def sums_round_once(heads, query_heads, batch_first):
    """In bf16, the tensors of the ranks that have a head arrive as their fp32 sum, in rank order, rounded once."""
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import heads_to_tokens

    group, T, B, D = SequenceGroup.of(dist.group.WORLD), 3, 2, 5
    of_ranks = owned(heads, query_heads)
    generator = torch.Generator().manual_seed(2)
    sent = [torch.randn(group.size * T, B, len(local), D, generator=generator).bfloat16() for local in of_ranks]
    (got,) = heads_to_tokens([sent[group.rank]], [heads], query_heads, group, "backward", batch_first)
    want, rounded_often = torch.zeros(T, B, heads, D), torch.zeros(T, B, heads, D, dtype=torch.bfloat16)
    for local, x in zip(of_ranks, sent, strict=True):
        want[:, :, local] += x[group.rank * T : (group.rank + 1) * T].float()
        rounded_often[:, :, local] += x[group.rank * T : (group.rank + 1) * T]
    assert torch.equal(got, want.bfloat16())
    return torch.equal(rounded_often, want.bfloat16())


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("size,heads,query_heads", [(2, 3, 6), (2, 1, 4), (4, 1, 4), (4, 3, 9), (4, 2, 4)])
def test_shared_heads_are_summed_in_fp32(size, heads, query_heads, batch_first):
    naive = run_ranks(size, sums_round_once, heads, query_heads, batch_first)
    assert (heads, size) != (1, 4) or not any(naive), "the data must distinguish one rounding from several"


def heads_to_tokens_gradient():
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import HeadsToTokens

    group, T, B, H, D = SequenceGroup.of(dist.group.WORLD), 3, 2, 4, 5
    (whole,) = blocks_of_the_world(group.size, T, B, [H], [D])
    m = H // group.size
    local = slice(group.rank * m, (group.rank + 1) * m)
    x = whole[:, :, local].clone().requires_grad_()
    out = HeadsToTokens.apply(x, H, group, True)
    out.backward(2 * whole[group.rank * T : (group.rank + 1) * T])
    assert torch.equal(x.grad, 2 * whole[:, :, local])


def test_gradient_returns_exactly():
    run_ranks(2, heads_to_tokens_gradient)
