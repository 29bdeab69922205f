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
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        kept.append(torch.empty_like(q, dtype=torch.float32))  # in which the gradient of q is summed
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Upstream(torch.autograd.Function):
    """The layer after attention: it keeps the output, and nobody but autograd holds the gradient that it makes."""

    @staticmethod
    def forward(ctx, out):
        ctx.save_for_backward(out)
        return out.new_empty(())

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return torch.empty_like(out)


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
            Upstream.apply(out).backward()
    return stored.peak


@pytest.mark.parametrize("kind", ["LatentKVMLAAttention", "GatherKVMLAAttention"])
def test_memory_does_not_grow_with_the_number_of_chunks(kind):
    peaks = [peak(kind, n) for n in (1, 4, 16, 64)]
    assert peaks == sorted(peaks, reverse=True), peaks


#: The widths of Llama-3-8B, at a million tokens on 8 ranks.
HEADS, KV_HEADS, RANKS, LOCAL = 32, 8, 8, 131_072


@pytest.fixture
def exchanges(monkeypatch):
    """Runs the bodies of the exchanges, so that their buffers are counted. Nothing is sent."""
    from ds_mla_ulysses.layout import chunked_exchange, exchange

    for operator in ("_tokens_to_heads", "_start_tokens_to_heads", "_heads_to_tokens", "_write_chunk"):
        monkeypatch.setattr(exchange, operator, getattr(exchange, operator)._init_fn)
    monkeypatch.setattr(exchange, "all_to_all", lambda *_: None)
    monkeypatch.setattr(exchange, "start_all_to_all", lambda wire, received, *_: wire.new_empty(sum(received)))
    for module in (exchange, chunked_exchange):
        monkeypatch.setattr(module, "wait", lambda pending: pending)


def kilobytes(head_chunks, heads=HEADS, kv_heads=KV_HEADS, kind="UlyssesAttention", rank=3, trains=True):
    """The peak of a dense layer's attention, forward and backward, in KB per local token."""
    import ds_mla_ulysses as dmu

    group = dmu.SequenceGroup(None, rank, RANKS if kind == "UlyssesAttention" else 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [(1, LOCAL, h, V) for h in (heads, kv_heads, kv_heads)]
        tensors = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=trains) for shape in shapes]
        attention = getattr(dmu, kind)(
            lambda q, k, v, first_query=0: FlashStandIn.apply(q, k, v), group, head_chunks=head_chunks
        )
        with StoredBytes(tensors) as stored:
            out = attention(*tensors)
            if trains:
                Upstream.apply(out).backward()
    return stored.peak / LOCAL / 1e3


@pytest.mark.parametrize("rank", [0, 3])
def test_llama_on_eight_ranks(exchanges, rank):
    """Output 8.2 KB, its gradient as much until the chunks have theirs; keys, values 4.1 and their gradients' sum 8.2."""
    peaks = [kilobytes(n, rank=rank) for n in (1, 2, 4)]
    assert peaks == pytest.approx([65.7, 49.2, 45.1], abs=0.1)


def test_forward_without_gradients(exchanges):
    """Only the output stays of a chunk."""
    peaks = [kilobytes(n, trains=False) for n in (1, 2, 4)]
    assert peaks == pytest.approx([36.9, 24.6, 18.5], abs=0.1)


@pytest.mark.parametrize("kind", ["UlyssesAttention", "GatherKVAttention"])
@pytest.mark.parametrize("heads,kv_heads", [(128, 8), (128, 16), (128, 128), (72, 24)])
def test_memory_of_dense_layers_does_not_grow_with_the_number_of_chunks(exchanges, kind, heads, kv_heads):
    peaks = [kilobytes(n, heads, kv_heads, kind) for n in (1, 2, 3, 4, 8, 9, 16) if n <= heads // RANKS]
    assert peaks == sorted(peaks, reverse=True), peaks
