"""UlyssesMoBAAttention equals MoBA on whole tensors in one process: forward and gradients, every rank."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks

K, V = 8, 5


def whole_tensors(B, S, H, G, width):
    generator = torch.Generator().manual_seed(S)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, width), (B, S, H, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def oracle(q, k, v, grad, boundaries, block, topk, scale):
    """All heads, the boolean-mask reference, one process."""
    from ds_mla_ulysses.moba import moba_attn_varlen

    B, S = q.shape[:2]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor(boundaries) if boundaries is not None else torch.arange(B + 1) * S
    flat = [x.flatten(0, 1) for x in inputs]
    out = moba_attn_varlen(*flat, cu, None, block, topk, scale=scale, implementation="reference").unflatten(0, (B, S))
    out.backward(grad)
    return [out.detach(), *(x.grad for x in inputs)]


def check(
    B,
    T,
    H,
    G,
    width,
    batch_dim_idx,
    boundaries,
    block,
    topk,
    scale=None,
    implementation="torch",
    strategy="packed",
    split="contiguous",
):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.moba import MoBAConfig

    group = SequenceGroup.of(dist.group.WORLD).with_split(split)
    whole = whole_tensors(B, T * group.size, H, G, width)
    want = oracle(*whole, boundaries, block, topk, scale)
    places = torch.arange(T * group.size)
    mine = places[group.rank * T : (group.rank + 1) * T]
    if split == "head_tail":
        chunks = places.chunk(2 * group.size)
        mine = torch.cat([chunks[group.rank], chunks[-1 - group.rank]])
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)
    config = MoBAConfig(moba_chunk_size=block, moba_topk=topk, implementation=implementation)
    attention = dmu.UlyssesMoBAAttention(config, group, strategy)
    inputs = [flip(x[:, mine]).contiguous().requires_grad_() for x in whole[:3]]
    cu = None if boundaries is None else torch.tensor(boundaries)
    with dmu.TrafficMeter() as meter:
        out = attention(*inputs, batch_dim_idx, cu_seqlens=cu, scale=scale)
        out.backward(flip(whole[3][:, mine]).contiguous())
    assert out.is_contiguous()
    for got, expected in zip([out.detach(), *(x.grad for x in inputs)], want, strict=True):
        torch.testing.assert_close(flip(got), expected[:, mine], rtol=1e-10, atol=1e-11)
    if group.size == 1:
        assert not meter.calls
    elif strategy == "packed":
        assert meter.calls == {("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2}
    else:
        assert meter.calls == {("all_gather", "forward"): 1, ("all_to_all", "backward"): 1}
        sent = B * T * G * (K + width) * (group.size - 1) * 8
        assert meter.bytes == {("all_gather", "forward"): sent, ("all_to_all", "backward"): sent}


STRATEGIES = pytest.mark.parametrize("strategy", ["packed", "gather_kv"])


@STRATEGIES
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_its_query_heads_are_those_of_the_class_that_it_stands_in_for(strategy, rank):
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.moba import MoBAConfig

    group = SequenceGroup(None, rank, 4)
    attention = dmu.UlyssesMoBAAttention(MoBAConfig(8, 2), group, strategy)
    if strategy == "packed":
        plain = dmu.UlyssesAttention(torch.add, group)
        assert attention.query_heads(8) == plain.query_heads(8) == slice(2 * rank, 2 * rank + 2)
        for either in (attention, plain):
            with pytest.raises(ValueError, match="2 attention heads are too few for 4 ranks"):
                either.query_heads(2)
        return
    plain = dmu.GatherKVAttention(torch.add, group)
    for heads in (8, 2):
        assert attention.query_heads(heads) == plain.query_heads(heads) == slice(0, heads)


@STRATEGIES
@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("H,G", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_one_process(size, H, G, batch_dim_idx, strategy):
    """Blocks of 7 in 46 or 92 tokens: they begin anywhere in a rank's part, and the last is not complete."""
    run_ranks(size, check, 2, 23, H, G, V, batch_dim_idx, None, 7, 3, strategy=strategy)


@STRATEGIES
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("topk", [1, 2, 5, 40])
def test_blocks_per_query(size, topk, strategy):
    run_ranks(size, check, 1, 32, 4, 2, K, 0, None, 8, topk, 0.3, strategy=strategy)


