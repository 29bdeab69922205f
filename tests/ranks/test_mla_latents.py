"""LatentKVMLAAttention and GatherKVMLAAttention, which gather latents: forward and every gradient, on every rank."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_mla_attention import N, R, V, causal_attention

L = 10


def whole_tensors(B, S, H):
    """Returns q, latent, shared key, the weight of the expansion, and the gradient of the output."""
    generator = torch.Generator().manual_seed(S)
    shapes = [(B, S, H, N + R), (B, S, L), (B, S, R), (H, N + V, L), (B, S, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def oracle(q, latent, k_shared, weight, grad_out):
    inputs = [x.clone().requires_grad_() for x in (q, latent, k_shared, weight)]
    q, latent, k_shared, weight = inputs
    kv = torch.einsum("bsl,hpl->bshp", latent, weight)
    shared = k_shared.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
    out = causal_attention(q, torch.cat([kv[..., :N], shared], dim=-1), kv[..., N:])
    out.backward(grad_out)
    return [out.detach(), *(x.grad for x in inputs)]


def check(B, T, H, batch_dim_idx, compiled=False):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD)
    whole = whole_tensors(B, T * group.size, H)
    want = oracle(*whole)
    mine = slice(group.rank * T, (group.rank + 1) * T)
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)
    weight = whole[3].clone().requires_grad_()

    def expand(latent, heads):
        return torch.einsum("xyl,hpl->xyhp", latent, weight[heads])

    def local_attention(q, k, v):
        return flip(causal_attention(flip(q), flip(k), flip(v)))

    attention = dmu.LatentKVMLAAttention(local_attention, group, nope_dim=N, rope_dim=R, value_dim=V)
    step = torch.compile(attention, backend="aot_eager") if compiled else attention
    inputs = [flip(x[:, mine]).contiguous().requires_grad_() for x in whole[:3]]
    with dmu.TrafficMeter() as meter:
        out = step(*inputs, batch_dim_idx, expand=expand)
        out.backward(flip(whole[4][:, mine]).contiguous())
    assert out.is_contiguous()
    for got, expected in zip([out.detach(), *(x.grad for x in inputs)], want[:4], strict=True):
        torch.testing.assert_close(flip(got), expected[:, mine], rtol=1e-10, atol=1e-11)
    if group.size > 1:
        dist.all_reduce(weight.grad)
        forward = {("all_gather", "forward"): 1, ("all_to_all", "forward"): 2}
        assert meter.calls == forward | {("all_to_all", "backward"): 3}
        sent = B * T * (L + R) * (group.size - 1) * 8
        assert meter.bytes["all_gather", "forward"] == sent
        if H % group.size == 0:
            by_heads = B * T * H * (N + R + V) * (group.size - 1) // group.size * 8
            assert meter.bytes["all_to_all", "forward"] == by_heads
            assert meter.bytes["all_to_all", "backward"] == by_heads + sent
    torch.testing.assert_close(weight.grad, want[4], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("B,T,H", [(1, 5, 4), (2, 7, 8), (3, 1, 4), (2, 4, 4), (1, 5, 7)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_gradients(size, B, T, H, batch_dim_idx):
    run_ranks(size, check, B, T, H, batch_dim_idx)


@pytest.mark.parametrize("size", [1, 2])
def test_compiled(size):
    run_ranks(size, check, 2, 6, 4, 0, True)


def run_of(x, group):
    """Returns this rank's tokens of [B, S, ...]."""
    pieces = x.chunk(group.size if group.split == "contiguous" else 2 * group.size, dim=1)
    if group.split == "contiguous":
        return pieces[group.rank]
    return torch.cat([pieces[group.rank], pieces[2 * group.size - 1 - group.rank]], dim=1)


