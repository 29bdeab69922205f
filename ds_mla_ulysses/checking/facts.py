"""What some model types need beyond the recipe, so that a small model of them can be built and every kind of layer is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """Additions to the recipe.

    Attributes:
        init: arguments of the config class if only a model type is given, whose defaults would not do.
        is_small: `init` has small widths already.
        settings: settings after the widths were cut, by dotted name.
        class_name: the model's class, if no automatic class has it.
        part: the attribute of the config that is the config of that class.
        language: what `set_default_language` needs.
    """

    init: Mapping[str, Any] = field(default_factory=dict)
    is_small: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    class_name: str = ""
    part: str = ""
    language: str = ""


#: Encoders, which their causal language models turn into decoders.
ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_SEQ2SEQ = dict(
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_layers=1,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
)
_GEMMA4 = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    head_dim=16,
    global_head_dim=32,
    layer_types=_ALTERNATING,
    vocab_size_per_layer_input=96,
    hidden_size_per_layer_input=8,
    sliding_window=16,
    max_position_embeddings=256,
    pad_token_id=0,
)
_GEMMA4_VISION = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    head_dim=16,
    global_head_dim=16,
)
_GEMMA4_ASSISTANT = _GEMMA4 | dict(hidden_size_per_layer_input=0, num_kv_shared_layers=4)
_GEMMA3N = dict(
    num_hidden_layers=4,
    num_kv_shared_layers=0,
    layer_types=_ALTERNATING,
    vocab_size=96,
    vocab_size_per_layer_input=96,
    hidden_size_per_layer_input=8,
    laurel_rank=8,
    activation_sparsity_pattern=[0.0] * 4,
    intermediate_size=[64] * 4,
)
_DOTS3 = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=16,
    v_head_dim=12,
    head_dim=24,
    index_topk=8,
    index_head_dim=16,
    index_n_heads=2,
    shared_experts_intermediate_size=16,
    sliding_window=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    max_position_embeddings=256,
    swa_num_attention_heads=4,
    swa_num_key_value_heads=4,
    swa_q_lora_rank=24,
    swa_kv_lora_rank=16,
    swa_head_dim=24,
    swa_qk_nope_head_dim=16,
    swa_v_head_dim=12,
    swa_qk_rope_head_dim=8,
)
_DOTS3_MEDIA = dict(
    vision_config=dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        moe_intermediate_size=16,
        mlp_layer_types=["dense"],
        num_local_experts=2,
        adapter_in_dim=32,
        adapter_out_dim=64,
    ),
    audio_config=dict(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        adapter_input_size=32,
        adapter_out_dim=64,
        downsample_hidden_size=16,
    ),
)
_COMPASS = dict(rope_parameters={"full_attention": _DEFAULT_ROPE | {"mrope_section": [4, 2, 2]}}, num_hidden_layers=4)
_QWEN4 = dict(
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    hc_count=2,
    hc_lowrank=8,
    indexer_n_heads=2,
    indexer_kv_heads=1,
    indexer_head_dim=16,
    indexer_budget=8,
    indexer_compress_ratio=4,
    max_position_embeddings=256,
)
_QWEN4_VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
_VOCABULARY_MAP = {"<image>": 90, "<racm3:break>": 91, "<eoss>": 92}
#: Takes the place of a vision model that needs a package more. It does not run on text.
_VISION = dict(
    model_type="clip_vision_model",
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    image_size=32,
    patch_size=16,
)
_KOSMOS_TEXT = dict(embed_dim=64, layers=4, ffn_dim=64, attention_heads=4, vocab_size=96)
#: RoPE of three axes, whose default sections are those of wide heads.
_MROPE = {"text_config.rope_parameters.mrope_section": [4, 2, 2]}
_CONVOLUTIONS = dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2)
_BLT_PART = dict(vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)

FACTS: Mapping[str, Facts] = {
    "bailing_hybrid": Facts(
        settings=dict(
            n_group=2,
            topk_group=2,
            num_experts=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            q_lora_rank=24,
            kv_lora_rank=16,
            num_key_value_heads=4,
            head_dim=16,
            rope_parameters=_DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        )
    ),
    "big_bird": Facts(settings=dict(attention_type="original_full")),
    "blenderbot": Facts(settings=_SEQ2SEQ),
    "blt": Facts(
        is_small=True,
        init=dict(
            vocab_size=96,
            encoder_hash_byte_group_vocab=64,
            encoder_hash_byte_group_nb_functions=1,
            patcher_config=_BLT_PART,
            encoder_config=_BLT_PART | dict(hidden_size_global=64),
            decoder_config=_BLT_PART | dict(hidden_size_global=64),
            global_config=dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64),
        ),
    ),
    "chameleon": Facts(init=dict(vocabulary_map=_VOCABULARY_MAP)),
    "cohere_compass": Facts(init=dict(text_config=_COMPASS)),
    "cohere_compass_text": Facts(init=_COMPASS),
    "dbrx": Facts(
        settings={
            "attn_config.rope_theta": 10000.0,
            "attn_config.clip_qkv": 8.0,
            "attn_config.kv_n_heads": 2,
            "ffn_config.ffn_hidden_size": 32,
            "ffn_config.moe_num_experts": 4,
            "ffn_config.moe_top_k": 2,
        }
    ),
    "deepseek_ocr2": Facts(
        init=dict(text_config=dict(num_hidden_layers=4, mlp_layer_types=["dense", "sparse"] * 2)),
        settings={"text_config.num_experts_per_tok": 2},
    ),
    "deepseek_v2": Facts(settings=dict(num_experts_per_tok=2)),
    "diffusion_gemma": Facts(
        settings={
            "text_config.num_experts": 4,
            "text_config.top_k_experts": 2,
            "text_config.moe_intermediate_size": 16,
        }
    ),
    # It divides some parameters by the range, so that noise on them would become scores of many hundreds.
    "dory": Facts(settings=dict(initializer_range=0.5)),
    "dots1": Facts(
        settings=dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1)
    ),
    "dots3_note": Facts(is_small=True, init=dict(text_config=_DOTS3, **_DOTS3_MEDIA)),
    "dots3_note_text": Facts(is_small=True, init=_DOTS3),
    "emu3": Facts(init=dict(vocabulary_map=_VOCABULARY_MAP)),
    "ernie4_5_vl_moe": Facts(
        settings={"text_config.moe_intermediate_size": [16, 16], "text_config.rope_parameters.mrope_section": [3, 3, 2]}
    ),
    "falcon_h1": Facts(
        settings=dict(mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, ssm_multipliers=[1.0] * 5)
    ),
    "fast_vlm": Facts(init=dict(vision_config=_VISION)),
    "florence2": Facts(
        settings={
            "vision_config.embed_dim": (16, 16, 32, 32),
            "vision_config.num_heads": (2, 2, 2, 2),
            "vision_config.num_groups": (2, 2, 2, 2),
            "vision_config.depths": (1, 1, 1, 1),
        }
    ),
    "gemma3n": Facts(init=dict(text_config=_GEMMA3N)),
    "gemma3n_text": Facts(init=_GEMMA3N),
    "gemma4": Facts(is_small=True, init=dict(text_config=_GEMMA4, vision_config=_GEMMA4_VISION, audio_config=None)),
    "gemma4_assistant": Facts(
        is_small=True,
        init=dict(text_config=_GEMMA4_ASSISTANT | dict(vocab_size_per_layer_input=0), backbone_hidden_size=64),
    ),
    "gemma4_text": Facts(is_small=True, init=_GEMMA4),
    "gemma4_unified": Facts(is_small=True, init=dict(text_config=_GEMMA4)),
    "gemma4_unified_assistant": Facts(is_small=True, init=dict(text_config=_GEMMA4_ASSISTANT, backbone_hidden_size=64)),
    "gemma4_unified_text": Facts(is_small=True, init=_GEMMA4),
    "glm46v": Facts(settings=_MROPE),
    "glm4v": Facts(settings=_MROPE),
    "glm4v_moe": Facts(settings={"text_config.rope_parameters.mrope_section": [2, 1, 1]}),
    "glm_ocr": Facts(settings=_MROPE),
    "glmga": Facts(settings=_MROPE),
    "granite4_vision": Facts(
        settings=dict(deepstack_layer_map=[[0, 0]], spatial_target_layers=[0, 0, 0, 0], downsample_rate="1/2")
    ),
    "hunyuan_v1_dense": Facts(settings=dict(head_dim=16)),
    "hunyuan_v1_moe": Facts(settings=dict(head_dim=16, moe_topk=2)),
    "hunyuan_vl": Facts(
        settings={"text_config.head_dim": 16, "text_config.rope_parameters.mrope_section": [2, 2, 2, 2]}
    ),
    # With larger patches, its vision model needs more layers, or scipy.
    "inkling_mm_model": Facts(settings={"vision_config.patch_size": 2}),
    "kimi_linear": Facts(settings=dict(num_experts=8, num_expert_group=1, topk_group=1, num_experts_per_tok=2)),
    "kosmos-2": Facts(init=dict(text_config=_KOSMOS_TEXT)),
    "kosmos-2.5": Facts(init=dict(text_config=_KOSMOS_TEXT)),
    "lfm2_moe": Facts(init=_CONVOLUTIONS | dict(num_dense_layers=1)),
    "lfm2_vl": Facts(init=dict(text_config=dict(model_type="lfm2", **_CONVOLUTIONS))),
    "llama4": Facts(
        settings={
            "vision_config.projector_input_dim": 64,
            "vision_config.projector_output_dim": 64,
            "vision_config.vision_output_dim": 64,
        }
    ),
    "longcat_flash": Facts(
        init=dict(
            qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, kv_lora_rank=16, q_lora_rank=24, num_layers=2
        ),
        settings=dict(num_key_value_heads=4, head_dim=8, zero_expert_num=2, q_lora_rank=24),
    ),
    "mamba2": Facts(settings=dict(num_heads=8, head_dim=16)),
    "ministral": Facts(settings=dict(head_dim=16)),
    "mistral4": Facts(class_name="Mistral4ForCausalLM", settings=dict(head_dim=16)),
    "muse_spark": Facts(settings={"audio_config.hidden_sizes": (16, 16, 32, 64)}),
    "musicgen": Facts(
        class_name="MusicgenForCausalLM", part="decoder", settings=dict(num_hidden_layers=2, num_codebooks=1)
    ),
    "musicgen_melody": Facts(
        class_name="MusicgenMelodyForCausalLM", part="decoder", settings=dict(num_hidden_layers=2, num_codebooks=1)
    ),
    "nemotron": Facts(settings=dict(num_key_value_heads=2)),
    "paddleocr_vl": Facts(settings=_MROPE),
    "perception_lm": Facts(init=dict(vision_config=_VISION | dict(model_args={"embed_dim": 64}))),
    "plbart": Facts(settings=_SEQ2SEQ),
    "qwen2_5_omni_thinker": Facts(settings=_MROPE),
    "qwen2_5_vl": Facts(settings=_MROPE),
    "qwen2_vl": Facts(settings=_MROPE),
    "qwen4_exp": Facts(is_small=True, init=dict(text_config=_QWEN4, vision_config=_QWEN4_VISION)),
    "qwen4_exp_text": Facts(is_small=True, init=_QWEN4),
    "reformer": Facts(settings=dict(is_decoder=True, axial_pos_embds_dim=(32, 32), axial_pos_shape=(4, 11))),
    "step3p7": Facts(settings={"text_config.sliding_window": 16}),
    "whisper": Facts(settings=_SEQ2SEQ),
    "xlm": Facts(settings=dict(n_words=96, emb_dim=64, n_layers=2, n_heads=4)),
    "xlstm": Facts(
        init=dict(hidden_size=64, num_heads=4, num_hidden_layers=2, vocab_size=96),
        settings=dict(embedding_dim=64, num_blocks=2),
    ),
    "xmod": Facts(language="en_XX"),
    "zamba": Facts(
        is_small=True,
        init=dict(
            vocab_size=96,
            hidden_size=64,
            attention_hidden_size=128,
            attention_head_dim=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_mamba_heads=2,
            mamba_d_state=8,
            mamba_dt_rank=4,
            attn_layer_period=3,
            attn_layer_offset=2,
            pad_token_id=0,
            use_mamba_kernels=False,
        ),
    ),
    "zamba2": Facts(
        is_small=True,
        init=dict(
            vocab_size=96,
            hidden_size=64,
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            n_mamba_heads=8,
            mamba_ngroups=1,
            num_attention_heads=4,
            intermediate_size=64,
            num_mem_blocks=1,
            use_mem_rope=True,
            adapter_rank=4,
            pad_token_id=0,
        ),
    ),
}
