"""Head chunks of UlyssesAttention and GatherKVAttention: the numbers of one chunk, and the same bytes."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_ulysses_attention import K, causal_attention, oracle, whole_tensors


def step(kind, group, head_chunks, whole, batch_dim_idx, sinks=None):
    """One rank's output, gradients, calls of its local attention and traffic."""
    import ds_mla_ulysses as dmu

    T = whole[0].shape[1] // group.size
    mine = slice(group.rank * T, (group.rank + 1) * T)
    flip = (lambda x: x.transpose(0, 1)) if batch_dim_idx == 1 else (lambda x: x)
    calls = []

    def local_attention(q, k, v, scale, first_query=0, sink=None):
        calls.append((q.shape[2], k.shape[2]))
        q, k, v = flip(q), flip(k), flip(v)
        before = q.new_zeros(q.shape[0], first_query, *q.shape[2:])
        out = causal_attention(
            torch.cat([before, q], 1), k[:, : first_query + q.shape[1]], v[:, : first_query + q.shape[1]], scale
        )
        out = out[:, first_query:]
        return flip(out if sink is None else out * sink.unsqueeze(-1))

    attention = getattr(dmu, kind)(local_attention, group, head_chunks=head_chunks)
    inputs = [flip(x[:, mine]).contiguous().requires_grad_() for x in whole[:3]]
    per_head = None
    if sinks is not None:
        inputs.append(sinks.clone().requires_grad_())
        per_head = {"sink": inputs[-1]}
    with dmu.TrafficMeter() as meter:
        out = attention(*inputs[:3], batch_dim_idx, None, 0.3, per_head=per_head)
        assert out.is_contiguous()
        out.backward(flip(whole[3][:, mine]).contiguous())
    assert all(x.grad.is_contiguous() for x in inputs)
    return [flip(x) if x.ndim == 4 else x for x in (out.detach(), *(x.grad for x in inputs))], calls, meter