@STRATEGIES
@pytest.mark.parametrize("size", [2, 4])
def test_documents_are_those_of_the_whole_sequence(size, strategy):
    """The grid of blocks restarts in each; they cross the ranks, one is shorter than a block and one empty."""
    S = 24 * size
    boundaries = [0, 5, 5, 31, S, S + 17, 2 * S]
    run_ranks(size, check, 2, 24, 4, 2, V, 0, boundaries, 4, 2, strategy=strategy)


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_head_and_tail(size, batch_dim_idx):
    """Documents that begin and end in either run of a rank."""
    S = 24 * size
    boundaries = [0, 5, 5, 31, S, S + 17, 2 * S]
    settings = dict(strategy="gather_kv", split="head_tail")
    run_ranks(size, check, 2, 24, 4, 2, V, batch_dim_idx, boundaries, 4, 2, **settings)


@STRATEGIES
@pytest.mark.parametrize("size,H,G", [(2, 6, 3), (4, 5, 1)])
def test_heads_that_do_not_divide(size, H, G, strategy):
    run_ranks(size, check, 1, 20, H, G, V, 0, None, 6, 2, strategy=strategy)


def test_more_ranks_than_heads():
    """Gathered keys need no heads to share."""
    run_ranks(4, check, 1, 9, 2, 1, V, 0, None, 5, 2, strategy="gather_kv")


def test_the_reference_can_be_chosen():
    run_ranks(2, check, 1, 16, 4, 2, V, 0, None, 4, 2, None, "reference")


def sums_in_fp32():
    """What the ranks say of one key is rounded to bf16 once: 1 + 2 ** -9 of each would be lost one by one."""
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.gather import GatherTokens

    group = SequenceGroup.of(dist.group.WORLD)
    x_TBGD = torch.zeros(3, 1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    (out_SBGD,) = GatherTokens.apply(group, False, None, x_TBGD)
    grad = torch.full(out_SBGD.shape, 1.0 if group.rank == 0 else 2.0**-9 * 1.5, dtype=torch.bfloat16)
    out_SBGD.backward(grad)
    assert (x_TBGD.grad == torch.tensor(1 + 3 * 2.0**-9 * 1.5).bfloat16()).all()
    assert (x_TBGD.grad != 1).all()


def test_gathered_gradients_are_summed_in_fp32():
    run_ranks(4, sums_in_fp32)


def compiled(strategy):
    """A whole graph up to the gate; values are the eager ones."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.moba import MoBAConfig

    results = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager")):
        attention = dmu.UlyssesMoBAAttention(MoBAConfig(4, 2), dist.group.WORLD, strategy)
        inputs = [x[:, :12].clone().requires_grad_() for x in whole_tensors(1, 24, 4, 2, V)[:3]]
        out = wrap(lambda *qkv, attention=attention: attention(*[x * 2 for x in qkv], 0))(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for eager, other in zip(*results, strict=True):
        assert torch.equal(eager, other)


@STRATEGIES
def test_compiled(strategy):
    run_ranks(2, compiled, strategy)


def bad_arguments():
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.moba import MoBAConfig

    with pytest.raises(ValueError, match=r"strategy must be one of \['packed', 'gather_kv'\], got 'ring'"):
        dmu.UlyssesMoBAAttention(MoBAConfig(), None, "ring")
    with pytest.raises(ValueError, match="one attention has one moba_chunk_size"):
        dmu.UlyssesMoBAAttention(MoBAConfig(moba_topk=(2, 3)), None)
    x = torch.zeros(1, 4, 2, K)
    attention = dmu.UlyssesMoBAAttention(MoBAConfig(), None, "gather_kv")
    with pytest.raises(ValueError, match=r"q must be \[B, T, H, K\]"):
        attention(x, x[:, :3], x)


def test_bad_arguments():
    run_ranks(1, bad_arguments)


def positional():
    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.moba import MoBAConfig

    x = torch.zeros(1, 4, 2, K)
    dmu.UlyssesMoBAAttention(MoBAConfig(), None)(x, x, x, 0, None, 3)


def test_positional_arguments_are_refused():
    raises_on_ranks(2, ValueError, "MoBA takes cu_seqlens and scale by keyword", positional)
