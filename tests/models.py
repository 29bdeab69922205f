"""Small random models with the structure of the real ones, batches, and one-process oracles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 128
#: Ids from here on are left out of batches: Kimi-K2.5's image and video tokens are among them.
TEXT_VOCAB = 110
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "kimi_k25",
    "glm4_moe_lite",
    "minicpm3",
    "youtu",
    "mistral4",
    "axk1",
    "longcat_flash",
)

#: Families with multi-head, grouped or multi-query attention. Gemma 2 and GPT-OSS run eagerly only.
DENSE = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi3",
)

#: Further families with ordinary heads, for the auxiliary losses of their routers.
ROUTED = ("qwen2_moe", "olmoe", "granitemoe", "phimoe")

# Attention implementations, measured with transformers 5.24 on a CPU:
#   sdpa            every family.
#   eager           every family, but its softmax is in fp32: 1e-5 away from sdpa in fp64 too.
#   flex_attention  kimi_k25 is refused when built (its wrapper lacks _supports_flex_attn). The others run
#                   when frozen; the forward of a trainable one: "FlexAttention does not support backward on CPU".

# Widths that differ from each other, K != V, so that swapped ones show.
_WIDTHS = dict(kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
# At 0.02 attention is nearly uniform and wrong rows hardly show.
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    initializer_range=0.3,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
)
_MOE = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=1)
_YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=4.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=64,
    beta_fast=32.0,
    beta_slow=1.0,
)


def _families() -> dict[str, dict[str, Any]]:
    """What each family adds to the common settings; real counterparts in comments. One dense layer, then experts."""
    deepseek_v3 = _MOE | dict(first_k_dense_replace=1, n_group=2, topk_group=1, rope_parameters=dict(_YARN))
    half = 8 // 2
    return {
        # DeepSeek-V2-Lite: no query latent, greedy routing, two shared experts
        "deepseek_v2": _MOE
        | dict(first_k_dense_replace=1, q_lora_rank=None, topk_method="greedy", n_shared_experts=2,
               rope_parameters=_YARN | dict(mscale=0.707, mscale_all_dim=0.707)),
        "deepseek_v3": deepseek_v3,  # DeepSeek-V3, Kimi-K2
        "kimi_k25": deepseek_v3,  # the text part of Kimi-K2.5
        "glm4_moe_lite": dict(_MOE),  # GLM-4.7-Flash, whose 20 heads are heads=20
        # MiniCPM3-4B: long rope, which switches tables at the longest position of a batch (from 20 on: the long ones)
        "minicpm3": dict(
            scale_emb=1,
            dim_model_base=48,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0] * half,
                long_factor=[1.5, 2.0, 3.0, 4.0],
                original_max_position_embeddings=20,
                factor=4.0,
            ),
        ),
        "youtu": dict(embedding_initializer_range=0.3),  # Youtu-LLM-2B
        # Mistral-Small-4: the query is scaled by its position, in steps of 16
        "mistral4": _MOE
        | dict(
            first_k_dense_replace=1,
            rope_parameters=_YARN | dict(factor=16.0, llama_4_scaling_beta=0.5, original_max_position_embeddings=16),
        ),
        "axk1": _MOE | dict(n_group=2, topk_group=1),  # A.X-K1
        # LongCat-Flash: two attentions per layer, experts that compute nothing
        "longcat_flash": dict(
            ffn_hidden_size=64, expert_ffn_hidden_size=32, n_routed_experts=6, zero_expert_num=2, moe_topk=2,
            routed_scaling_factor=1.0, head_dim=8,
        ),
    }  # fmt: skip


def _dense() -> dict[str, dict[str, Any]]:
    """What each family with ordinary heads adds; windows of 8 tokens where the family has them."""
    experts = dict(num_experts_per_tok=2, moe_intermediate_size=32)
    slides = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    return {
        "llama": {},  # Llama 3
        "qwen2": slides | dict(use_sliding_window=True, max_window_layers=1),  # Qwen2.5: biases on q, k, v
        "qwen3": dict(head_dim=16),  # Qwen3: norms of q and k, head_dim apart from hidden_size
        "qwen3_moe": experts | dict(num_experts=8, head_dim=16),
        "mistral": dict(sliding_window=8),  # Mistral 7B v0.1: every layer slides
        "mixtral": dict(num_experts_per_tok=2, num_local_experts=8, sliding_window=None),
        "qwen2_moe": experts
        | dict(num_experts=8, shared_expert_intermediate_size=32, decoder_sparse_step=1, use_sliding_window=False),
        "olmoe": dict(num_experts_per_tok=2, num_experts=8),
        "granitemoe": dict(num_experts_per_tok=2, num_local_experts=8),
        "phimoe": dict(  # Phi-3.5-MoE, without the noise on its routers' inputs
            num_experts_per_tok=2,
            num_local_experts=8,
            sliding_window=None,
            router_jitter_noise=0.0,
            input_jitter_noise=0.0,
        ),
        "gemma2": slides | dict(head_dim=16, query_pre_attn_scalar=16),  # soft caps of scores
        "gemma3_text": slides | dict(head_dim=16, query_pre_attn_scalar=16),  # Gemma 3: two ropes
        "gpt_oss": slides | dict(head_dim=16, num_experts_per_tok=2, num_local_experts=8),  # sinks of each head
        "phi3": dict(sliding_window=None),  # Phi-3, Phi-4-mini: one projection for q, k, v
    }


def tiny_config(family: str, heads: int = 4, layers: int = 2, kv_heads: int | None = None, **overrides: Any) -> Any:
    """The family's own config class, scaled down. Experts run eagerly, which fp64 needs.

    Args:
        kv_heads: key-value heads, of DENSE families; as many as heads by default.
        layers: attention layers; LongCat-Flash has two in each decoder layer, so there it is even.
    """
    from transformers import AutoConfig

    if family not in FAMILIES + DENSE + ROUTED:
        raise ValueError(f"family is {family!r}, wanted one of {', '.join(FAMILIES + DENSE + ROUTED)}")
    own = _dense()[family] if family in DENSE + ROUTED else _WIDTHS | _families()[family]
    settings = _COMMON | own | dict(num_attention_heads=heads, num_key_value_heads=kv_heads or heads)
    if family == "longcat_flash":
        assert layers % 2 == 0, f"longcat_flash has two attentions per decoder layer, layers is {layers}"
        settings.pop("intermediate_size")
        settings["num_layers"] = layers // 2
    else:
        settings["num_hidden_layers"] = layers
    settings |= overrides
    if family == "kimi_k25":
        text = AutoConfig.for_model("deepseek_v3", **settings)
        vision = dict(num_attention_heads=2, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
        special = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
        config = AutoConfig.for_model(
            "kimi_k25", text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False, **special
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(family, **settings)
    _set_experts(config, "eager")
    return config


def _set_experts(config: Any, implementation: str) -> None:
    text = getattr(config, "text_config", config)
    config._experts_implementation = "eager"  # all that Kimi-K2.5's wrapper, which has no experts, accepts
    text._experts_implementation = implementation


def tiny_model(
    family: str,
    dtype: torch.dtype = torch.float64,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    train: bool = True,
    experts: str = "eager",
    **overrides: Any,
) -> nn.Module:
    """A model of that config, the same weights on every process for a seed.

    Norm weights, biases and the routers' correction biases are moved off their initial ones and zeros, which
    would hide a dropped one or its wrong gradient.

    Args:
        experts: transformers' experts implementation; LongCat-Flash has only "eager".
        overrides: heads, layers and settings of the config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    config = tiny_config(family, **overrides)
    _set_experts(config, experts)
    torch.manual_seed(seed)
    if family == "mistral4":  # in no automatic class
        model = Mistral4ForCausalLM._from_config(config, attn_implementation=attn_implementation)
    else:
        auto = AutoModelForImageTextToText if family == "kimi_k25" else AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=attn_implementation)
    generator = torch.Generator().manual_seed(seed + 1)
    moved = [(parameter, 0.1) for parameter in model.parameters() if parameter.ndim == 1]
    # scores of routers are closer together than norm weights
    moved += [(buffer, 0.05) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for vector, scale in moved:
            vector.add_(scale * torch.randn(vector.shape, generator=generator))
    return model.to(dtype).train(train)


def random_batch(B: int, S: int, seed: int = 0, *, vocab: int = TEXT_VOCAB) -> dict[str, Tensor]:
    """Random tokens in [3, vocab); the first fifth of the labels is ignored."""
    generator = torch.Generator().manual_seed(1000 + seed)
    input_ids = torch.randint(3, vocab, (B, S), generator=generator)
    labels = input_ids.clone()
    labels[:, : S // 5] = -100
    return dict(input_ids=input_ids, labels=labels)


def packed_batch(documents: Sequence[Sequence[int]], seed: int = 0, *, vocab: int = TEXT_VOCAB) -> dict[str, Tensor]:
    """Rows of documents, given by their lengths; positions restart in each."""
    lengths = {sum(row) for row in documents}
    assert len(lengths) == 1, f"rows of different lengths: {sorted(lengths)}"
    batch = random_batch(len(documents), lengths.pop(), seed, vocab=vocab)
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    return batch


def padded_batch(
    lengths: Sequence[int], S: int, side: str = "left", seed: int = 0, *, vocab: int = TEXT_VOCAB
) -> dict[str, Tensor]:
    """Rows of `lengths` tokens padded to S, positions as `generate` makes them."""
    batch = random_batch(len(lengths), S, seed, vocab=vocab)
    mask = torch.zeros(len(lengths), S, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, S - n if side == "left" else 0 : S if side == "left" else n] = 1
    batch["attention_mask"] = mask
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def left_padded_batch(
    lengths: Sequence[int], S: int | None = None, seed: int = 0, *, vocab: int = TEXT_VOCAB
) -> dict[str, Tensor]:
    """`padded_batch` on the left, to the longest row if S is not given."""
    return padded_batch(lengths, max(lengths) if S is None else S, "left", seed, vocab=vocab)


def reference_loss(logits_BSV: Tensor, labels_BS: Tensor, num_items: int | None = None) -> Tensor:
    """Transformers' shifted mean, in fp32 or wider; or the sum over num_items."""
    shifted = _shift(labels_BS).flatten()
    logits = logits_BSV.flatten(0, 1).to(torch.promote_types(logits_BSV.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(logits, shifted, ignore_index=-100, reduction="sum")
    return total / max(1, num_items if num_items is not None else int((shifted != -100).sum()))


token_loss = reference_loss


def _shift(labels_BS: Tensor) -> Tensor:
    return torch.nn.functional.pad(labels_BS, (0, 1), value=-100)[:, 1:]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients and logits of the plain model in this process. Gradients add to those already there.

    A mask of ones is left out and no cache is used: with either, transformers attends across packed documents.
    """
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    if "attention_mask" in inputs and bool(inputs["attention_mask"].all()):
        del inputs["attention_mask"]
    logits = model(**inputs, use_cache=False).logits
    loss = reference_loss(logits, batch["labels"])
    loss.backward()
    return loss.item(), gradients(model), logits.detach()


def per_document_step(
    model: nn.Module, batch: dict[str, Tensor], documents: Sequence[Sequence[int]] | None = None
) -> tuple[float, dict[str, Tensor], Tensor]:
    """The same with every document run alone, so that nothing of transformers' packing is trusted.

    It equals `reference_step` but for two things. Routers (and deepseek_v2's rope) work in fp32, where a product
    may round differently with another number of rows: 1e-7 of a router's gradient, up to 2e-8 of the loss. And
    minicpm3's long rope takes its tables from the longest position in the call: documents on both sides of 20
    tokens differ by far.

    Args:
        batch: without padding.
        documents: lengths per row; by default a document begins wherever positions do not go up by one.
    """
    assert bool(batch.get("attention_mask", torch.ones(1)).all()), "per_document_step takes no padding"
    if documents is None:
        documents = document_lengths(batch)
    targets = _shift(batch["labels"])
    items, loss = max(1, int((targets != -100).sum())), 0.0
    rows = []
    for row, lengths in enumerate(documents):
        start, parts = 0, []
        for n in lengths:
            part = slice(start, start + n)
            inputs = {name: batch[name][row : row + 1, part] for name in ("input_ids", "position_ids") if name in batch}
            logits = model(**inputs, use_cache=False).logits
            wide = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
            total = torch.nn.functional.cross_entropy(wide, targets[row, part], ignore_index=-100, reduction="sum")
            loss = loss + total / items
            parts.append(logits.detach())
            start += n
        assert start == targets.shape[1], f"documents {lengths} do not fill {targets.shape[1]} tokens"
        rows.append(torch.cat(parts, dim=1))
    loss.backward()
    return loss.item(), gradients(model), torch.cat(rows)


def document_lengths(batch: dict[str, Tensor]) -> list[list[int]]:
    """Lengths of the documents of each row; one per row without position_ids."""
    B, S = batch["input_ids"].shape
    if "position_ids" not in batch:
        return [[S]] * B
    lengths = []
    for row in batch["position_ids"].expand(B, S):
        starts = [0, *((row[1:] != row[:-1] + 1).nonzero().flatten() + 1).tolist(), S]
        lengths.append([stop - start for start, stop in itertools.pairwise(starts)])
    return lengths


def gradient_errors(
    got: dict[str, Tensor], want: dict[str, Tensor], skip: Sequence[str] = ()
) -> list[tuple[float, str]]:
    """Relative L2 distance per parameter, the worst first; absent counts as zero, NaN as infinitely far.

    Args:
        skip: parts of names of parameters that are left out.
    """
    floor = 1e-9 * math.sqrt(sum(float(g.double().norm()) ** 2 for g in want.values()))
    errors = []
    for name in sorted(set(got) | set(want)):
        if any(part in name for part in skip):
            continue
        found = got[name] if name in got else torch.zeros_like(want[name])
        known = want[name] if name in want else torch.zeros_like(found)
        assert found.shape == known.shape, f"{name}: gradient of shape {found.shape}, wanted {known.shape}"
        error = float((found.double() - known.double()).norm()) / max(float(known.double().norm()), floor, 1e-300)
        errors.append((error if math.isfinite(error) else math.inf, name))
    return sorted(errors, reverse=True)


def assert_gradients_close(
    got: dict[str, Tensor], want: dict[str, Tensor], rtol: float, skip: Sequence[str] = ()
) -> None:
    """Fails with the worst parameters if any differs by more than rtol, or has a gradient on one side only."""
    errors = gradient_errors(got, want, skip)
    assert errors, "no gradients to compare"
    worst = [(error, name + _one_sided(name, got, want)) for error, name in errors[:5] if error > rtol]
    assert not worst, f"gradients differ by more than {rtol}: {worst}"


assert_gradients = assert_gradients_close


def _one_sided(name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    if name not in got:
        return " (has no gradient)"
    return "" if name in want else " (wanted no gradient)"
