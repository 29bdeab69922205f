"""The probe sees what layers hand to the attention function, which the code of a forward does not tell."""

import copy
import types

import pytest
import torch
from models import DENSE, FAMILIES, tiny_config, tiny_model

import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.families import find_attention
from ds_mla_ulysses.hf.probe import probe, returns_loss_function
from ds_mla_ulysses.integrations.trainer import _check_loss


def model_of(family, **config):
    implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    return tiny_model(family, attn_implementation=implementation, **config)


def text_model_of(family, **config):
    return find_attention(model_of(family, **config)).text_model


def all_calls(text_model):
    return [call for calls in probe(text_model)._calls.values() for call in calls]


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_tested_families(family):
    text_model = text_model_of(family)
    assert probe(text_model).counts_positions is False
    calls = all_calls(text_model)
    assert calls and all(call.has_documents and not call.has_other_mask for call in calls)
    assert all(call.attends_to_expanded == (family in FAMILIES) for call in calls)
    assert all(call.mask.is_known for call in calls)


@pytest.mark.parametrize("types", [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt_oss"])
def test_windows_of_each_layer_type(family, types):
    found = find_attention(model_of(family, layers=6, layer_types=3 * types, max_window_layers=0))
    seen = probe(found.text_model)
    for layer, layer_type in zip(found.layers, 3 * types, strict=True):
        (call,) = seen.calls_of(layer)  # a layer of each type has run
        assert call.mask.window == call.keywords["sliding_window"] == (8 if layer_type[0] == "s" else None)


def test_layers_of_one_kind_run_once():
    """A DeepSeek-V3 of full size, of whose 61 layers two kinds run, dense and with experts."""
    from transformers import DeepseekV3Config, DeepseekV3Model

    with torch.device("meta"):
        model = DeepseekV3Model(DeepseekV3Config())
    assert [call.layer for call in all_calls(model)] == ["layers.0.self_attn", "layers.3.self_attn"]


# What it leaves behind.


def test_nothing_is_left_behind():
    from transformers import AttentionInterface, AttentionMaskInterface

    model = tiny_model("gemma3_text")
    interfaces = (AttentionInterface, AttentionMaskInterface)
    state = [dict(interface._global_mapping) for interface in interfaces]
    config, random, attributes = (
        copy.deepcopy(model.config),
        torch.get_rng_state(),
        [{**vars(m)} for m in model.modules()],
    )
    assert probe(model.model) is not None and returns_loss_function(model) is True
    model.model.layers[0].self_attn.forward = None  # which the copy does not have
    assert probe(model.model) is not None
    del model.model.layers[0].self_attn.forward
    assert [dict(interface._global_mapping) for interface in interfaces] == state
    assert model.config.to_dict() == config.to_dict() and model.config._attn_implementation == "sdpa"
    assert torch.equal(torch.get_rng_state(), random)
    assert [{**vars(m)} for m in model.modules()] == attributes


def test_nothing_is_left_behind_by_a_failure(monkeypatch):
    from transformers import AttentionInterface, LlamaModel

    model, names = tiny_model("llama"), set(AttentionInterface._global_mapping)
    original = LlamaModel.forward

    def fails(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise KeyError

    monkeypatch.setattr(LlamaModel, "forward", fails)
    assert probe(model.model) is None and returns_loss_function(model) is None
    assert set(AttentionInterface._global_mapping) == names
    assert len(find_attention(model).layers) == 2  # by their code


def test_weights_are_not_needed():
    """ZeRO-3 leaves empty tensors."""
    model = tiny_model("deepseek_v3")
    for parameter in model.parameters():
        parameter.data = torch.empty(0)
    found = find_attention(model)
    assert len(found.layers) == 2 and all(probe(found.text_model).calls_of(layer) for layer in found.layers)


def test_experts_that_select_tokens():
    """Their loop over experts depends on values."""
    assert len(all_calls(text_model_of("longcat_flash", layers=4))) == 1


def test_loops_that_wait_for_a_value(monkeypatch):
    from transformers import LlamaModel

    def waits(self, input_ids=None, **kwargs):
        while (input_ids == 0).all():
            pass

    model = tiny_model("llama")
    monkeypatch.setattr(LlamaModel, "forward", waits)
    assert probe(model.model) is None


# Forwards that the probe does not run.


def test_hooks_of_accelerate():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = tiny_model("deepseek_v3")
    for module in (model.model, *(layer.self_attn for layer in model.model.layers)):
        add_hook_to_module(module, ModelHook())
    found = find_attention(model)
    assert len(found.layers) == 2 and all(probe(model.model).calls_of(layer) for layer in found.layers)


def test_a_forward_on_the_instance_is_judged_by_its_code():
    model = tiny_model("deepseek_v3")
    layer = model.model.layers[1].self_attn
    original = layer.forward
    layer.forward = lambda *args, **kwargs: original(*args, **kwargs)
    assert not probe(model.model).calls_of(layer) and probe(model.model).calls_of(model.model.layers[0].self_attn)
    with pytest.raises(
        dmu.UnsupportedModelError, match=r"DeepseekV3Attention.forward does not call .* \(a fused kernel"
    ):
        find_attention(model)
    layer.forward = types.MethodType(type(layer).forward, layer)
    assert probe(model.model).calls_of(layer)


# What the code does not tell. Each of these layers names all that a supported one names.


def attention_of_llama(**changes):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        heads = hidden_states.unflatten(-1, (self.config.num_attention_heads, -1)).transpose(1, 2)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        given = dict(sliding_window=None, **kwargs) | changes
        if "mask" in changes:
            attention_mask = given.pop("mask")(attention_mask)
        out, _ = function(self, heads, heads, heads, attention_mask, **given)
        return out.flatten(2), None

    return forward


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(ulysses_documents=None), r"LlamaAttention \(layers.0.self_attn\) does not receive the keyword arguments"),
        (dict(mask=lambda mask: mask * 2), "gives the attention function a mask or bias that it makes itself"),
        (dict(position_bias=1.0), "gives the attention function position_bias, which covers one rank's tokens"),
        (dict(is_causal=False), "LlamaAttention is not causal self-attention"),
        (dict(sliding_window=8), "hands a sliding window of 8 tokens to the attention function, but its mask has none"),
    ],
)
def test_what_a_layer_hands_over(monkeypatch, changes, message):
    from transformers.models.llama.modeling_llama import LlamaAttention

    monkeypatch.setattr(LlamaAttention, "forward", attention_of_llama(mask=lambda mask: mask[:, :, :, :9]))
    assert len(find_attention(tiny_model("llama")).layers) == 2
    monkeypatch.setattr(LlamaAttention, "forward", attention_of_llama(**changes))
    with pytest.raises(dmu.UnsupportedModelError, match=message):
        find_attention(tiny_model("llama"))


