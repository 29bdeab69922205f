"""What is sent: DeepSeek-V3 on 8 ranks by the formula; other attention no more than stock DeepSpeed sends."""

import pytest
import torch
from rank_pool import run_ranks

H, N, R, V, L, T, RANKS = 128, 128, 64, 128, 512, 4, 8
K, P = N + R, N + V


def on_eight_ranks(strategy, compiled):
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
    shapes = [(1, T, H, K), (1, T, H, P) if strategy == "packed" else (1, T, L), (1, T, R)]
    q, kv, k_shared = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)

    def expand(latent, heads):
        return latent[..., None, :P].expand(-1, -1, heads.stop - heads.start, -1)

    with dmu.TrafficMeter() as meter:
        step(q, kv, k_shared, 0, **({} if strategy == "packed" else {"expand": expand})).sum().backward()
    dist.destroy_process_group()
    return dict(meter.calls), dict(meter.bytes), meter.total_bytes


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy,elements,of_stock", [("packed", 64_960, 0.907), ("latent_kv", 39_872, 0.557)])
def test_deepseek_v3_on_eight_ranks(strategy, elements, of_stock, compiled):
    # A pool of its own, since the worker's process group is replaced.
    import rank_pool

    pool = rank_pool._Pool(1)
    try:
        ((status, *answer),) = pool.call(on_eight_ranks, (strategy, compiled), {}, 120)
    finally:
        pool.kill()
    assert status == "ok", answer
    calls, sent, total = answer[0]
    assert calls == {
        ("all_gather", "forward"): 1,
        ("all_to_all", "forward"): 2,
        ("all_to_all", "backward"): 3,
    }
    by_heads, gathered = {"packed": (K + P + V, R), "latent_kv": (K + V, L + R)}[strategy]
    per_token = H * by_heads * (RANKS - 1) // RANKS + gathered * (RANKS - 1)
    assert per_token == elements <= of_stock * 71_680
    forward = sent["all_gather", "forward"] + sent["all_to_all", "forward"]
    assert forward == sent["all_to_all", "backward"] == per_token * T * 2
    assert sent["all_gather", "forward"] == gathered * (RANKS - 1) * T * 2
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


def beside_stock(H, G):
    """One step of stock DeepSpeed and of UlyssesAttention, with the same result: what each all-to-all of them sends."""
    import deepspeed
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.attention.ulysses import UlyssesAttention
    from ds_mla_ulysses.integrations.deepspeed import without_cpu_extension

    with without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    B, D, rank, size = 2, 6, dist.get_rank(), dist.get_world_size()
    q, k, v, grad = (torch.randn(B, T, heads, D) for heads in (H, G, G, H))
    positions = (rank * T + torch.arange(T)).expand(B, T)

    def core(module, q_BMSD, k_BJSD, v_BJSD, mask, **kwargs):
        k, v = (x.repeat_interleave(q_BMSD.shape[1] // x.shape[1], 1) for x in (k_BJSD, v_BJSD))
        return (q_BMSD * k.sum(-1, keepdim=True) + v.cumsum(2)).transpose(1, 2), None

    stock = UlyssesSPAttentionHF(core, B, H, D, G, 1, dist.group.WORLD, local_seq_length=T, global_seq_length=T * size)
    ours = UlyssesAttention(lambda *qkv: core(None, *(x.transpose(1, 2) for x in qkv), None)[0], dist.group.WORLD)
    sent, original = [], deepspeed.comm.all_to_all_single

    def counted(output, x, *args, **kwargs):
        sent.append(x.nbytes * (size - 1) // size)
        return original(output, x, *args, **kwargs)

    def step(attention):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs)
        out.backward(grad)
        return [out.detach(), *(x.grad for x in inputs)]

    deepspeed.comm.all_to_all_single = counted
    try:
        module = torch.nn.Module()
        want = step(
            lambda *qkv: stock(module, *(x.transpose(1, 2) for x in qkv), None, position_ids=positions)[0].view(
                B, T, H, D
            )
        )
    finally:
        deepspeed.comm.all_to_all_single = original
    with dmu.TrafficMeter() as meter:
        got = step(ours)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    return sent, dict(meter.calls), dict(meter.bytes)


@pytest.mark.parametrize("size,H,G", [(2, 4, 4), (2, 8, 2), (4, 8, 4), (4, 4, 2), (4, 4, 1)])
def test_no_more_than_stock_in_half_the_collectives(size, H, G):
    for stock, calls, sent in run_ranks(size, beside_stock, H, G):
        assert len(stock) == 8 and sum(stock) > 0
        assert calls == {("all_to_all", "forward"): 2, ("all_to_all", "backward"): 2}
        assert sent["all_to_all", "forward"] == sent["all_to_all", "backward"]
        assert sum(sent.values()) <= sum(stock)
        # and stock's is the formula: q and output, and each key/value head for every rank that needs it
        assert sum(stock) == 2 * 4 * 2 * T * 6 * (2 * H + 2 * max(G, size)) * (size - 1) // size
