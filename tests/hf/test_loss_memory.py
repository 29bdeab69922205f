"""Peak memory of head and loss at real widths, counted over fake tensors: no logit is computed."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mla_ulysses.hf.lazy_logits import DeferredHead
from ds_mla_ulysses.layout.tiled_loss import sum_of_cross_entropies
from ds_mla_ulysses.stored_bytes import StoredBytes

GB = 1e9


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


def test_the_graph_does_not_hold_the_hidden_states():
    """Until the loss is gone, that would be as much as a layer's input."""
    tokens, hidden, vocabulary = 4096, 512, 1024
    with FakeTensorMode(allow_non_fake_inputs=True):
        head = nn.Linear(hidden, vocabulary, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        x = torch.empty(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(tokens, dtype=torch.long)
        with StoredBytes([x, head.weight, labels]) as stored:
            deferred = DeferredHead(head, 64)
            deferred.begin(defers=True)
            logits = deferred(x + 1)
            deferred.end()
            loss = sum_of_cross_entropies(logits, labels)
            assert stored.now >= 2 * x.nbytes  # the hidden states and their gradient
            del logits
            assert x.nbytes <= stored.now < 1.1 * x.nbytes and loss.requires_grad