@pytest.mark.parametrize("handed_on", [None, 4])
def test_another_window_than_that_of_the_mask(monkeypatch, handed_on):
    from transformers.models.mistral.modeling_mistral import MistralAttention

    monkeypatch.setattr(MistralAttention, "forward", attention_of_llama(sliding_window=8))
    assert len(find_attention(tiny_model("mistral")).layers) == 2
    monkeypatch.setattr(MistralAttention, "forward", attention_of_llama(sliding_window=handed_on))
    with pytest.raises(dmu.UnsupportedModelError, match="MistralAttention does not hand its sliding window"):
        find_attention(tiny_model("mistral"))


def test_expanded_keys_that_are_changed(monkeypatch):
    """In a sequence-parallel forward they would be latents."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.youtu.modeling_youtu import YoutuAttention

    def attention(factor):
        def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
            latent, rope = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1).split([24, 8], dim=-1)
            key, value = self.expand_kv(latent, rope)
            function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
            out, _ = function(self, key, key if factor is None else factor * key, value, attention_mask, **kwargs)
            return self.o_proj(out.flatten(2)), None

        return forward

    monkeypatch.setattr(YoutuAttention, "forward", attention(None))
    assert len(find_attention(tiny_model("youtu")).layers) == 2
    monkeypatch.setattr(YoutuAttention, "forward", attention(2))
    with pytest.raises(dmu.UnsupportedModelError, match="with the results of expand_kv"):
        find_attention(tiny_model("youtu"))


def _chunked(**kwargs):
    from transformers.masking_utils import create_chunked_causal_mask

    return create_chunked_causal_mask(**kwargs)


def _every_other(**kwargs):
    from transformers.masking_utils import create_causal_mask

    return create_causal_mask(**kwargs, and_mask_function=lambda batch, head, query, key: key % 2 == 0)


@pytest.mark.parametrize("function", [_chunked, _every_other])
def test_masks_with_other_rules(monkeypatch, function):
    """The name of the function in the model's code is that of a supported one."""
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "create_causal_mask", function)
    with pytest.raises(
        dmu.UnsupportedModelError, match="has masks other than those of causality, documents and windows"
    ):
        find_attention(tiny_model("llama", attention_chunk_size=8192))


