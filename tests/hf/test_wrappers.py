"""Models with images, sounds or PEFT around the text model, trained on text: masks, caches and errors of the wrapper."""

import pytest
import torch
from models import assert_gradients, gradients, packed_batch, padded_batch, random_batch
from rank_pool import raises_on_ranks, run_ranks
from test_parity import sharded_step
from transformers import CONFIG_MAPPING

VOCAB = 96
_TEXT = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=128,
    initializer_range=0.2,
)  # fmt: skip
_SLIDES = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_SIGLIP = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
_GEMMA4 = _TEXT | _SLIDES | dict(
    global_head_dim=16, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=4, num_kv_shared_layers=0
)  # fmt: skip
_LLAMA = dict(model_type="llama", **_TEXT)
_IDEFICS = dict(text_config=_LLAMA, vision_config=_SIGLIP, image_token_id=90)

#: Model types whose wrapper makes something of its own, and small configs. No token of a test is one of an image (>= 90).
CONFIGS = {
    "gemma3": dict(
        text_config=_TEXT | _SLIDES, vision_config=_SIGLIP, mm_tokens_per_image=4, image_token_id=90, boi_token_id=91,
        eoi_token_id=92,
    ),
    "gemma4": dict(
        text_config=_GEMMA4, audio_config=None, image_token_id=90, video_token_id=91, audio_token_id=92,
        vision_config=dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
            head_dim=8, global_head_dim=8,
        ),
    ),
    "gemma4_unified": dict(text_config=_GEMMA4, image_token_id=90, video_token_id=91, audio_token_id=92),
    # Layers that use another layer's keys and values, keys that are values, and experts, as the published models have.
    "gemma4+": dict(
        audio_config=None, image_token_id=90, video_token_id=91, audio_token_id=92,
        text_config=_GEMMA4 | dict(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
            attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True, num_experts=4, top_k_experts=2,
            moe_intermediate_size=16, use_bidirectional_attention="vision",
        ),
        vision_config=dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
            head_dim=8, global_head_dim=8,
        ),
    ),
    # Its default is bidirectional, which is refused.
    "paligemma": dict(
        text_config=dict(model_type="gemma", use_bidirectional_attention=False, **_TEXT), vision_config=_SIGLIP,
        image_token_id=90,
    ),
    # Its default vision model and adapter have half a billion parameters.
    "molmo2": dict(
        text_config=_TEXT, image_token_id=90,
        vision_config=_SIGLIP | dict(num_key_value_heads=2, head_dim=8, image_size=None),
        adapter_config=dict(
            hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            text_hidden_size=32, vision_feature_layer=[0],
        ),
    ),
    "idefics2": _IDEFICS | dict(
        perceiver_config=dict(
            hidden_size=32, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=2, num_key_value_heads=1,
            resampler_head_dim=8,
        )
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}  # fmt: skip
#: Where images show in the token types.
TYPES = {
    "gemma3": "token_type_ids", "gemma4": "mm_token_type_ids",
    "gemma4_unified": "mm_token_type_ids", "molmo2": "mm_token_type_ids",
}  # fmt: skip
#: Model types that older releases of transformers lack are left out there.
KNOWN = [model_type for model_type in CONFIGS if model_type in CONFIG_MAPPING]
#: Models that want token types in training.
WANTS_TYPES = {"molmo2"}
DOCUMENTS = [[13, 5, 15], [20, 1, 12]]


def wrapped_model(model_type):
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type.rstrip("+"), **CONFIGS[model_type])
    config._experts_implementation = "eager"  # which fp64 needs
    config.text_config._experts_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.train()


def parallel(model_type):
    import ds_mla_ulysses as dmu

    model = wrapped_model(model_type)
    return model, dmu.parallelize(model)


def batch_of(kind):
    """The batch, and the documents of its rows as (row, start, length)."""
    if kind == "packed":
        batch, lengths = packed_batch(DOCUMENTS, vocab=90), DOCUMENTS
        starts = [[0, *torch.tensor(row).cumsum(0)[:-1].tolist()] for row in lengths]
        return batch, [(i, s, n) for i in range(2) for s, n in zip(starts[i], lengths[i], strict=True)]
    if kind == "left":
        batch = padded_batch([33, 20], 33, "left", vocab=90)
        batch["labels"][1, 13] = -100  # which the last padding token would predict
        return batch, [(0, 0, 33), (1, 13, 20)]
    return random_batch(2, 33, vocab=90), [(0, 0, 33), (1, 0, 33)]


def each_alone(model, model_type, kind):
    """Loss and gradients of one process in which each document is run alone, without mask and padding."""
    batch, documents = batch_of(kind)
    targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    loss = torch.zeros((), dtype=torch.float64)
    for row, start, length in documents:
        part = slice(start, start + length)
        ids = batch["input_ids"][row : row + 1, part]
        types = {TYPES[model_type]: torch.zeros_like(ids)} if model_type in WANTS_TYPES else {}
        logits = model(input_ids=ids, position_ids=torch.arange(length)[None], use_cache=False, **types).logits
        loss = loss + torch.nn.functional.cross_entropy(
            logits[0], targets[row, part], reduction="sum", ignore_index=-100
        )
    loss = loss / (targets != -100).sum()
    loss.backward()
    return loss.item(), gradients(model)


