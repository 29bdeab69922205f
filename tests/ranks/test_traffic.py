"""What is sent is what the formula says, in three collectives each way, for DeepSeek-V3 widths on 8 ranks."""

import pytest
import torch
from rank_pool import run_ranks

H, N, R, V, T, RANKS = 128, 128, 64, 128, 4, 8
K, P = N + R, N + V


def on_eight_ranks(compiled):
    """One rank of a fake group of 8: collectives are counted and move nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ds_mla_ulysses as dmu

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=RANKS)
    attention = dmu.UlyssesMLAAttention(
        lambda q, k, v: q[..., :V] + k[..., :V] + v, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V
    )
    step = torch.compile(attention, backend="aot_eager") if compiled else attention
    shapes = [(1, T, H, K), (1, T, H, P), (1, T, R)]
    q, kv, k_shared = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    with dmu.TrafficMeter() as meter:
        step(q, kv, k_shared, 0).sum().backward()
    dist.destroy_process_group()
    return dict(meter.calls), dict(meter.bytes), meter.total_bytes


@pytest.mark.parametrize("compiled", [False, True])
def test_deepseek_v3_on_eight_ranks(compiled):
    # A pool of its own, since the worker's process group is replaced.
    import rank_pool

    pool = rank_pool._Pool(1)
    try:
        ((status, *answer),) = pool.call(on_eight_ranks, (compiled,), {}, 120)
    finally:
        pool.kill()
    assert status == "ok", answer
    calls, sent, total = answer[0]
    assert calls == {
        ("all_gather", "forward"): 1,
        ("all_to_all", "forward"): 2,
        ("all_to_all", "backward"): 3,
    }
    per_token = H * (K + P + V) * (RANKS - 1) // RANKS + R * (RANKS - 1)
    assert per_token == 64_960
    forward = sent["all_gather", "forward"] + sent["all_to_all", "forward"]
    assert forward == sent["all_to_all", "backward"] == per_token * T * 2
    assert sent["all_gather", "forward"] == R * (RANKS - 1) * T * 2
    assert total == 2 * forward


def silent_alone():
    import ds_mla_ulysses as dmu

    attention = dmu.UlyssesMLAAttention(lambda q, k, v: v, None, nope_dim=4, rope_dim=2, value_dim=3)
    with dmu.TrafficMeter() as meter:
        attention(
            *(torch.randn(s, requires_grad=True) for s in [(1, 5, 2, 6), (1, 5, 2, 7), (1, 5, 2)])
        ).sum().backward()
    return meter.total_bytes, sum(meter.calls.values())


def test_a_group_of_one_sends_nothing():
    assert run_ranks(1, silent_alone) == [(0, 0)]
