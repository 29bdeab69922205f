"""Peak memory of head and loss at real widths, counted over fake tensors: no logit is computed."""

import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_mla_ulysses.hf.lazy_logits import DeferredHead
from ds_mla_ulysses.layout.tiled_loss import sum_of_cross_entropies

GB = 1e9


class StoredBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make and that are alive; `peak` is the most at a time."""

    def __init__(self, given):
        super().__init__()
        self.now = self.peak = 0
        self.given = given  # kept, so that their addresses are not used again
        self.alive = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.alive.remove(key)
        self.now -= size


def peak_of_loss(tokens, hidden, vocabulary, loss_tile):
    """The bytes that head, loss and their backward need at most, with both gradients, in bf16."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16)
        x = torch.empty(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(tokens, dtype=torch.long)
        with StoredBytes([x, head.weight, labels]) as stored:
            if loss_tile is None:
                logits = head(x)
            else:
                deferred = DeferredHead(head, loss_tile)
                deferred.begin(defers=True)
                logits = deferred(x)
                deferred.end()
            loss = sum_of_cross_entropies(logits, labels)
            del logits
            loss.backward()
        assert x.grad.shape == x.shape and head.weight.grad.shape == head.weight.shape
        return stored.peak


@pytest.mark.parametrize(
    "name,hidden,vocabulary,most", [("Llama-3-8B", 4096, 128_256, 8 * GB), ("DeepSeek-V3", 7168, 129_280, 14 * GB)]
)
def test_peak(name, hidden, vocabulary, most):
    peak = peak_of_loss(131_072, hidden, vocabulary, "auto")
    print(f"{name}: {peak / GB:.2f} GB")
    assert peak <= most


def test_the_count_sees_whole_logits():
    tokens, vocabulary = 16_384, 128_256
    assert peak_of_loss(tokens, 4096, vocabulary, None) >= 12 * tokens * vocabulary


def test_more_tokens_cost_their_gradients_only():
    """Hidden states' gradients, unscaled and scaled, in bf16."""
    one, two = (peak_of_loss(tokens, 4096, 128_256, "auto") for tokens in (131_072, 262_144))
    assert two - one <= 2 * 131_072 * 4096 * 2