@pytest.mark.parametrize("window", [1, 3, 4096, 131072])
def test_windows_are_told_from_the_mask(window):
    (call,) = all_calls(text_model_of("mistral", sliding_window=window))
    assert call.mask.window == window and call.mask.is_known


def test_masks_for_an_encoder_that_a_model_lacks():
    """GPT-2 names a bidirectional mask, which it makes only with cross-attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    assert len(find_attention(GPT2LMHeadModel(GPT2Config(**sizes))).layers) == 2
    with pytest.raises(dmu.UnsupportedModelError, match="GPT2Attention is not causal self-attention"):
        find_attention(GPT2LMHeadModel(GPT2Config(**sizes, add_cross_attention=True)))


# Positions.


def counting(how):
    """A forward of Llama's rotary embedding."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    original = LlamaRotaryEmbedding.forward

    def forward(self, x, position_ids):
        tokens = x.shape[1]
        if how == "given":
            return original(self, x, position_ids + 1)
        if how == "arange":
            return original(self, x, torch.arange(tokens, device=x.device).unsqueeze(0))
        if how == "cumsum":
            return original(self, x, torch.ones_like(x[..., 0]).cumsum(1))
        if how == "table":
            return self.table[:, :tokens], self.table[:, :tokens]
        return torch.ones_like(x[..., :1]), torch.zeros_like(x[..., :1])  # no positions at all

    return forward


@pytest.mark.parametrize(
    "how,counts", [("given", False), ("arange", True), ("cumsum", True), ("table", True), ("none", False)]
)
def test_positions_that_a_model_counts(monkeypatch, how, counts):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", counting(how))
    if how == "table":
        original = LlamaRotaryEmbedding.__init__

        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            self.table = torch.nn.Buffer(torch.ones(1, 64, 1))

        monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", init)
    model = tiny_model("llama")
    assert probe(model.model).counts_positions is counts
    if counts:
        with pytest.raises(dmu.UnsupportedModelError, match="counts positions itself, so they would restart at 0"):
            find_attention(model)
    else:
        assert len(find_attention(model).layers) == 2


def test_a_text_model_that_takes_no_positions():
    """The probe cannot run it, because it folds its codebooks out of the rows."""
    from transformers import MusicgenMelodyDecoderConfig, MusicgenMelodyForCausalLM

    sizes = dict(vocab_size=64, hidden_size=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=4)
    model = MusicgenMelodyForCausalLM(MusicgenMelodyDecoderConfig(**sizes))
    assert probe(model.model.decoder) is None
    with pytest.raises(dmu.UnsupportedModelError, match=r"MusicgenMelody.* does not use the position_ids"):
        find_attention(model)
    model = MusicgenMelodyForCausalLM(MusicgenMelodyDecoderConfig(**sizes, num_codebooks=1))
    assert probe(model.model.decoder).counts_positions is True
    with pytest.raises(dmu.UnsupportedModelError, match=r"MusicgenMelody.* does not use the position_ids"):
        find_attention(model)


# The loss.


def check_loss(model):
    _check_loss(types.SimpleNamespace(model=model, returns_loss_function=returns_loss_function(model)))


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_losses_of_tested_families(family):
    model = model_of(family)
    assert returns_loss_function(model) is True
    check_loss(model)


def test_auxiliary_losses_are_left_out():
    """They are refused by another check, which sees them in the output."""
    assert returns_loss_function(tiny_model("qwen3_moe", output_router_logits=True)) is True


def test_a_loss_to_which_something_is_added():
    from transformers import LlamaForCausalLM

    class Regularised(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, **kwargs)
            if labels is not None:
                out.loss = self.loss_function(logits=out.logits, labels=labels, vocab_size=128) + out.logits.mean()
            return out

    model = Regularised(tiny_config("llama"))
    assert returns_loss_function(model) is False
    with pytest.raises(ValueError, match="Regularised has a loss other than the cross entropy of the next token"):
        check_loss(model)


def test_a_loss_behind_a_forward_on_the_instance():
    """Its code has to tell."""
    model = tiny_model("llama")
    original = model.forward

    def forward(*args, labels=None, **kwargs):
        out = original(*args, **kwargs)
        out.loss = model.loss_function(out.logits, labels, vocab_size=128)
        return out

    model.forward = forward
    assert returns_loss_function(model) is None
    check_loss(model)
    model.forward = lambda *args, labels=None, **kwargs: original(*args, **kwargs)
    with pytest.raises(ValueError, match="a loss other than the cross entropy"):
        check_loss(model)
