"""Head chunks of UlyssesAttention and GatherKVAttention: the numbers of one chunk, and the same bytes."""

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_ulysses_attention import K, V, causal_attention, oracle, whole_tensors


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
        out = causal_attention(torch.cat([before, q], 1), k[:, : first_query + q.shape[1]], v[:, : first_query + q.shape[1]], scale)
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
    assert len(calls) == 2 * head_chunks  # and once more in backward
    return calls[:head_chunks]


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
