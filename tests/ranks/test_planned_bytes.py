"""The planner's bytes and collectives are those that the meter counts, on 1 to 64 ranks of a group that sends nothing."""

from ds_mla_ulysses.layout.widths import HeadWidths, MLAWidths
from ds_mla_ulysses.planner.cost import sent_elements
from ds_mla_ulysses.planner.strategies import STRATEGIES


def counted(cases):
    """What the meter counts of one rank of fake groups: elements of forward and backward of one layer, and calls."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ds_mla_ulysses as dmu

    found, T = [], 2

    def leaf(*shape):
        return torch.zeros(1, T, *shape, dtype=torch.bfloat16, requires_grad=True)

    for widths, strategy, ranks, rank, head_chunks in cases:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        group = dmu.SequenceGroup.of(dist.group.WORLD)

        with dmu.TrafficMeter() as meter:
            if isinstance(widths, HeadWidths):
                q, k, v = (leaf(h, d) for h, d in ((widths.heads, widths.key), (widths.kv_heads, widths.key), (widths.kv_heads, widths.value)))  # fmt: skip

                def local(q, k, v, first_query=0):
                    return q.new_zeros(*q.shape[:3], v.shape[-1]) + q.sum() + k.sum() + v.sum()

                kind = dmu.GatherKVAttention if strategy == "gather_kv" else dmu.UlyssesAttention
                kind(local, group, head_chunks=head_chunks)(q, k, v).sum().backward()
            else:
                step_of_mla(widths, strategy, group, leaf, head_chunks)
        directions = ("forward", "backward")
        sent = [sum(n for (_, d), n in meter.bytes.items() if d == direction) // (2 * T) for direction in directions]
        found.append((*sent, sum(meter.calls.values())))
    dist.destroy_process_group()
    return found


def step_of_mla(w, strategy, group, leaf, head_chunks):
    import torch

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.layout.exchange import HeadsToTokens
    from ds_mla_ulysses.layout.gather import gather_rows

    def local(q, k, v, first_query=0):
        return q.new_zeros(*q.shape[:3], v.shape[-1]) + q.sum() + k.sum() + v.sum()

    def expand(latent, heads):
        return latent.sum(-1)[..., None, None].expand(-1, -1, heads.stop - heads.start, w.nope + w.value)

    dims = dict(nope_dim=w.nope, rope_dim=w.rope, value_dim=w.value)
    latent, shared = leaf(w.latent), leaf(w.rope)
    if strategy == "latent_qkv":
        query = leaf(w.query_latent)
        attention = dmu.LatentKVMLAAttention(local, group, **dims)
        own = attention.query_heads(w.heads)
        q_BSQ, kv_BSD = gather_rows([query, torch.cat([latent, shared], -1)], group, True)
        k, v = attention.latents.expand(*kv_BSD.split([w.latent, w.rope], -1), True, own, expand)
        q = q_BSQ.sum(-1)[..., None, None].expand(-1, -1, own.stop - own.start, w.key)
        HeadsToTokens.apply(local(q, k, v).transpose(0, 1), w.heads, group, True).sum().backward()
        return
    kinds = {
        "packed": dmu.UlyssesMLAAttention,
        "latent_kv": dmu.LatentKVMLAAttention,
        "gather_kv": dmu.GatherKVMLAAttention,
    }
    attention, q = kinds[strategy](local, group, **dims, head_chunks=head_chunks), leaf(w.heads, w.key)
    if strategy == "packed":
        attention(q, leaf(w.heads, w.nope + w.value), shared).sum().backward()
    else:
        attention(q, latent, shared, expand=expand).sum().backward()


SMALL = MLAWidths(20, 6, 2, 4, 12, 16)
CASES = [
    (widths, strategy, ranks, rank)
    for widths, strategies in (
        (SMALL, ("packed", "latent_kv", "latent_qkv", "gather_kv")),
        (MLAWidths(64, 6, 2, 4, 12, 16), ("packed", "latent_kv", "latent_qkv", "gather_kv")),
        (HeadWidths(64, 8, 6, 6), ("packed", "gather_kv")),
        (HeadWidths(6, 3, 5, 4), ("packed", "gather_kv")),
    )
    for strategy in strategies
    for ranks in (1, 2, 3, 4, 6, 8, 16, 20, 64)
    for rank in sorted({0, ranks // 2, ranks - 1})
    if ranks <= widths.heads or strategy == "gather_kv"
]


#: As many head chunks as the rank with the fewest heads has, or 3.
CHUNKED = [
    (*case, chunks)
    for case in CASES
    for chunks in {1, min(3, case[0].heads // (1 if case[1] == "gather_kv" else case[2]))}
]


def test_bytes_and_collectives_are_those_that_the_meter_counts():
    import rank_pool

    pool = rank_pool._Pool(1)  # of its own, since the worker's process group is replaced
    try:
        ((status, *answer),) = pool.call(counted, (CHUNKED,), {}, 200)
    finally:
        pool.kill()
    assert status == "ok", answer[1]
    for (widths, strategy, ranks, rank, chunks), got in zip(CHUNKED, answer[0], strict=True):
        case = widths, strategy, ranks, rank, chunks
        assert tuple(got[:2]) == sent_elements(widths, strategy, ranks, rank), case
        assert ranks == 1 or got[2] == STRATEGIES[strategy].collectives(widths, chunks), case