def check_gathering(B, T, H, batch_dim_idx, split, compiled=False):
    """Checks the class whose queries stay and whose ranks expand all heads of all tokens."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD).with_split(split)
    whole = whole_tensors(B, T * group.size, H)
    want = oracle(*whole)
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)
    weight = whole[3].clone().requires_grad_()
    places = []

    def expand(latent, heads):
        assert (heads.start, heads.stop) == (0, H)
        return torch.einsum("xyl,hpl->xyhp", latent, weight)

    def local_attention(q, k, v, first_query):
        q, k, v = flip(q), flip(k), flip(v)
        places.append((first_query, first_query + q.shape[1]))
        before = q.new_zeros(B, first_query, *q.shape[2:])
        after = q.new_zeros(B, k.shape[1] - first_query - q.shape[1], *q.shape[2:])
        out = causal_attention(torch.cat([before, q, after], 1), k, v)
        return flip(out[:, first_query : first_query + q.shape[1]])

    attention = dmu.GatherKVMLAAttention(local_attention, group, nope_dim=N, rope_dim=R, value_dim=V)
    step = torch.compile(attention, backend="aot_eager") if compiled else attention
    inputs = [flip(run_of(x, group)).contiguous().requires_grad_() for x in whole[:3]]
    with dmu.TrafficMeter() as meter:
        out = step(*inputs, batch_dim_idx, expand=expand)
        out.backward(flip(run_of(whole[4], group)).contiguous())
    assert out.is_contiguous()
    for got, expected in zip([out.detach(), *(x.grad for x in inputs)], want[:4], strict=True):
        torch.testing.assert_close(flip(got), run_of(expected, group), rtol=1e-10, atol=1e-11)
    if group.size > 1:
        dist.all_reduce(weight.grad)
        sent = B * T * (L + R) * (group.size - 1) * 8
        assert meter.bytes == {("all_gather", "forward"): sent, ("all_to_all", "backward"): sent}
    torch.testing.assert_close(weight.grad, want[4], rtol=1e-10, atol=1e-11)
    return places


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("split,T,H", [("contiguous", 5, 2), ("head_tail", 6, 3)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_that_stay(size, split, T, H, batch_dim_idx):
    places = run_ranks(size, check_gathering, 2, T, H, batch_dim_idx, split)
    S = T * size
    # Every query attends once. The two runs in the middle of the sequence are joined into one.
    assert sorted(i for of_rank in places for run in of_rank for i in range(*run)) == list(range(S))
    assert [len(of_rank) for of_rank in places] == ([2] * (size - 1) + [1] if split == "head_tail" else [1] * size)


@pytest.mark.parametrize("split", ["contiguous", "head_tail"])
def test_queries_that_stay_compiled(split):
    run_ranks(2, check_gathering, 2, 6, 4, 0, split, True)


def head_tail_of_heads():
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD).with_split("head_tail")
    dmu.LatentKVMLAAttention(lambda q, k, v: v, group, nope_dim=N, rope_dim=R, value_dim=V)


def test_head_and_tail_are_for_queries_that_stay():
    raises_on_ranks(
        2, ValueError, "split='head_tail' is for the strategy 'gather_kv', whose queries", head_tail_of_heads
    )


def wrong(what):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    attention = dmu.LatentKVMLAAttention(lambda q, k, v: v, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)
    q, latent, k_shared = torch.zeros(1, 3, 4, N + R), torch.zeros(1, 3, L), torch.zeros(1, 3, R)
    changed = {"latent": latent[:, :2], "k_shared": k_shared[..., 1:], "q": q[..., 1:]}
    tensors = {"q": q, "latent": latent, "k_shared": k_shared}
    if what in changed:
        tensors[what] = changed[what]
    attention(*tensors.values(), expand=lambda latent, heads: latent)


@pytest.mark.parametrize(
    "what,message",
    [
        ("latent", r"with expand, q must be \[B, T, H, 24\] and the latent \[B, T, L\]"),
        ("q", r"with expand, q must be \[B, T, H, 24\]"),
        ("k_shared", r"k_shared must be \[B, T, 8\]"),
        ("expand", r"expand must return kv \(1, 6, 2, 28\) in torch.float32, got \(1, 6, 10\)"),
    ],
)
def test_bad_input(what, message):
    raises_on_ranks(2, ValueError, message, wrong, what)
