"""What cannot be right is refused with the model, the reason and the way out. No process group is needed."""

import pytest
import torch
from models import tiny_config, tiny_model

import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.families import find_attention


def refused(model, *words):
    with pytest.raises(dmu.UnsupportedModelError) as caught:
        dmu.parallelize(model)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert not torch.distributed.is_initialized()
    assert not any("_ulysses" in vars(m) for m in model.modules())


def small(config_class, **settings):
    common = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, pad_token_id=0)
    return config_class(**(common | dict(num_attention_heads=4, num_key_value_heads=4) | settings))


def test_no_attention_layer():
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    refused(RwkvForCausalLM(config), "RwkvForCausalLM (rwkv)", "no layer that calls", "deepseek_v3", "llama")


def test_chunked_attention():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    experts = dict(num_local_experts=2, intermediate_size_mlp=32, head_dim=8)
    config = small(
        Llama4TextConfig, num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"], **experts
    )
    refused(Llama4ForCausalLM(config), "llama4_text", "chunked_attention", "full_attention and sliding_attention")


def test_short_convolutions():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = small(Lfm2Config, num_hidden_layers=2, layer_types=["conv", "full_attention"], block_multiple_of=8)
    refused(Lfm2ForCausalLM(config), "lfm2", "linear-attention layers")


def test_bidirectional_attention():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    model = Gemma3ForCausalLM(small(Gemma3TextConfig, head_dim=8, use_bidirectional_attention=True))
    refused(model, "gemma3_text", "use_bidirectional_attention")


def test_encoders():
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    refused(BertModel(config), "bert", "BertSelfAttention is not causal self-attention")


def test_encoder_and_decoder():
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32)
    config = BartConfig(vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, **sizes)
    refused(BartForConditionalGeneration(config), "bart", "encoder with a decoder")


def test_a_window_that_is_not_handed_on():
    from transformers import MistralConfig, MistralForCausalLM

    config = small(MistralConfig, layer_types=["sliding_attention"])
    model = MistralForCausalLM(config)
    layer = model.model.layers[0].self_attn

    def forward(hidden_states, **kwargs):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, None)

    layer.forward = forward
    refused(model, "MistralAttention does not hand its sliding window")


@pytest.mark.parametrize("name,layer", [("StableLm", "StableLmAttention"), ("Nemotron", "NemotronAttention")])
def test_arguments_that_are_not_handed_on(name, layer):
    """Their decoder layers call attention without the keyword arguments of the model's forward."""
    import transformers

    model = getattr(transformers, f"{name}ForCausalLM")(small(getattr(transformers, f"{name}Config")))
    words = ("does not receive the keyword arguments", "train it without sequence parallelism")
    refused(model, f"{name}ForCausalLM ({name.lower()}): {layer} (layers.0.self_attn)", *words)


def test_a_mask_of_the_layers_own():
    from transformers import DogeConfig, DogeForCausalLM

    words = ("a mask or bias that it makes itself", "would be lost", "train it without sequence parallelism")
    refused(DogeForCausalLM(small(DogeConfig)), "(doge): DogeAttention (layers.0.self_attn) gives the", *words)


