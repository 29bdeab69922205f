"""Small random models with the structure of the real ones, batches, and one-process oracles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 128
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

# Widths that differ from each other, K != V, so that swapped ones show.
_WIDTHS = dict(kv_lora_rank=24, q_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
# At 0.02 attention is nearly uniform and wrong rows hardly show.
_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
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
    """What each family adds to the common settings; real counterparts in comments."""
    deepseek_v3 = _MOE | dict(first_k_dense_replace=1, n_group=2, topk_group=1, rope_parameters=_YARN)
    half = 8 // 2
    return {
        # DeepSeek-V2-Lite: no query latent, greedy routing, two shared experts
        "deepseek_v2": _MOE
        | dict(first_k_dense_replace=1, q_lora_rank=None, topk_method="greedy", n_shared_experts=2, rope_parameters=_YARN),
        "deepseek_v3": deepseek_v3,  # DeepSeek-V3, Kimi-K2
        "kimi_k25": deepseek_v3,  # the text part of Kimi-K2.5
        "glm4_moe_lite": _MOE | dict(mlp_layer_types=["dense", "sparse"]),  # GLM-4.7-Flash
        # MiniCPM3-4B: long rope, which switches tables at the longest position of a batch
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
        # Mistral-4: the query is scaled by its position
        "mistral4": _MOE
        | dict(
            first_k_dense_replace=1,
            rope_parameters=_YARN | dict(llama_4_scaling_beta=0.5, original_max_position_embeddings=16),
        ),
        "axk1": _MOE | dict(n_group=2, topk_group=1, mlp_layer_types=["dense", "sparse"]),  # A.X-K1
        # LongCat-Flash: two attentions per layer, experts that compute nothing
        "longcat_flash": dict(
            num_layers=1, ffn_hidden_size=64, expert_ffn_hidden_size=32, n_routed_experts=6, zero_expert_num=2, moe_topk=2,
            routed_scaling_factor=1.0, head_dim=8,
        ),
    }  # fmt: skip


def tiny_config(family: str, heads: int = 4, **overrides: Any) -> Any:
    """The family's own config class, scaled down. Experts run eagerly, which fp64 needs."""
    from transformers import AutoConfig

    settings = _COMMON | _WIDTHS | _families()[family] | dict(num_attention_heads=heads, num_key_value_heads=heads)
    settings |= overrides
    if family == "longcat_flash":
        settings.pop("num_hidden_layers"), settings.pop("intermediate_size")
    if family == "kimi_k25":
        text = AutoConfig.for_model("deepseek_v3", **settings)
        vision = dict(num_attention_heads=2, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
        special = dict(image_token_id=120, video_token_id=121, vision_start_token_id=122, vision_end_token_id=123)
        config = AutoConfig.for_model(
            "kimi_k25", text_config=text, vision_config=vision, projection_hidden_size=16, tie_word_embeddings=False, **special
        )  # fmt: skip
        config.text_config._experts_implementation = "eager"
    else:
        config = AutoConfig.for_model(family, **settings)
    config._experts_implementation = "eager"
    return config


def tiny_model(
    family: str,
    dtype: torch.dtype = torch.float64,
    attn_implementation: str = "sdpa",
    seed: int = 0,
    heads: int = 4,
    **overrides: Any,
) -> nn.Module:
    """A model of that config in training mode, the same weights on every process for a seed."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4ForCausalLM

    config = tiny_config(family, heads, **overrides)
    torch.manual_seed(seed)
    if family == "mistral4":  # in no automatic class
        model = Mistral4ForCausalLM._from_config(config, attn_implementation=attn_implementation)
    else:
        auto = AutoModelForImageTextToText if family == "kimi_k25" else AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=attn_implementation)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # norms and biases at their initial ones and zeros would hide what they do
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).train()


def random_batch(B: int, S: int, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens; some labels are ignored."""
    generator = torch.Generator().manual_seed(1000 + seed)
    input_ids = torch.randint(3, 110, (B, S), generator=generator)
    labels = input_ids.clone()
    labels[:, : S // 5] = -100
    return dict(input_ids=input_ids, labels=labels)


def packed_batch(documents: Sequence[Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Rows of documents, given by their lengths; positions restart in each."""
    batch = random_batch(len(documents), sum(documents[0]), seed)
    batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in documents])
    return batch


def padded_batch(lengths: Sequence[int], S: int, side: str = "left", seed: int = 0) -> dict[str, Tensor]:
    """Rows of `lengths` tokens padded to S, positions as `generate` makes them."""
    batch = random_batch(len(lengths), S, seed)
    mask = torch.zeros(len(lengths), S, dtype=torch.long)
    for row, n in enumerate(lengths):
        mask[row, S - n if side == "left" else 0 : S if side == "left" else n] = 1
    batch["attention_mask"] = mask
    batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def token_loss(logits: Tensor, labels: Tensor, num_items: int | None = None) -> Tensor:
    """Transformers' shifted mean, in fp32 or wider; or the sum over num_items."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
    total = torch.nn.functional.cross_entropy(logits, shifted, ignore_index=-100, reduction="sum")
    return total / max(1, num_items if num_items is not None else int((shifted != -100).sum()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reference_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients and logits of the plain model in this process."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits
    loss = token_loss(logits, batch["labels"])
    loss.backward()
    return loss.item(), gradients(model), logits.detach()


def per_document_step(model: nn.Module, batch: dict[str, Tensor], documents: Sequence[Sequence[int]]):
    """The same with every document run alone, so that nothing of transformers' packing is trusted."""
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    items, loss = max(1, int((shifted != -100).sum())), 0.0
    rows = []
    for row, lengths in enumerate(documents):
        start, parts = 0, []
        for n in lengths:
            part = slice(start, start + n)
            # two-token ids with explicit positions, no mask
            logits = model(
                input_ids=batch["input_ids"][row : row + 1, part],
                position_ids=batch["position_ids"][row : row + 1, part],
                use_cache=False,
            ).logits
            wide = logits[0].to(torch.promote_types(logits.dtype, torch.float32))
            loss = (
                loss
                + torch.nn.functional.cross_entropy(wide, shifted[row, part], ignore_index=-100, reduction="sum")
                / items
            )
            parts.append(logits.detach())
            start += n
        rows.append(torch.cat(parts, dim=1))
    loss.backward()
    return loss.item(), gradients(model), torch.cat(rows)


def gradient_errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[tuple[float, str]]:
    """Relative L2 distance per parameter, the worst first; absent counts as zero."""
    scale = max(float(g.double().norm()) for g in want.values())
    errors = []
    for name in sorted(set(got) | set(want)):
        known = want.get(name, got.get(name)) * 0 if name not in want else want[name]
        found = got[name] if name in got else torch.zeros_like(known)
        distance = float((found.double() - known.double()).norm())
        errors.append((distance / max(float(known.double().norm()), 1e-9 * scale), name))
    return sorted(errors, reverse=True)


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float) -> None:
    """Fails with the worst parameters if any differs by more than rtol."""
    worst = gradient_errors(got, want)[:5]
    assert worst and worst[0][0] <= rtol, f"gradients differ by more than {rtol}: {worst}"
