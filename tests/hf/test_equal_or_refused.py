"""Model types that were once accepted and wrong: equal to one process, or refused by `parallelize`."""

import re

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, random_batch, reference_step
from rank_pool import run_ranks
from test_parity import sharded_step

SIZES = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, pad_token_id=0)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
TEXT = SIZES | HEADS
GEMMA3 = dict(
    text_config=TEXT | dict(head_dim=16), vision_config=VISION, mm_tokens_per_image=4, image_token_id=61,
    boi_token_id=62, eoi_token_id=63,
)  # fmt: skip
#: A part of the refusal, or None if the numbers are those of one process.
OUTCOMES = {
    "stablelm": (TEXT, "StableLmAttention .* does not receive the keyword arguments of the model's forward"),
    "nemotron": (TEXT, "NemotronAttention .* does not receive the keyword arguments of the model's forward"),
    "doge": (TEXT, "DogeAttention .* gives the attention function a mask or bias that it makes itself"),
    "deepseek_v4": (TEXT, "has layers of type heavily_compressed_attention, whose masks this package does not support"),
    "gemma3": (GEMMA3, None),
}


def model_of(model_type):
    """The model in float64, every parameter moved off its initial value: zeros and ones hide faults."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **OUTCOMES[model_type][0])
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def outcome(model_type):
    """The refusal, or None after the comparison. One process runs only if ranks do: it may not be able to."""
    import ds_mla_ulysses as dmu

    model = model_of(model_type)
    try:
        handle = dmu.parallelize(model)
    except dmu.UnsupportedModelError as error:
        return str(error)
    for batch in (random_batch(2, 33, vocab=60), packed_batch([[13, 5, 15], [20, 1, 12]], vocab=60)):
        plain = model_of(model_type)
        want_loss, want, _ = reference_step(plain, batch)
        loss, got, _ = sharded_step(model, batch, handle)
        assert gradients(plain) and abs(loss - want_loss) <= 1e-9 * abs(want_loss), (loss, want_loss)
        assert_gradients(got, want, 1e-6)
        model.zero_grad()
    return None


@pytest.mark.parametrize("model_type", OUTCOMES)
def test_equal_or_refused(model_type):
    refusals, wanted = run_ranks(2, outcome, model_type), OUTCOMES[model_type][1]
    assert len(set(refusals)) == 1
    assert refusals[0] is None if wanted is None else re.search(wanted, refusals[0]), refusals