def compare(model_type, kind, types=None):
    want = each_alone(wrapped_model(model_type), model_type, kind)
    model, handle = parallel(model_type)
    batch, _ = batch_of(kind)
    if types is not None:
        batch[TYPES[model_type]] = torch.full_like(batch["input_ids"], types)
    loss, grads, _ = sharded_step(model, batch, handle)
    assert abs(loss - want[0]) <= 1e-9 * max(1, abs(want[0])), (loss, want[0])
    assert_gradients(grads, want[1], 1e-6)


@pytest.mark.parametrize("kind", ["plain", "packed", "left"])
@pytest.mark.parametrize("model_type", KNOWN)
def test_text_in_a_wrapper_equals_each_document_alone(model_type, kind):
    run_ranks(2, compare, model_type, kind)


@pytest.mark.parametrize("model_type", [m for m in TYPES if m in KNOWN])
def test_token_types_of_text(model_type):
    run_ranks(2, compare, model_type, "left", 0)


def without_positions():
    """Gemma 4's wrapper counts positions itself, from 0 on each rank; the text model's hook counts them in the sequence."""
    batch = random_batch(2, 34, vocab=90)
    want = wrapped_model("gemma4")(input_ids=batch["input_ids"], use_cache=False).logits
    model, handle = parallel("gemma4")
    inputs = handle.shard(batch).inputs
    with torch.no_grad():
        got = model(input_ids=inputs["input_ids"], ulysses_layout=inputs["ulysses_layout"]).logits
    torch.testing.assert_close(got, want.chunk(2, dim=1)[handle.group.rank], rtol=1e-9, atol=1e-9)


def test_wrappers_do_not_count_positions():
    run_ranks(2, without_positions)


def with_peft(outside):
    """PEFT calls the forward of its model, whose hooks do not run then."""
    from peft import LoraConfig, get_peft_model

    import ds_mla_ulysses as dmu

    def adapted(model):
        torch.manual_seed(2)
        config = LoraConfig(target_modules=r".*language_model.*\.q_proj", init_lora_weights=False, lora_dropout=0.0)
        return get_peft_model(model, config).double()

    want = each_alone(adapted(wrapped_model("gemma3")), "gemma3", "left")
    batch, _ = batch_of("left")
    model = wrapped_model("gemma3")
    if outside:
        handle = dmu.parallelize(model)
        model = adapted(model)
    else:
        model = adapted(model)
        handle = dmu.parallelize(model)
    shard = handle.shard(batch)
    loss = handle.loss(model(**shard.inputs).logits, shard)
    loss.backward()
    handle.sum_gradients(model)
    assert abs(loss.item() - want[0]) <= 1e-9 * max(1, abs(want[0]))
    assert_gradients(gradients(model), want[1], 1e-6)


@pytest.mark.parametrize("outside", [False, True])
def test_peft_around_a_wrapper(outside):
    run_ranks(2, with_peft, outside)


def labels_past_the_hooks(model_type, outside):
    """Calls the forward of the outermost model itself, as PEFT does if it came later."""
    from models import tiny_model
    from peft import LoraConfig, get_peft_model

    import ds_mla_ulysses as dmu

    model = wrapped_model(model_type) if model_type in CONFIGS else tiny_model(model_type)
    handle = dmu.parallelize(model)
    inputs = dict(handle.shard(random_batch(1, 12, vocab=90)).inputs)
    inputs.pop("shift_labels", None)
    inputs["labels"] = inputs["input_ids"]
    if outside:
        adapted = get_peft_model(model, LoraConfig(target_modules=r".*\.q_proj"))
        return adapted(**inputs)
    return model.forward(**inputs)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma3", "qwen3_moe"])
def test_labels_that_pass_no_hook(model_type, outside):
    raises_on_ranks(
        2, ValueError, "labels cannot be given to a parallelized", labels_past_the_hooks, model_type, outside
    )


def bypassed(how):
    """Forwards that begin below the outermost module."""
    want = wrapped_model("gemma3")(input_ids=batch_of("plain")[0]["input_ids"], use_cache=False).logits
    model, handle = parallel("gemma3")
    inputs = handle.shard(batch_of("plain")[0]).inputs
    if how == "forward":
        got = model.forward(**inputs).logits
    elif how == "inner":
        got = model.lm_head(model.model(**inputs)[0])
    else:
        got = model.lm_head(model.model.language_model(**inputs)[0])
    parts = [torch.empty_like(got) for _ in range(2)]
    torch.distributed.all_gather(parts, got.detach().contiguous())
    torch.testing.assert_close(torch.cat(parts, 1)[:, : want.shape[1]], want.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["forward", "inner", "text model"])
