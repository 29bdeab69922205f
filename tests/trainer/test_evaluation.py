"""Evaluation, prediction and generation in a Trainer equal one process, plain or sharded."""

import numpy as np
import pytest
import torch
from rank_pool import run_ranks
from trainer_runs import Collate, Run, build, installed, reference, samples

# Batches for evaluation have rows of different lengths, with labels on a part of each row.
EVAL = dict(per_device_eval_batch_size=2)


def of_evaluation(count=8):
    return samples(count, 9, 40, seed=11)


class Left(Collate):
    """Pads on the left without position ids, as generation does."""

    def __init__(self):
        super().__init__("left")


def metrics(prediction):
    tokens = prediction.predictions.argmax(-1)
    return {"right": float((tokens[:, :-1] == prediction.label_ids[:, 1:])[prediction.label_ids[:, 1:] != -100].mean())}


def evaluated(run, world, with_metrics=False, collate=None, count=8):
    """Returns metrics after training, predictions, generated tokens, losses and the collectives of the evaluation."""
    import ds_mla_ulysses as dmu

    trainer = build(run, world, **EVAL)
    trainer.eval_dataset = of_evaluation(count)
    if collate is not None:
        trainer.data_collator = collate()
    trainer.compute_metrics = metrics if with_metrics else None
    trainer.train()
    with dmu.TrafficMeter() as meter:
        found = trainer.evaluate()
    sent = {kind: n for kind, n in meter.calls.items()}
    keep = ("eval_loss", "eval_right")
    predicted = trainer.predict(of_evaluation(count)) if with_metrics else None
    trainer.model.eval()
    generated = None
    if run.stage != 3:
        prompt = torch.tensor([of_evaluation(1)[0]["input_ids"][:9]])
        generated = trainer.model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "metrics": {name: found[name] for name in keep if name in found},
        "predictions": None if predicted is None else predicted.predictions,
        "labels": None if predicted is None else predicted.label_ids,
        "generated": generated,
        "sent": sent,
        "losses": losses,
    }


def on_rank(run, *args):
    import torch.distributed as dist

    with installed(run):
        return evaluated(run, dist.get_world_size(), *args)


def check(size, run, *args):
    want = evaluated(run, 0, *args)
    answers = run_ranks(size, on_rank, run, *args)
    for answer in answers:
        for name, value in want["metrics"].items():
            assert abs(answer["metrics"][name] - value) <= 1e-4 * abs(value), (name, answer["metrics"], want["metrics"])
        if want["predictions"] is not None:
            assert np.array_equal(answer["labels"], want["labels"])
            assert answer["predictions"].shape == want["predictions"].shape
            # Beyond the length of a row both are padded, either by -100 or by the results of padded tokens.
            real = want["labels"] != -100
            assert np.abs(answer["predictions"] - want["predictions"])[real].max() < 1e-3
        if run.stage != 3:
            assert answer["generated"] == want["generated"]
        assert bool(answer["sent"]) == run.sp_in_eval, answer["sent"]
    return answers


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_evaluation_loss(family, stage, sharded):
    check(2, Run(family, stage=stage, sp_in_eval=sharded, steps=2))


@pytest.mark.parametrize("sharded", [False, True])
def test_metrics_and_predictions(sharded):
    check(2, Run(sp_in_eval=sharded, steps=2), True)


@pytest.mark.parametrize("sharded", [False, True])
def test_metrics_with_tiles_and_chunks(sharded):
    """The plain model that evaluates whole samples runs in tiles too, at ZeRO-3 with weights that it gathers."""
    check(2, Run(stage=3, sp_in_eval=sharded, steps=2, mlp_tile=5, head_chunks=2), True)


def test_predictions_of_head_and_tail():
    """The logits are put back into the order of the tokens."""
    check(2, Run(sp_in_eval=True, steps=2, strategy="gather_kv", split="head_tail"), True)


@pytest.mark.parametrize("sharded", [False, True])
def test_left_padded_batches(sharded):
    check(2, Run(sp_in_eval=sharded, steps=2), False, Left)


def test_sharded_with_data_parallelism():
    run = Run(sp_in_eval=True, steps=1, batch=1, args=(("gradient_accumulation_steps", 2),))
    want = evaluated(Run(steps=1, batch=2, args=run.args), 0, True)
    for answer in run_ranks(4, on_rank, run, True):
        assert abs(answer["metrics"]["eval_loss"] - want["metrics"]["eval_loss"]) < 1e-4
        assert abs(answer["metrics"]["eval_right"] - want["metrics"]["eval_right"]) < 1e-6


def test_label_smoothing_is_in_the_loss_of_evaluation():
    args = (("label_smoothing_factor", 0.2),)
    check(2, Run(sp_in_eval=True, steps=1, args=args))
    check(2, Run(steps=1, args=args))


def with_evaluation():
    return {"eval_dataset": of_evaluation()}


def alternating(run):
    """Evaluation between steps changes nothing, and training remains sharded."""
    import torch.distributed as dist

    with installed(run):
        trainer = build(run, dist.get_world_size(), **EVAL, eval_strategy="steps", eval_steps=1)
        trainer.train()
        logs = trainer.state.log_history
        return [x["loss"] for x in logs if "loss" in x], [x["eval_loss"] for x in logs if "eval_loss" in x]


@pytest.mark.parametrize("sharded", [False, True])
def test_evaluation_between_steps(sharded):

    run = Run(sp_in_eval=sharded, trainer=with_evaluation)
    want = reference(Run())
    trainer = build(run, 0, **EVAL, eval_strategy="steps", eval_steps=1)
    trainer.train()
    of_one = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
    for losses, evaluations in run_ranks(2, alternating, run):
        assert losses == pytest.approx(want["losses"], rel=1e-4)
        assert evaluations == pytest.approx(of_one, rel=1e-4)
