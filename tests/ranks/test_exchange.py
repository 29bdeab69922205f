"""The exchange moves data exactly, for several blocks and from any strides, and each way is the other's adjoint."""

import pytest
import torch
from rank_pool import run_ranks


def blocks_of_the_world(size, T, B, heads, widths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size * T, B, h, d, generator=generator) for h, d in zip(heads, widths, strict=True)]


def moves_exactly(heads, widths, B, batch_first):
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.exchange import heads_to_tokens, own_heads, tokens_to_heads

    group, T = SequenceGroup.of(dist.group.WORLD), 3
    whole = blocks_of_the_world(group.size, T, B, heads, widths)
    tokens = [x[group.rank * T : (group.rank + 1) * T] for x in whole]
    strided = [x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3) for x in tokens]  # as Hugging Face has q
    buffer = tokens_to_heads(strided, group, "forward")
    mine = own_heads(buffer, heads, widths, group)
    for got, x, h in zip(mine, whole, heads, strict=True):
        m = h // group.size
        assert torch.equal(got, x[:, :, group.rank * m : (group.rank + 1) * m])
        assert got.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    back = heads_to_tokens(mine, heads, group, "forward", batch_first)
    for got, x in zip(back, tokens, strict=True):
        assert torch.equal(got, x)
        assert (got.transpose(0, 1) if batch_first else got).is_contiguous()
    # A block in two pieces arrives as one.
    pieces = [part for x in mine for part in x.split([1, x.shape[3] - 1], dim=-1)]
    joined = heads_to_tokens(pieces, heads, group, "forward", batch_first, [2] * len(mine))
    assert all(torch.equal(a, b) for a, b in zip(joined, tokens, strict=True))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "heads,widths,B", [([4], [5], 1), ([4], [5], 2), ([8, 8], [6, 3], 2), ([8, 4, 4], [6, 6, 2], 3)]
)
@pytest.mark.parametrize("size", [2, 4])
def test_moves_exactly(size, heads, widths, B, batch_first):
    run_ranks(size, moves_exactly, heads, widths, B, batch_first)


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
