"""UlyssesMLAAttention against plain attention on whole tensors: forward and gradients, every rank."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks

N, R, V = 16, 8, 12


def causal_attention(q_BSMK, k_BSMK, v_BSMV, scale=0.3):
    """The local attention of these tests, without a kernel."""
    scores = torch.einsum("bqmk,bsmk->bmqs", q_BSMK, k_BSMK) * scale
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.einsum("bmqs,bsmv->bqmv", scores.masked_fill(~allowed, float("-inf")).softmax(-1), v_BSMV)


def whole_tensors(B, S, H, dtype, requires_grad=False):
    generator = torch.Generator().manual_seed(S)
    shapes = [(B, S, H, N + R), (B, S, H, N + V), (B, S, R), (B, S, H, V)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def oracle(q, kv, k_shared, grad_out):
    q, kv, k_shared = (x.clone().requires_grad_() for x in (q, kv, k_shared))
    shared = k_shared.unsqueeze(2).expand(-1, -1, q.shape[2], -1)
    out = causal_attention(q, torch.cat([kv[..., :N], shared], dim=-1), kv[..., N:])
    out.backward(grad_out)
    return out.detach(), q.grad, kv.grad, k_shared.grad


def check_against_oracle(B, T, H, batch_dim_idx, groups=None, dtype=torch.float64):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import split_world

    group = split_world(groups or dist.get_world_size())
    whole = whole_tensors(B, T * group.size, H, dtype)
    want = oracle(*whole)
    mine = slice(group.rank * T, (group.rank + 1) * T)
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)

    def local_attention(q, k, v, scale):
        assert q.shape[2] == k.shape[2] == v.shape[2] == H // group.size + (group.rank < H % group.size)
        return flip(causal_attention(flip(q), flip(k), flip(v), scale))

    attention = dmu.UlyssesMLAAttention(local_attention, group, nope_dim=N, rope_dim=R, value_dim=V)
    q, kv, k_shared, grad_out = (flip(x[:, mine]).contiguous() for x in whole)
    inputs = [x.requires_grad_() for x in (q, kv, k_shared)]
    out = attention(*inputs, batch_dim_idx, None, 0.3)
    assert out.is_contiguous()
    out.backward(grad_out)
    for got, expected in zip([out.detach(), *(x.grad for x in inputs)], want, strict=True):
        torch.testing.assert_close(flip(got), expected[:, mine], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("B,T,H", [(1, 5, 4), (2, 7, 8), (3, 1, 4), (2, 4, 4), (2, 3, 5), (1, 5, 7)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_gradients(size, B, T, H, batch_dim_idx):
    run_ranks(size, check_against_oracle, B, T, H, batch_dim_idx)


def test_groups_smaller_than_the_world():
    run_ranks(4, check_against_oracle, 2, 5, 4, 0, groups=2)


def key_gradient_rounds_once():
    """In bf16, the gradient is the fp32 sum over the ranks, each of which sends the rounded fp32 sum over its heads."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    rank, size, T, H = dist.get_rank(), dist.get_world_size(), 3, 8
    q, kv, k_shared, _ = (x.bfloat16() for x in whole_tensors(1, T, H, torch.float64))
    k_shared.requires_grad_()
    weights = torch.randn(1, T * size, H, N + R, generator=torch.Generator().manual_seed(7)).bfloat16()
    local_weights = weights[:, :, rank * H // size : (rank + 1) * H // size]

    attention = dmu.UlyssesMLAAttention(
        lambda q, k, v: (k * local_weights).sum(-1, keepdim=True).expand(-1, -1, -1, V),
        dist.group.WORLD,
        nope_dim=N,
        rope_dim=R,
        value_dim=V,
    )
    out = attention(q, kv, k_shared)
    out.backward(torch.full_like(out, 1 / V).bfloat16())
    # Reproduce the gradient of k that reaches the exchange, with the same products in bf16.
    k = torch.zeros_like(local_weights, requires_grad=True)
    local = (k * local_weights).sum(-1, keepdim=True).expand(-1, -1, -1, V)
    local.backward(torch.full_like(local, 1 / V))
    sent = k.grad[..., N:].float().sum(2).bfloat16()
    parts = [torch.empty_like(sent) for _ in range(size)]
    dist.all_gather(parts, sent)
    want = torch.stack(parts)[:, :, rank * T : (rank + 1) * T].float().sum(0).bfloat16()
    assert torch.equal(k_shared.grad, want)


@pytest.mark.parametrize("size", [2, 4])
def test_key_gradient_is_summed_in_fp32(size):
    run_ranks(size, key_gradient_rounds_once)


def start_returns_at_once():
    """The gather is asynchronous: if a peer is one second late, starting it returns at once and only its use waits."""
    import time

    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    attention = dmu.UlyssesMLAAttention(lambda q, k, v: v, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)
    q, kv, k_shared, _ = whole_tensors(1, 4, 4, torch.float32)
    attention(q, kv, k_shared)  # the first use creates the connections
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(1)
    begin = time.perf_counter()
    pending = attention.gather_shared_key(k_shared)
    started = time.perf_counter() - begin
    attention(q, kv, pending)
    return started, time.perf_counter() - begin


def test_the_gather_starts_asynchronously():
    (started, finished), _ = run_ranks(2, start_returns_at_once)
    assert started < 0.5 < finished


def bad_call(change):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    attention = dmu.UlyssesMLAAttention(lambda q, k, v: v, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)
    q, kv, k_shared, _ = whole_tensors(2, 4, 3 if change == "heads" else 4, torch.float32)
    if change == "kv":
        kv = kv[..., :-1]
    if change == "rope":
        k_shared = k_shared[..., :-1]
    if change == "dtype":
        kv = kv.bfloat16()
    if change in ("pending dtype", "pending layout"):
        k_shared = k_shared.bfloat16() if change == "pending dtype" else k_shared
        k_shared = attention.gather_shared_key(k_shared, 1 if change == "pending layout" else 0)
    if change == "out":
        attention.local_attn = lambda q, k, v: v.transpose(1, 2)
    attention(q, kv, k_shared, 2 if change == "batch_dim_idx" else 0, "rope" if change == "rotary" else None)


@pytest.mark.parametrize(
    "change,message",
    [
        ("kv", "kv must be"),
        ("rope", "k_shared must be"),
        ("dtype", "one dtype"),
        ("batch_dim_idx", "batch_dim_idx is 0"),
        ("rotary", "rotary_pos_emb"),
        ("pending dtype", "one dtype"),
        ("pending layout", "gathered with batch_dim_idx=1, not 0"),
        ("out", "rows and heads of its q"),
        ("heads", "3 attention heads are too few for 4 ranks"),
    ],
)
def test_bad_input_is_refused_on_every_rank(change, message):
    raises_on_ranks(4, ValueError, message, bad_call, change)