def test_forwards_below_the_outermost_module(how):
    run_ranks(2, bypassed, how)


def after_a_failure():
    """A layout that did not arrive is forgotten when the forward ends."""
    model, handle = parallel("gemma3")
    inner = model.model
    forward = inner.forward
    inner.forward = lambda **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(**handle.shard(random_batch(1, 12, vocab=90)).inputs)
    inner.forward = forward
    with torch.no_grad():
        inner.language_model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_a_layout_that_did_not_arrive_is_forgotten():
    run_ranks(2, after_a_failure)


def bad_forward(model_type, name, of_rank_1_only, value):
    model, handle = parallel(model_type)
    inputs = dict(handle.shard(random_batch(1, 12, vocab=90)).inputs)
    if handle.group.rank == 1 or not of_rank_1_only:
        if value is None:
            del inputs[name]
        elif name == "input_ids":
            inputs[name][0, 3] = value
        else:
            inputs[name] = torch.full(value, 1) if isinstance(value, tuple) else value
    elif name in TYPES.values() and model_type in TYPES:
        inputs[name] = torch.zeros(1, 6, dtype=torch.long)
    return model(**inputs)


@pytest.mark.parametrize(
    "model_type,name,of_rank_1_only,value,message",
    [
        *(
            (m, name, True, (1, 6), f"rank 1 of the group: {name} marks tokens of images")
            for m, name in TYPES.items()
            if m in KNOWN
        ),
        *((m, "pixel_values", False, (1, 3, 16, 16), "rank 0 of the group: pixel_values are not") for m in KNOWN),
        ("gemma3", "pixel_values", True, (1, 3, 16, 16), "rank 1 of the group: pixel_values are not supported"),
        (
            "gemma3",
            "mm_encoder_outputs",
            True,
            {"image": 1},
            "rank 1 of the group: mm_encoder_outputs are not supported",
        ),
        ("gemma4", "input_features", True, (1, 8, 8), "rank 1 of the group: input_features are not supported"),
        ("gemma3", "input_ids", True, VOCAB, "rank 1 of the group: input_ids has 96, which is outside the vocabulary"),
        ("idefics3", "input_ids", True, -1, "rank 1 of the group: input_ids has -1, which is outside the vocabulary"),
        ("smolvlm", "input_ids", True, None, "rank 1 of the group: give exactly one of input_ids and inputs_embeds"),
        ("gemma3", "token_type_ids", True, 1, "rank 1 of the group: token_type_ids must be a tensor, got int"),
        ("paligemma", "token_type_ids", True, (1, 6), "rank 1 of the group: token_type_ids marks a prefix"),
        ("gemma3", "attention_mask", False, {"full_attention": None}, "attention_mask must be a tensor .*, got dict"),
    ],
)
def test_refused_on_every_rank(model_type, name, of_rank_1_only, value, message):
    raises_on_ranks(2, ValueError, message, bad_forward, model_type, name, of_rank_1_only, value)


def kimi_token():
    """Kimi-K2.5 embeds its tokens before sequence parallelism begins."""
    from models import tiny_model

    import ds_mla_ulysses as dmu

    model = tiny_model("kimi_k25")
    handle = dmu.parallelize(model)
    inputs = handle.shard(random_batch(1, 12)).inputs
    if handle.group.rank == 1:
        inputs["input_ids"][0, 0] = 1000
    return model(**inputs)


def test_a_token_outside_the_vocabulary_of_a_wrapper():
    raises_on_ranks(2, ValueError, "rank 1 of the group: input_ids has 1000, which is outside", kimi_token)


def lost_layout():
    model, handle = parallel("gemma3")
    inner = model.model
    forward = inner.forward
    inner.forward = lambda input_ids=None, **kwargs: forward(input_ids=input_ids)
    with torch.no_grad():
        return model(**handle.shard(random_batch(1, 12, vocab=90)).inputs)


def test_a_wrapper_that_loses_the_layout():
    raises_on_ranks(2, RuntimeError, "does not hand its keyword arguments on to Gemma3TextModel", lost_layout)


def test_prefixes_that_attend_in_both_directions():
    from transformers import AutoConfig, AutoModelForImageTextToText

    import ds_mla_ulysses as dmu

    config = AutoConfig.for_model("paligemma", text_config=dict(model_type="gemma", **_TEXT), vision_config=_SIGLIP)
    with pytest.raises(dmu.UnsupportedModelError, match="paligemma.*use_bidirectional_attention"):
        dmu.parallelize(AutoModelForImageTextToText.from_config(config))


def test_a_classifier_of_images():
    from transformers import ShieldGemma2Config, ShieldGemma2ForImageClassification

    import ds_mla_ulysses as dmu

    config = ShieldGemma2Config(**CONFIGS["gemma3"])
    with pytest.raises(dmu.UnsupportedModelError, match="shieldgemma2.*pools over the sequence"):
        dmu.parallelize(ShieldGemma2ForImageClassification(config))
