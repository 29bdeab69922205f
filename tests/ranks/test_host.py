"""The Python calls of one layer's forward: head boundaries are computed once, not in every forward."""

import sys
from pathlib import Path

import pytest
import torch
from test_traffic import alone

H, N, R, V, L, T = 16, 4, 2, 3, 5, 4
#: Package calls of one forward, on any number of ranks.
MOST = 110


def layer(kind, size):
    """The forward of one layer on the last but one rank of a fake group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import ds_mla_ulysses as dmu

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=size - 2, world_size=size)

    def core(q, k, v, first_query=0):
        return q[..., : v.shape[3]]

    def expand(latent, heads):
        return latent[..., :1].unsqueeze(-1).expand(-1, -1, heads.stop - heads.start, N + V)

    def leaf(*shape):
        return torch.randn(1, T, *shape, requires_grad=True)

    if kind == "UlyssesAttention":
        attention = dmu.UlyssesAttention(core, dist.group.WORLD)
        tensors, settings = (leaf(H, N), leaf(H // 2, N), leaf(H // 2, V)), {}
    else:
        attention = getattr(dmu, kind)(core, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)
        packed = kind == "UlyssesMLAAttention"
        tensors = leaf(H, N + R), leaf(H, N + V) if packed else leaf(L), leaf(R)
        settings = {} if packed else {"expand": expand}
    return lambda: attention(*tensors, **settings)


def package_calls(kind, size):
    import ds_mla_ulysses

    forward, folder, calls = layer(kind, size), str(Path(ds_mla_ulysses.__file__).parent), []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name)

    forward()  # the boundaries are computed here
    sys.setprofile(count)
    try:
        forward()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    "kind", ["UlyssesMLAAttention", "LatentKVMLAAttention", "GatherKVMLAAttention", "UlyssesAttention"]
)
def test_calls_of_a_forward(kind, size):
    calls = alone(package_calls, kind, size)
    assert f"{kind}.forward" in calls or "forward" in calls
    assert len(calls) <= MOST, calls


def compiles_without_a_word_of_caches():
    import warnings

    step = torch.compile(layer("UlyssesMLAAttention", 8), backend="aot_eager", fullgraph=True, dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step().sum().backward()
    return [str(w.message) for w in caught if "lru_cache" in str(w.message)]


def test_a_compiler_sees_no_cache():
    assert alone(compiles_without_a_word_of_caches) == []
