"""Documents, windows, widths and heads of models that a Trainer trains."""

import functools

import pytest
import torch
from rank_pool import raises_on_ranks, run_ranks
from test_data import Packed
from trainer_runs import (
    Collate,
    Hashed,
    Run,
    assert_equal,
    build,
    equals_one_process,
    fresh_state,
    over_ranks,
    reference,
    samples,
    sharded,
)


def three_documents(perturbed=False):
    """Returns documents of 20, 30 and 14 tokens in one row; only the third has labels."""
    made = samples(4, 64, 65, supervise=lambda i, n: range(51, 64))
    for row in made:
        row["position_ids"] = [*range(20), *range(30), *range(14)]
        if perturbed:
            row["input_ids"] = [(token * 7 + 1) % 100 + 3 for token in row["input_ids"][:50]] + row["input_ids"][50:]
    return made


def no_mask():
    return {"data_collator": Packed()}


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
@pytest.mark.parametrize("masked", [False, True])
def test_documents_do_not_see_each_other(family, masked):
    """It also passes with a mask of ones, with which transformers attends across documents in one process."""
    collate = None if masked else no_mask
    runs = [
        Run(family, batch=1, steps=1, data=functools.partial(three_documents, perturbed), trainer=collate)
        for perturbed in (False, True)
    ]
    want = reference(Run(family, batch=1, steps=1, data=three_documents, trainer=no_mask))
    for run in runs:
        for answer in over_ranks(2, run):
            assert abs(answer["losses"][0] - want["losses"][0]) < 1e-6 * want["losses"][0]
            assert abs(answer["norms"][0] - want["norms"][0]) < 1e-4 * want["norms"][0]


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text"])
def test_sliding_windows(family):
    """The window has 8 tokens and sequences have up to 39, so the numbers would differ without the window."""
    run = Run(family)
    equals_one_process(2, run)
    whole = dict(sliding_window=None if family != "gemma3_text" else 64)
    without = reference(Run(family, tuple(whole.items()))) if family != "qwen2" else None
    assert without is None or abs(without["losses"][0] - reference(run)["losses"][0]) > 1e-3


def test_caps_and_sinks():
    eager = ("attn_implementation", "eager")
    equals_one_process(2, Run("gemma2", (eager,)))
    # All experts are active. Otherwise the last bit of fp32 would decide a tie between two of them.
    equals_one_process(2, Run("gpt_oss", (eager, ("num_experts_per_tok", 8))))


@pytest.mark.parametrize("value_width", [16, 24])
def test_mla_widths(value_width):
    """K is 24. The compared gradients include those of both latents and of the shared RoPE key."""
    got = equals_one_process(2, Run("deepseek_v3", (("v_head_dim", value_width),)))
    for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"):
        assert all(change.any() for name, change in got[0]["change"].items() if part in name)


def as_many_tokens_as_heads():
    return samples(12, 16, 17)


def test_fewer_key_heads_than_ranks():
    """4 query heads and 1 KV head on 4 ranks with 4 tokens each: swapped axes would have fitting shapes."""
    model = (("heads", 4), ("kv_heads", 1))
    got = equals_one_process(4, Run("llama", model, sp=4, batch=1, data=as_many_tokens_as_heads))
    assert all(change.any() for name, change in got[0]["change"].items() if "k_proj.weight" in name or "v_proj" in name)


@pytest.mark.parametrize("size,heads,kv_heads", [(2, 6, 3), (4, 6, 3), (4, 5, 5)])
def test_heads_that_do_not_divide(size, heads, kv_heads):
    model = (("heads", heads), ("kv_heads", kv_heads), ("hidden_size", 60))
    equals_one_process(size, Run("llama", model, sp=size))


def test_mla_heads_that_do_not_divide():
    equals_one_process(4, Run("glm4_moe_lite", (("heads", 5),), sp=4))


def linear_attention(model):
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=32, num_hidden_layers=2, moe_intermediate_size=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, num_experts=4, num_experts_per_token=2)
    layers = ["linear_attention", "full_attention"]
    return KimiLinearForCausalLM(KimiLinearConfig(**sizes, **heads, layer_types=layers, pad_token_id=0))


def test_linear_attention_is_refused():
    raises_on_ranks(2, ValueError, "linear.attention", sharded, Run(prepare=linear_attention))


def test_another_implementation_than_the_models_is_refused():
    run = Run(handler=(("sp_attn_implementation", "flash_attention_2"),))
    raises_on_ranks(2, ValueError, "but the model was loaded with attn_implementation='sdpa'", sharded, run)


def test_the_models_own_implementation():
    equals_one_process(2, Run(handler=(("sp_attn_implementation", "sdpa"),)))
    equals_one_process(2, Run(model=(("attn_implementation", "eager"),)))


def lengths_of_the_config():
    return samples(12, 32, 33)


def test_a_fixed_length_in_the_config():
    handler = (("sp_seq_length", 32), ("sp_seq_length_is_variable", False))
    equals_one_process(2, Run(handler=handler, data=lengths_of_the_config))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    """The 5 steps have different lengths."""
    assert_equal(over_ranks(2, Run(steps=5, args=checkpointing(reentrant)))[0], reference(Run(steps=5)))


def checkpointing(reentrant):
    return (("gradient_checkpointing", True), ("gradient_checkpointing_kwargs", Hashed(use_reentrant=reentrant)))


def compiled(model):
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    return model


def test_compiled_layers():
    for answer in over_ranks(2, Run("llama", prepare=compiled, steps=2)):
        assert_equal(answer, reference(Run("llama", steps=2)))


def test_torch_compile_of_the_trainer():
    args = (("torch_compile", True), ("torch_compile_backend", "aot_eager"))
    assert_equal(over_ranks(2, Run("llama", args=args, steps=2))[0], reference(Run("llama", steps=2)))


def other_models(run):
    """A callback runs a plain model of the same config at every step, on every rank."""
    import torch.distributed as dist
    from models import tiny_model
    from transformers import TrainerCallback

    import ds_mla_ulysses

    plain = tiny_model(run.family, torch.float32).eval()
    batch = Collate()([samples(1)[0]])
    with torch.no_grad():
        want = plain(**batch).logits
    answers = []

    class Ask(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            with torch.no_grad():
                answers.append(torch.equal(plain(**batch).logits, want))

    with fresh_state():
        ds_mla_ulysses.install()
        try:
            trainer = build(run, dist.get_world_size())
            trainer.add_callback(Ask())
            trainer.train()
        finally:
            ds_mla_ulysses.uninstall()
    return answers


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_other_models_are_untouched(family):
    assert run_ranks(2, other_models, Run(family)) == [[True] * 3] * 2
