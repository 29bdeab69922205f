"""UlyssesAttention against plain attention on whole tensors: forward and gradients, every rank."""

import itertools

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks

K, V = 6, 5


def causal_attention(q_BSMK, k_BSJK, v_BSJV, scale=0.3):
    """Grouped attention written out: query head m reads key/value head m // (M/J)."""
    q_BSJIK = q_BSMK.unflatten(2, (k_BSJK.shape[2], -1))
    scores = torch.einsum("bqjik,bsjk->bjiqs", q_BSJIK, k_BSJK) * scale
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    return torch.einsum("bjiqs,bsjv->bqjiv", weights, v_BSJV).flatten(2, 3)


def whole_tensors(B, S, H, G, width=V):
    generator = torch.Generator().manual_seed(S)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, width), (B, S, H, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def oracle(q, k, v, grad_out):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = causal_attention(*inputs)
    out.backward(grad_out)
    return [out.detach(), *(x.grad for x in inputs)]


def check_against_oracle(B, T, H, G, width, batch_dim_idx, groups=None, backend=None):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.attention.ulysses import UlyssesAttention
    from ds_mla_ulysses.comm.group import split_world

    group = split_world(groups or dist.get_world_size())
    whole = whole_tensors(B, T * group.size, H, G, width)
    want = oracle(*whole)
    mine = slice(group.rank * T, (group.rank + 1) * T)
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)
    seen = []

    def local_attention(q, k, v, scale):
        seen.append((q.shape[2], k.shape[2], v.shape[2]))
        return flip(causal_attention(flip(q), flip(k), flip(v), scale))

    attention = UlyssesAttention(local_attention, group)
    step = attention
    if backend is not None:
        torch._dynamo.reset()  # or the heads of another case would make those of this one symbols, ten times as slow
        step = torch.compile(attention, backend=backend, fullgraph=True)
    inputs = [flip(x[:, mine]).contiguous().requires_grad_() for x in whole[:3]]
    with dmu.TrafficMeter() as meter:
        out = step(*inputs, batch_dim_idx, None, 0.3)
        assert out.is_contiguous()
        out.backward(flip(whole[3][:, mine]).contiguous())
    for got, expected in zip([out.detach(), *(x.grad for x in inputs)], want, strict=True):
        torch.testing.assert_close(flip(got), expected[:, mine], rtol=1e-10, atol=1e-12)
    both = {("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2}
    assert dict(meter.calls) == (both if group.size > 1 else {})
    assert out.shape[2] == H and attention.query_heads(H).stop - attention.query_heads(H).start == seen[0][0]
    return seen[0]


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize(
    "B,T,H,G,width",
    [
        (2, 3, 4, 4, V),  # MHA
        (1, 5, 8, 4, V),
        (2, 7, 4, 2, V),  # on 4 ranks: fewer key/value heads than ranks
        (2, 4, 4, 1, V),  # MQA; on 4 ranks as many tokens as heads
        (1, 4, 4, 4, K),
        (3, 1, 6, 3, V),  # a key/value head between two ranks
        (2, 3, 5, 5, V),  # uneven
        (2, 5, 5, 1, V),
        (1, 3, 7, 7, K),
        (2, 3, 10, 2, V),  # uneven over 4 ranks: 3 3 2 2 over groups of 5
        (1, 3, 20, 5, V),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_forward_and_gradients(size, B, T, H, G, width, batch_dim_idx):
    run_ranks(size, check_against_oracle, B, T, H, G, width, batch_dim_idx)


def test_groups_smaller_than_the_world():
    run_ranks(4, check_against_oracle, 2, 5, 6, 3, V, 0, groups=2)


@pytest.mark.parametrize(
    "size,H,G,local",
    [
        (2, 8, 4, [(4, 2, 2)] * 2),
        (4, 4, 2, [(1, 1, 1)] * 4),
        (2, 4, 1, [(2, 1, 1)] * 2),
        (2, 6, 3, [(3, 3, 3)] * 2),  # 2 + 1 and 1 + 2: repeated
        (4, 10, 2, [(3, 1, 1), (3, 3, 3), (2, 1, 1), (2, 1, 1)]),  # only if the local heads are not evenly grouped
        (4, 5, 5, [(2, 2, 2), *[(1, 1, 1)] * 3]),
    ],
)
def test_local_attention_gets_an_even_grouping(size, H, G, local):
    assert run_ranks(size, check_against_oracle, 1, 3, H, G, V, 0) == local


@pytest.mark.parametrize("size,H,G", [(2, 8, 4), (2, 6, 3), (4, 5, 1)])
def test_compiled_gradients(size, H, G):
    run_ranks(size, check_against_oracle, 2, 3, H, G, V, 0, backend="aot_eager")


def kv_gradients_round_once(H, G):
    """In bf16, the gradient is the fp32 sum over the ranks, each of which sends the rounded fp32 sum over its heads."""
    import torch.distributed as dist

    from ds_mla_ulysses.attention.ulysses import UlyssesAttention
    from ds_mla_ulysses.comm.group import SequenceGroup

    group, T = SequenceGroup.of(dist.group.WORLD), 3
    S, rank = T * group.size, group.rank
    q, k, v, _ = (x.bfloat16() for x in whole_tensors(1, T, H, G, K))
    k.requires_grad_()
    weights = torch.randn(1, S, H, K, generator=torch.Generator().manual_seed(7)).bfloat16()

    def local_attention(q, k, v):
        return k.repeat_interleave(q.shape[2] // k.shape[2], 2) * weights[:, :, attention.query_heads(H)]

    attention = UlyssesAttention(local_attention, group)
    attention(q, k, v).backward(torch.ones(1, T, H, K, dtype=torch.bfloat16))

    want = torch.zeros(1, S, G, K)
    bounds = [H // group.size * p + min(p, H % group.size) for p in range(group.size + 1)]
    for first, stop in itertools.pairwise(bounds):
        sent = torch.zeros(1, S, G, K)
        for head in range(first, stop):
            sent[:, :, head * G // H] += weights[:, :, head].float()
        want += sent.bfloat16().float()
    assert torch.equal(k.grad, want.bfloat16()[:, rank * T : (rank + 1) * T])


@pytest.mark.parametrize("size,H,G", [(2, 6, 3), (2, 15, 3), (4, 18, 3), (4, 4, 1)])
def test_kv_gradients_are_summed_in_fp32(size, H, G):
    run_ranks(size, kv_gradients_round_once, H, G)


def bad_call(change):
    import torch.distributed as dist

    from ds_mla_ulysses.attention.ulysses import UlyssesAttention

    attention = UlyssesAttention(lambda q, k, v: q, dist.group.WORLD)
    H, G = {"heads": (3, 3), "groups": (6, 4)}.get(change, (4, 2))
    q, k, v, _ = whole_tensors(2, 3, H, G)
    if change == "rows":
        k, v = k[:, 1:], v[:, 1:]
    if change == "widths":
        k = k[..., 1:]
    if change == "values":
        v = v[:, :, 1:]
    if change == "dtype":
        v = v.bfloat16()
    if change == "out":
        attention.local_attn = lambda q, k, v: q.transpose(1, 2)
    attention(q, k, v, 2 if change == "batch_dim_idx" else 0, "rope" if change == "rotary" else None)


@pytest.mark.parametrize(
    "change,message",
    [
        ("heads", "3 attention heads are too few for 4 ranks"),
        ("groups", "6 query heads must be a multiple of the key/value heads, got 4"),
        ("rows", "q must be .*got q .2, 3, 4, 6., k .2, 2, 2, 6."),
        ("widths", "q must be"),
        ("values", "q must be"),
        ("dtype", "one dtype, got q torch.float64, k torch.float64, v torch.bfloat16"),
        ("batch_dim_idx", "batch_dim_idx is 0"),
        ("rotary", "rotary_pos_emb"),
        ("out", "rows and heads of its q"),
    ],
)
def test_bad_input_is_refused_on_every_rank(change, message):
    raises_on_ranks(4, ValueError, message, bad_call, change)
