"""UlyssesMLAAttention with latents: each rank expands its own heads; forward and every gradient, on every rank."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_mla_attention import N, R, V, causal_attention

L = 10


def whole_tensors(B, S, H):
    """q, latent, shared key, the weight that expands, and the output's gradient."""
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

    attention = dmu.UlyssesMLAAttention(local_attention, group, nope_dim=N, rope_dim=R, value_dim=V)
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


def wrong(what):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    attention = dmu.UlyssesMLAAttention(lambda q, k, v: v, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)
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
