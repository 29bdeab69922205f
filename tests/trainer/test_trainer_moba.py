"""MoBA in a Trainer: over ranks it equals a plain Trainer, and the callback switches to full attention."""

import functools

import pytest
import torch
from models import tiny_model
from rank_pool import run_ranks
from test_attention import no_mask, three_documents
from trainer_runs import Run, build, equals_one_process, fresh_state, over_ranks, reference

import ds_mla_ulysses as dmu


def registered(model):
    """Makes the model run MoBA with blocks of 4. Samples have 12 to 39 tokens."""
    dmu.register_moba(dmu.MoBAConfig(4, 3, full_attention_layers=(1,)), "moba_trainer")
    model.set_attn_implementation("moba_trainer")
    return model


@pytest.mark.parametrize(
    "family,stage,strategy", [("llama", 2, "packed"), ("llama", 3, "gather_kv"), ("deepseek_v3", 3, "packed")]
)
def test_equals_a_plain_trainer(family, stage, strategy):
    run = Run(family, stage=stage, strategy=strategy, prepare=registered)
    equals_one_process(2, run)
    assert abs(reference(run)["losses"][0] - reference(Run(family))["losses"][0]) > 1e-3


def test_two_groups_and_accumulation():
    run = Run("llama", prepare=registered, batch=1, args=(("gradient_accumulation_steps", 2),))
    equals_one_process(4, run)


def test_documents():
    """Other documents do not change the loss of the third."""
    run = Run(
        "llama", batch=1, steps=1, prepare=registered, data=functools.partial(three_documents, True), trainer=no_mask
    )
    want = reference(Run("llama", batch=1, steps=1, prepare=registered, data=three_documents, trainer=no_mask))
    for answer in over_ranks(2, run):
        assert abs(answer["losses"][0] - want["losses"][0]) < 1e-6 * want["losses"][0]


def switching(after):
    return {"callbacks": [dmu.FullAttentionCallback(after)]}


def test_full_attention_from_a_fraction_on():
    """The last two of 4 steps run full attention. A learning rate of 0 keeps the weights, so that losses compare."""
    still = dict(steps=4, args=(("learning_rate", 0.0),))
    switched = Run("llama", prepare=registered, trainer=functools.partial(switching, 0.5), **still)
    sparse, dense = (reference(Run("llama", prepare=p, **still))["losses"] for p in (registered, None))
    got = over_ranks(2, switched)
    for answer in got:
        assert answer["losses"] == pytest.approx(sparse[:2] + dense[2:], rel=1e-5)
    assert all(abs(a - b) > 1e-3 for a, b in zip(sparse, dense, strict=True))


def resumed(folder):
    """Resumes from the checkpoint of the third step in a new Trainer."""
    saving = (("save_strategy", "steps"), ("save_steps", 3), ("output_dir", folder), ("learning_rate", 0.0))
    run = Run("llama", prepare=registered, steps=4, args=saving, trainer=functools.partial(switching, 0.5))
    with fresh_state():
        dmu.install()
        try:
            build(run, 2).train()
            trainer = build(run, 2)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
            return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        finally:
            dmu.uninstall()


def test_resumed_runs_know_where_they_are(tmp_path):
    dense = reference(Run("llama", steps=4, args=(("learning_rate", 0.0),)))["losses"]
    for losses in run_ranks(2, resumed, str(tmp_path)):
        assert losses[3] == pytest.approx(dense[3], rel=1e-5)


def test_fractions_of_steps(monkeypatch):
    """The number of MoBA steps is exact for every fraction, despite rounding."""
    from types import SimpleNamespace

    from ds_mla_ulysses.integrations import callbacks

    said = []
    monkeypatch.setattr(callbacks, "set_moba", lambda model, enabled: said.append(enabled))
    for steps in range(1, 201):
        for percent in range(0, 101):
            said.clear()
            callback = dmu.FullAttentionCallback(percent / 100)
            for step in range(steps):
                callback.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=steps), None)
            assert sum(said) == -(-percent * steps // 100) and said == sorted(said, reverse=True)


def test_bad_fractions():
    for after in (-0.1, 1.5):
        with pytest.raises(ValueError, match="after must be the fraction of the steps that run MoBA, 0 to 1"):
            dmu.FullAttentionCallback(after)
    with pytest.raises(TypeError, match="after must be the fraction of the steps that run MoBA, 0 to 1, got '0.5'"):
        dmu.FullAttentionCallback("0.5")
    run = Run("llama", trainer=functools.partial(switching, 0.5))
    with fresh_state(), pytest.raises(ValueError, match="LlamaForCausalLM has no MoBA layers"):
        build(run, 0).train()


def test_generation_beside_training():
    """Generation equals that of the plain model with MoBA."""
    assert run_ranks(2, generates) == [True, True]


def generates():
    model = registered(tiny_model("llama", dtype=torch.float32))
    tokens = torch.arange(3, 23)[None]
    want = model.eval().generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None)
    with fresh_state():
        dmu.install()
        try:
            trainer = build(Run("llama", prepare=registered, steps=1, args=(("learning_rate", 0.0),)), 2)
            trainer.train()
            got = trainer.model.eval().generate(tokens, max_new_tokens=4, do_sample=False, eos_token_id=None)
        finally:
            dmu.uninstall()
    return torch.equal(got, want)
