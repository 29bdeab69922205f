"""What a checkpoint keeps of attention, in one process."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ds_mla_ulysses as dmu
from ds_mla_ulysses.comm.kept import ARRIVING, RETURNED, attend_once, kept

KEEPS = pytest.mark.parametrize("context_fn", [dmu.keep_attention, dmu.keep_output])


class Attention:
    """Attention with everything that a kept call has to cope with, and how often it ran."""

    def __init__(self, dropout=0.0):
        self.calls, self.dropout = 0, dropout

    def __call__(self, q, k, v, *, sinks=None, scale=1.0):
        self.calls += 1
        scores = q @ k[..., : q.shape[-1]].mT * scale
        if sinks is not None:
            scores = scores + sinks
        weights = torch.nn.functional.dropout(scores.softmax(-1), self.dropout)
        return weights @ (v * 2)


def layer(attention, weight, x, sinks, drop=0.0, in_place=False):
    """q, k and v in one buffer, as they arrive, and a layer's work before and after."""
    q, k, v = (x @ weight).tanh().split(4, -1)
    out = attend_once(attention, q, k, v, sinks=sinks, scale=0.5)
    out = out.relu_() if in_place else out.relu()
    return torch.nn.functional.dropout(out @ weight[:4, :4], drop).sin()


def tensors():
    torch.manual_seed(0)
    shapes = (4, 12), (2, 6, 4), (6,)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def step(context_fn, attention, **settings):
    weight, x, sinks = tensors()
    torch.manual_seed(1)
    if context_fn is None:
        out = layer(attention, weight, x, sinks, **settings)
    else:
        more = {} if context_fn == "full" else {"context_fn": context_fn}
        out = checkpoint(layer, attention, weight, x, sinks, use_reentrant=False, **more, **settings)
    out.sum().backward()
    return [out.detach(), weight.grad, x.grad, sinks.grad], torch.rand(())


@pytest.mark.parametrize("dropout,drop", [(0.0, 0.0), (0.0, 0.5), (0.5, 0.5)])
@KEEPS
def test_gradients(context_fn, dropout, drop):
    """Random numbers after attention are those of the forward, although attention does not draw its own again."""
    want = step(None, Attention(dropout), drop=drop)
    full, attention = Attention(dropout), Attention(dropout)
    recomputed, got = step("full", full, drop=drop), step(context_fn, attention, drop=drop)
    assert (full.calls, attention.calls) == (2, 1)
    for a, b, c in zip(want[0], recomputed[0], got[0], strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert torch.equal(want[1], got[1])  # the generator goes on alike


def test_a_change_in_place_is_noticed():
    with pytest.raises(RuntimeError, match="kept for recomputation was changed in place"):
        step(dmu.keep_attention, Attention(), in_place=True)


def sent(x, calls):
    """An exchange, attention, and the exchange of its output."""
    y = kept(lambda: calls.append("in") or x.detach() + 1, ARRIVING) + x
    out = attend_once(Attention(), y, y, y)
    return (out + kept(lambda: calls.append("out") or out.detach() * 2, RETURNED)).sin()


@pytest.mark.parametrize(
    "context_fn,want", [(dmu.keep_attention, ["in", "out"]), (dmu.keep_output, ["in", "out", "in"])]
)
def test_exchanges(context_fn, want):
    calls = []
    x = torch.ones(2, 3, requires_grad=True)
    checkpoint(sent, x, calls, use_reentrant=False, context_fn=context_fn).sum().backward()
    assert calls == want


def without_attention(x):
    return x.sin()


@KEEPS
def test_nothing_is_kept(context_fn):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="nothing was kept for recomputation"):
        checkpoint(without_attention, x, use_reentrant=False, context_fn=context_fn)


def test_another_recomputation_is_noticed():
    x, others = torch.ones(2, 3, requires_grad=True), []

    def changing(x):
        out = attend_once(Attention(), x, x, x)
        others.append(1)
        if len(others) > 1:
            out = out + kept(lambda: x.detach(), RETURNED)
        return (out * 2).sin()

    out = checkpoint(changing, x, use_reentrant=False, context_fn=dmu.keep_attention)
    with pytest.raises(RuntimeError, match="came to the exchange of its output where its forward came to None"):
        out.sum().backward()


def test_a_second_backward_is_refused():
    weight, x, sinks = tensors()
    run = dict(use_reentrant=False, context_fn=dmu.keep_attention)
    out = checkpoint(layer, Attention(), weight, x, sinks, **run).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran a second time through attention that was kept"):
        out.backward()


def test_arguments_that_need_no_gradient():
    calls, x = Attention(), torch.randn(2, 3)
    weight = torch.randn(3, 3, requires_grad=True)

    def frozen(x):
        return (attend_once(calls, x, x, x) @ weight).sin()

    checkpoint(frozen, x, use_reentrant=False, context_fn=dmu.keep_attention).sum().backward()
    got, calls.calls = weight.grad, 0
    weight.grad = None
    frozen(x).sum().backward()
    assert calls.calls == 1 and torch.equal(got, weight.grad)


@KEEPS
def test_without_gradients_nothing_is_kept_and_all_runs(context_fn):
    with torch.no_grad():
        weight, x, sinks = tensors()
        calls = Attention()
        out = checkpoint(layer, calls, weight, x, sinks, use_reentrant=False, context_fn=context_fn)
    assert calls.calls == 1 and not out.requires_grad


def test_tensors_that_share_memory_with_arguments_are_not_kept():
    """Of the buffer of q, k and v nothing stays, although attention saves views of it."""
    storage = []

    def watched(x):
        buffer = torch.cat([x, x, x], -1)
        storage.append(weakref.ref(buffer.untyped_storage()))
        q, k, v = buffer.split(4, -1)
        return attend_once(Attention(), q, k, v).sin()

    x = torch.randn(6, 4, requires_grad=True)
    out = checkpoint(watched, x, use_reentrant=False, context_fn=dmu.keep_attention)
    assert storage[0]() is None
    out.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("backward", [False, True])
def test_everything_is_freed(backward):
    """Also if no backward follows, and while the loss is still there."""
    saved = []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q):
            out = q * 2
            saved.append(weakref.ref(out.untyped_storage()))
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    def watched(x):
        return attend_once(Saving.apply, x.sin()).sin().sum()

    x = torch.randn(6, 4, requires_grad=True)
    out = checkpoint(watched, x, use_reentrant=False, context_fn=dmu.keep_attention)
    assert saved[0]() is not None
    if backward:
        out.backward()
    else:
        del out
        gc.collect()  # torch's frame of a checkpoint refers to itself
    assert saved[0]() is None and len(saved) == 1


def test_fake_tensors():
    """Memory is measured with them."""
    with FakeTensorMode():
        got, _ = step(dmu.keep_attention, Attention())
    assert [tuple(x.shape) for x in got] == [(2, 6, 4), (4, 12), (2, 6, 4), (6,)]
