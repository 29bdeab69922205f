"""Peak memory of attention in head chunks, counted over fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mla_ulysses.stored_bytes import StoredBytes

H, L, R, N, V, T = 64, 512, 64, 128, 128, 4096


class FlashStandIn(torch.autograd.Function):
    """Keeps what flash attention keeps, and makes the gradients that it makes."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = v.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def peak(kind, head_chunks):
    """Bytes of one forward and backward, without the given tensors, of one process that holds T tokens."""
    import ds_mla_ulysses as dmu

    def expand(latent, heads):
        return (latent @ weight[heads.start * (N + V) : heads.stop * (N + V)].T).unflatten(-1, (-1, N + V))

    with FakeTensorMode(allow_non_fake_inputs=True):
        made = dict(dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(H * (N + V), L, **made)
        q, latent = torch.empty(1, T, H, N + R, **made), torch.empty(1, T, L, **made)
        key = torch.empty(1, T, R, **made)
        attention = getattr(dmu, kind)(
            lambda q, k, v, first_query=0: FlashStandIn.apply(q, k, v),
            None,
            nope_dim=N,
            rope_dim=R,
            value_dim=V,
            head_chunks=head_chunks,
        )
        with StoredBytes([weight, q, latent, key]) as stored:
            out = attention(q, latent, key, expand=expand)
            out.backward(torch.empty_like(out))
    return stored.peak


@pytest.mark.parametrize("kind", ["LatentKVMLAAttention", "GatherKVMLAAttention"])
def test_memory_does_not_grow_with_the_number_of_chunks(kind):
    peaks = [peak(kind, n) for n in (1, 4, 16, 64)]
    assert peaks == sorted(peaks, reverse=True), peaks