def test_compressed_keys():
    """Some of its layers attend to more keys than tokens, with masks of their own, and some of those select keys."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(num_hidden_layers=4))
    refused(model, "(deepseek_v4): DeepseekV4CSACompressor selects keys with a sparse indexer")
    types = ["heavily_compressed_attention", "sliding_attention"]
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(DeepseekV4Config(num_hidden_layers=2, layer_types=types))
    refused(
        model, "(deepseek_v4) has layers of type heavily_compressed_attention", "masks this package does not support"
    )


@pytest.mark.parametrize("attention", ["minimax_m3_sparse", "full_attention"])
def test_sparse_indexer_in_layers_without_mla(attention):
    """The default config of this type has dense layers only, and its checkpoints have sparse ones."""
    from transformers import MiniMaxM3VLForCausalLM, MiniMaxM3VLTextConfig

    layers = ["full_attention", attention]
    experts = dict(num_local_experts=2, num_experts_per_tok=1, shared_intermediate_size=32, dense_intermediate_size=32)
    config = small(MiniMaxM3VLTextConfig, num_hidden_layers=2, layer_types=layers, head_dim=16, **experts)
    model = MiniMaxM3VLForCausalLM(config)
    if attention == "full_attention":
        assert len(find_attention(model).layers) == 2
    else:
        words = ("MiniMaxM3VLAttention selects keys with a sparse indexer", "one rank's tokens", "dense attention")
        refused(model, "MiniMaxM3VLForCausalLM (minimax_m3_vl_text): ", *words)


def test_sparse_indexer():
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    widths = dict(kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1)
    indexer = dict(index_n_heads=2, index_head_dim=8, index_topk=4)
    config = small(DeepseekV32Config, **widths, **experts, **indexer)
    refused(DeepseekV32ForCausalLM(config), "deepseek_v32", "sparse indexer", "without sequence parallelism")


def test_linear_attention_hybrid():
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    layers = ["linear_attention", "full_attention"]
    config = small(
        KimiLinearConfig, num_hidden_layers=2, layer_types=layers, num_experts=4, num_experts_per_token=2, moe_intermediate_size=16
    )  # fmt: skip
    refused(KimiLinearForCausalLM(config), "kimi_linear", "linear-attention", "restart on every rank")


def test_no_rope_part():
    model = tiny_model("youtu", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.qk_rope_head_dim = 0
    refused(model, "youtu", "qk_rope_head_dim=0", "no shared key")


def test_grouped_key_value_heads():
    model = tiny_model("youtu", torch.float32)
    model.model.layers[1].self_attn.num_key_value_groups = 2
    refused(model, "num_key_value_groups=2")


def test_fused_forward():
    model = tiny_model("deepseek_v3", torch.float32)
    layer = model.model.layers[0].self_attn
    layer.forward = lambda hidden_states, **kwargs: (hidden_states, None)
    refused(model, "DeepseekV3Attention", "fused kernel", "use_kernels=False")


def test_remote_code_without_the_hook():
    model = tiny_model("deepseek_v3", torch.float32)

    class DeepseekV3Attention(torch.nn.Module):
        kv_lora_rank, kv_b_proj = 24, None

    model.model.layers[0].self_attn = DeepseekV3Attention()
    refused(model, "expand_kv", "natively", "transformers >= 5.15")


def test_pooling_heads():
    from transformers import DeepseekV3ForSequenceClassification

    refused(DeepseekV3ForSequenceClassification(tiny_config("deepseek_v3")), "pools over the sequence")


def test_a_layer_without_an_implementation():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaAttention

    model = tiny_model("deepseek_v3", torch.float32)
    model.model.layers[0].self_attn = LlamaAttention(small(LlamaConfig), 0)
    with pytest.raises(ValueError, match="attn_implementation=None is not supported"):
        dmu.parallelize(model)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            dict(strategy="latent"),
            r"strategy must be one of \['auto', 'packed', 'latent_kv', 'latent_qkv', 'gather_kv'\], got 'latent'",
        ),
        (dict(sp_size=2, group=object()), "sp_size or group, not both"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        dmu.parallelize(tiny_model("youtu"), **arguments)


def test_unknown_backend():
    model = tiny_model("youtu")
    from transformers import AttentionInterface

    AttentionInterface.register("mine", lambda *args, **kwargs: None)
    model.config._attn_implementation = "mine"
    with pytest.raises(ValueError, match="attn_implementation='mine' is not supported: load the model with 'sdpa'"):
        dmu.parallelize(model)


def test_untested_model_types_warn():
    model = tiny_model("youtu")
    model.config.model_type = "cousin"
    with pytest.warns(UserWarning, match="cousin has attention layers"), pytest.raises(ValueError, match="sp_size=7"):
        dmu.parallelize(model, sp_size=7)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("group", ["world", 3])
def test_groups_must_be_groups(group):
    from ds_mla_ulysses.comm.group import SequenceGroup

    with pytest.raises(ValueError, match="must be a torch.distributed ProcessGroup"):
        SequenceGroup.of(group)