def compare(kind, B, T, H, G, head_chunks, batch_dim_idx, groups=None):
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import split_world

    group = split_world(groups or dist.get_world_size())
    whole = whole_tensors(B, T * group.size, H, G)
    mine = slice(group.rank * T, (group.rank + 1) * T)
    got, calls, meter = step(kind, group, head_chunks, whole, batch_dim_idx)
    one, _, meter_of_one = step(kind, group, 1, whole, batch_dim_idx)
    for x, same, want in zip(got, one, oracle(*whole), strict=True):
        torch.testing.assert_close(x, same, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(x, want[:, mine], rtol=1e-10, atol=1e-12)
    assert dict(meter.bytes) == dict(meter_of_one.bytes)
    if kind == "UlyssesAttention" and group.size > 1:
        assert set(meter.calls.values()) == {2 * head_chunks + 1}
    else:
        assert meter.calls == meter_of_one.calls
    assert not any(M % J for M, J in calls)
    assert sorted(calls[: len(calls) // 2]) == sorted(calls[len(calls) // 2 :])  # and once more in backward
    return calls[: len(calls) // 2]


@pytest.mark.parametrize("batch_dim_idx", [0, 1])
@pytest.mark.parametrize("kind", ["UlyssesAttention", "GatherKVAttention"])
@pytest.mark.parametrize(
    "size,B,T,H,G,head_chunks",
    [
        (1, 2, 7, 4, 4, 2),
        (1, 1, 5, 5, 1, 3),
        (1, 1, 5, 12, 3, 8),  # chunks of 2 and 1 heads in groups of 4
        (2, 2, 3, 8, 4, 2),
        (2, 1, 5, 8, 8, 4),
        (2, 2, 5, 8, 2, 3),  # 2 1 1 heads of one KV head
        (2, 2, 3, 12, 4, 2),  # a chunk of each KV head
        (2, 1, 3, 12, 4, 4),  # chunks inside groups
        (2, 2, 3, 18, 6, 2),  # 5 and 4 heads of KV heads 0 0 0 1 1 | 1 2 2 2
        (2, 1, 3, 15, 5, 3),  # uneven ranks and chunks
        (2, 2, 3, 7, 1, 3),
        (2, 1, 3, 7, 7, 2),
        (4, 2, 3, 8, 2, 2),  # fewer KV heads than ranks
        (4, 1, 3, 18, 6, 3),  # ranks and chunks end inside groups
        (4, 2, 1, 10, 2, 2),
    ],
)
def test_same_numbers_and_bytes(size, kind, B, T, H, G, head_chunks, batch_dim_idx):
    run_ranks(size, compare, kind, B, T, H, G, head_chunks, batch_dim_idx)


@pytest.mark.parametrize(
    "size,H,G,head_chunks,local",
    [
        (1, 8, 2, 2, [[(4, 1)] * 2]),
        (1, 8, 8, 2, [[(4, 4)] * 2]),
        (1, 8, 4, 3, [[(2, 1), (1, 1), (1, 1), (2, 1), (2, 1)]]),  # heads 0 1 2 | 3 4 5 | 6 7
        (1, 12, 3, 2, [[(4, 1), (2, 1), (2, 1), (4, 1)]]),
        (2, 16, 2, 4, [[(2, 1)] * 4] * 2),
        (2, 6, 3, 1, [[(3, 3)]] * 2),  # one chunk: repeated
        (2, 18, 6, 2, [[(3, 1), (2, 1), (1, 1), (3, 1)]] * 2),
        (2, 12, 2, 2, [[(3, 1)] * 2] * 2),
        (2, 20, 4, 2, [[(5, 1)] * 2] * 2),
    ],
)
def test_local_attention_gets_even_groups(size, H, G, head_chunks, local):
    """Pairs of the numbers of query and KV heads, in the order of the calls."""
    assert run_ranks(size, calls_of, H, G, head_chunks) == local


def calls_of(H, G, head_chunks):
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD)
    _, calls, _ = step("UlyssesAttention", group, head_chunks, whole_tensors(1, 2 * group.size, H, G), 0)
    return calls[: len(calls) // 2] if head_chunks > 1 else calls


def test_groups_smaller_than_the_world():
    run_ranks(4, compare, "UlyssesAttention", 2, 5, 6, 3, 2, 0, groups=2)


def parameters_of_heads(kind, H, head_chunks):
    """Each chunk gets the rows of its heads, and each rank's gradient has those of its heads."""
    import torch.distributed as dist

    from ds_mla_ulysses.comm.group import SequenceGroup

    group = SequenceGroup.of(dist.group.WORLD)
    whole, sinks = whole_tensors(2, 3 * group.size, H, 1), torch.linspace(1, 2, H, dtype=torch.float64)
    (got, *grads, dsinks), calls, _ = step(kind, group, head_chunks, whole, 0, sinks)
    inputs = [x.clone().requires_grad_() for x in (*whole[:3], sinks)]
    out = causal_attention(*inputs[:3]) * inputs[3].unsqueeze(-1)
    out.backward(whole[3])
    mine = slice(group.rank * 3, (group.rank + 1) * 3)
    for x, want in zip((got, *grads), (out.detach(), *(x.grad for x in inputs[:3])), strict=True):
        torch.testing.assert_close(x, want[:, mine], rtol=1e-10, atol=1e-12)
    dist.all_reduce(dsinks)
    torch.testing.assert_close(dsinks, inputs[3].grad, rtol=1e-10, atol=1e-12)
    assert len(calls) == (2 * head_chunks if head_chunks > 1 else 1)


@pytest.mark.parametrize("kind", ["UlyssesAttention", "GatherKVAttention"])
@pytest.mark.parametrize("size,H,head_chunks", [(1, 3, 2), (2, 5, 1), (2, 5, 2), (4, 9, 2)])
def test_parameters_of_heads(kind, size, H, head_chunks):
    run_ranks(size, parameters_of_heads, kind, H, head_chunks)


def kv_gradients_round_once(kind, H, G, head_chunks):
    """In bf16, a rank sends the fp32 sum of its chunks' gradients, rounded once; then the ranks' are summed in fp32."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm.group import SequenceGroup
    from ds_mla_ulysses.layout.heads import HeadChunks

    group, T = SequenceGroup.of(dist.group.WORLD), 3
    S, rank, gathers = T * group.size, group.rank, kind == "GatherKVAttention"
    q, k, v, _ = (x.bfloat16() for x in whole_tensors(1, T, H, G, K))
    k.requires_grad_(), v.requires_grad_()
    weights = torch.randn(1, S, H, K, generator=torch.Generator().manual_seed(7)).bfloat16()

    def local_attention(q, k, v, first_query=0, heads=None):
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        rows = slice(first_query, first_query + q.shape[1])
        out = (k + v) * weights[:, :, heads]
        # With gathered keys each rank has S keys for its T queries, whose gradients it makes for all keys.
        return out.unflatten(1, (-1, T)).sum(1) if gathers else out[:, rows]

    attention = getattr(dmu, kind)(local_attention, group, head_chunks=head_chunks)
    attention(q, k, v, per_head={"heads": torch.arange(H)}).backward(torch.ones(1, T, H, K, dtype=torch.bfloat16))

    want = torch.zeros(1, S, G, K)
    chunks = HeadChunks(H, 1 if gathers else group.size, head_chunks)
    for p in range(group.size):
        sent = torch.zeros(1, S, G, K)
        for chunk in chunks.of_rank(0 if gathers else p):
            of_chunk = torch.zeros(1, S, G, K)
            for head in range(chunk.start, chunk.stop):
                of_chunk[:, :, head * G // H] += weights[:, :, head].float()
            sent += of_chunk.bfloat16().float()
        want += sent.bfloat16().float()
    for x in (k, v):
        assert torch.equal(x.grad, want.bfloat16()[:, rank * T : (rank + 1) * T])


@pytest.mark.parametrize("kind", ["UlyssesAttention", "GatherKVAttention"])
@pytest.mark.parametrize("size,H,G,head_chunks", [(1, 6, 1, 6), (2, 12, 1, 6), (2, 18, 3, 9), (4, 20, 1, 5)])
def test_kv_gradients_are_summed_in_fp32(kind, size, H, G, head_chunks):
    """If the chunks were summed in bf16, the sums would differ."""
    run_ranks(size, kv_gradients_round_once, kind, H, G, head_chunks)


def bad_call(kind, change):
    import torch.distributed as dist

    import ds_mla_ulysses as dmu

    attention = getattr(dmu, kind)(lambda q, k, v, **_: q, dist.group.WORLD, head_chunks=0 if change == "zero" else 3)
    H, G = {"groups": (7, 2)}.get(change, (4, 2))
    attention(*whole_tensors(2, 3, H, G)[:3])


@pytest.mark.parametrize(
    "kind,change,message",
    [
        ("UlyssesAttention", "chunks", "head_chunks=3 must be from 1 to 2, the fewest heads that a rank attends with"),
        ("UlyssesAttention", "groups", "7 query heads must be a multiple of the key/value heads, got 2"),
        ("UlyssesAttention", "zero", "head_chunks must be an int >= 1, got 0"),
        ("GatherKVAttention", "groups", "7 query heads must be a multiple of the key/value heads, got 2"),
        ("GatherKVAttention", "zero", "head_chunks must be an int >= 1, got 0"),
    ],
)
def test_bad_input_is_refused_on_every_rank(kind, change, message):
    raises_on_ranks(2, ValueError, message, bad_call, kind, change)


def test_more_chunks_than_heads():
    import ds_mla_ulysses as dmu

    attention = dmu.GatherKVAttention(lambda q, k, v, **_: q, None, head_chunks=5)
    with pytest.raises(ValueError, match="head_chunks=5 must be from 1 to 4, the fewest heads"):
        attention(*whole_tensors(1, 3, 4, 2)[:3])
