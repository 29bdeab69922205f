"""The bytes sent: for DeepSeek-V3 on 8 ranks they follow the formula, for other attention stock DeepSpeed sends no less."""

import pytest
import torch
from rank_pool import run_ranks

H, N, R, V, L, Q, T, RANKS = 128, 128, 64, 128, 512, 1536, 4, 8
K, P = N + R, N + V


def fake_group():
    """Returns one rank's group of 8 ranks, whose collectives are counted and move nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=RANKS)
    return dist.group.WORLD


def on_eight_ranks(strategy, compiled):
    import ds_mla_ulysses as dmu

    widths = dict(nope_dim=N, rope_dim=R, value_dim=V)
    if strategy == "gather_kv":
        attention = dmu.GatherKVMLAAttention(
            lambda q, k, v, first_query: q[..., :V] + (k[..., :V] + v)[:, :T], fake_group(), **widths
        )
    else:
        kind = dmu.UlyssesMLAAttention if strategy == "packed" else dmu.LatentKVMLAAttention
        attention = kind(lambda q, k, v: q[..., :V] + k[..., :V] + v, fake_group(), **widths)
    step = torch.compile(attention, backend="aot_eager") if compiled else attention
    shapes = [(1, T, H, K), (1, T, H, P) if strategy == "packed" else (1, T, L), (1, T, R)]
    q, kv, k_shared = (torch.zeros(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)

    def expand(latent, heads):
        return latent[..., None, :P].expand(-1, -1, heads.stop - heads.start, -1)

    with dmu.TrafficMeter() as meter:
        step(q, kv, k_shared, 0, **({} if strategy == "packed" else {"expand": expand})).sum().backward()
    return dict(meter.calls), dict(meter.bytes), meter.total_bytes


def layer_on_eight_ranks(strategy):
    """Counts the traffic of one layer with the real widths of DeepSeek-V3's attention, as parallelize patches it."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    import ds_mla_ulysses as dmu

    config = DeepseekV3Config(
        hidden_size=32, num_hidden_layers=1, first_k_dense_replace=1, intermediate_size=32, vocab_size=16,
        num_attention_heads=H, num_key_value_heads=H, qk_nope_head_dim=N, qk_rope_head_dim=R, v_head_dim=V,
        kv_lora_rank=L, q_lora_rank=Q,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).bfloat16()
    inputs = torch.zeros(1, T, 32, dtype=torch.bfloat16)
    dmu.parallelize(model, strategy=strategy, group=fake_group())
    from ds_mla_ulysses.hf.latent_forward import DOCUMENTS
    from ds_mla_ulysses.layout.documents import Documents

    starts = torch.zeros(1, T * RANKS, dtype=torch.bool)
    starts[:, 0] = True
    positions = torch.arange(3 * T, 4 * T)[None]
    # Only the layer runs, because a fake group cannot answer the exchange before the first layer.
    with dmu.TrafficMeter() as meter:
        layer = model.model.layers[0].self_attn
        embeddings = model.model.rotary_emb(inputs, positions)
        settings = {"position_embeddings": embeddings, "attention_mask": None, DOCUMENTS: Documents(starts)}
        layer(hidden_states=inputs.requires_grad_(), **settings)[0].sum().backward()
    meter.calls.pop(("all_gather", "setup"), None)
    setup = meter.bytes.pop(("all_gather", "setup"), 0)
    return dict(meter.calls), dict(meter.bytes), meter.total_bytes, setup


def alone(fn, *args):
    # The function replaces the worker's process group, so it needs a separate pool.
    import rank_pool

    pool = rank_pool._Pool(1)
    try:
        ((status, *answer),) = pool.call(fn, args, {}, 120)
    finally:
        pool.kill()
    assert status == "ok", answer
    return answer[0]


#: For DeepSeek-V3: widths sent by heads and gathered, elements per token, and their highest share of stock DeepSpeed's.
FORMULAS = {
    "packed": (K + P + V, R, 64_960, 0.907),
    "latent_kv": (K + V, L + R, 39_872, 0.557),
    "latent_qkv": (V, Q + L + R, 29_120, 0.407),
    "gather_kv": (0, L + R, 4_032, 0.057),
}


def assert_formula(strategy, calls, sent, total):
    by_heads, gathered, elements, of_stock = FORMULAS[strategy]
    exchanges = {"packed": 2, "latent_kv": 2, "latent_qkv": 1, "gather_kv": 0}[strategy]
    wanted = {("all_gather", "forward"): 1, ("all_to_all", "backward"): exchanges + 1}
    assert calls == wanted | ({("all_to_all", "forward"): exchanges} if exchanges else {})
    per_token = H * by_heads * (RANKS - 1) // RANKS + gathered * (RANKS - 1)
    assert per_token == elements <= of_stock * 71_680
    forward = sent["all_gather", "forward"] + sent.get(("all_to_all", "forward"), 0)
    assert forward == sent["all_to_all", "backward"] == per_token * T * 2
    assert sent["all_gather", "forward"] == gathered * (RANKS - 1) * T * 2
    assert total == 2 * forward


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("strategy", ["packed", "latent_kv", "gather_kv"])
def test_deepseek_v3_on_eight_ranks(strategy, compiled):
    assert_formula(strategy, *alone(on_eight_ranks, strategy, compiled))


@pytest.mark.parametrize("strategy", FORMULAS)
def test_layer_of_deepseek_v3_on_eight_ranks(strategy):
    *counted, setup = alone(layer_on_eight_ranks, strategy)
    assert_formula(strategy, *counted)
    # RoPE's tables are gathered once per forward if a layer runs on all tokens, and never otherwise.
    assert (setup > 0) == (strategy == "latent_qkv")


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


def counted_small_ones():
    """Collectives outside of attention: calls and bytes of each."""
    import torch.distributed as dist

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.comm import agreement, collectives

    group, x = dmu.SequenceGroup.of(dist.group.WORLD), torch.ones(6)
    parameter = torch.nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    counted = {}
    for run in (
        lambda: agreement.gather_objects(group, "x"),
        lambda: agreement.gather_numbers([1, 2], group),
        lambda: agreement.all_reduce(x, group, "loss"),
        lambda: agreement.sum_gradients([parameter], group),
        lambda: collectives.gather_to(x, 1, group, "evaluation"),
    ):
        with dmu.TrafficMeter() as meter:
            run()
        assert meter.calls.keys() == meter.bytes.keys()
        counted |= {kind: (calls, meter.bytes[kind]) for kind, calls in meter.calls.items()}
    gathered = collectives.gather_to(x * group.rank, 1, group, "evaluation")
    return counted, None if gathered is None else [y.tolist() for y in gathered]


def test_collectives_outside_of_attention_are_counted():
    for rank, (counted, gathered) in enumerate(run_ranks(2, counted_small_ones)):
        assert counted == {
            ("all_gather_object", "setup"): (1, 0),
            ("all_gather", "setup"): (1, 2 * 8),
            ("all_reduce", "loss"): (1, 6 * 4),
            ("all_reduce", "gradients"): (2, 4 + 8 * 4),
            ("gather", "evaluation"): (1, 0 if rank == 1 else 6 * 4),
        }
        assert gathered == (None if rank == 0 else [[0.0] * 6, [2.0] * 6])


def beside_stock(H, G):
    """Compares one step of stock DeepSpeed and of UlyssesAttention and returns what each of their all-to-alls sends."""
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
        # Stock's bytes follow the formula: q and output, and each KV head once for every rank that needs it.
        assert sum(stock) == 2 * 4 * 2 * T * 6 * (2 * H + 2 * max(G, size)) * (size - 1) // size
