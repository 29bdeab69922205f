"""Trainer over ranks equals one process: losses, gradient norms, updates."""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from rank_pool import raises_on_ranks
from trainer_runs import Collate, Run, assert_equal, equals_one_process, over_ranks, reference, samples, sharded


@pytest.mark.parametrize("size,clip", [(2, 0.0), (4, 0.5), (4, 0.0)])
@pytest.mark.parametrize("stage", range(4))
def test_zero_stages_and_data_parallelism(stage, size, clip):
    # Each data-parallel group reads as many batches in a round as it has ranks, so with two micro-batches a step has
    # the same samples as in one process.
    steps = (("gradient_accumulation_steps", 2),)
    equals_one_process(size, Run(stage=stage, args=(*steps, ("max_grad_norm", clip))))


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "glm4_moe_lite"])
def test_other_models(family):
    equals_one_process(2, Run(family))


def gemma3(model):
    """Gemma 3 with its wrapper for images, which makes the masks itself, instead of the given model."""
    from test_wrappers import CONFIGS
    from transformers import AutoModelForCausalLM, Gemma3Config

    settings = dict(CONFIGS["gemma3"], image_token_id=120, boi_token_id=121, eoi_token_id=122)
    settings["text_config"] = settings["text_config"] | dict(vocab_size=128)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Gemma3Config(**settings), dtype=torch.float32)


def test_a_wrapper_that_makes_masks():
    equals_one_process(2, Run("llama", prepare=gemma3))


def few_and_many():
    """Returns samples with 4 labels in one micro-batch and 63 in the other."""
    return samples(8, 64, 65, supervise=lambda i, n: range(n - 4, n) if i % 2 == 0 else range(1, n))


@pytest.mark.parametrize("stage", [0, 3])
def test_accumulation_is_weighted_by_tokens(stage):
    equals_one_process(2, Run(batch=1, stage=stage, data=few_and_many, args=(("gradient_accumulation_steps", 2),)))


def test_a_last_step_of_fewer_micro_batches():
    run = Run(batch=1, steps=None, args=(("gradient_accumulation_steps", 3), ("num_train_epochs", 2)), data=eight)
    got = equals_one_process(2, run)
    assert got[0]["steps"] == (6, 6)


def eight():
    return samples(8)


def on_one_rank():
    """Puts labels on the first half of even samples and on the second half of odd ones."""
    return samples(12, 32, 33, supervise=lambda i, n: range(3, 9) if i % 2 == 0 else range(20, 30))


def test_labels_on_one_rank_only():
    equals_one_process(2, Run(batch=1, data=on_one_rank))


def nowhere():
    return samples(12, 32, 33, supervise=lambda i, n: range(0))


@pytest.mark.parametrize("stage", [0, 3])
def test_no_labels_at_all(stage):
    for answer in over_ranks(2, Run(data=nowhere, stage=stage)):
        assert answer["losses"] == [0.0] * 3
        assert all(not change.any() for change in answer["change"].values())


def first_of_rank_1():
    """Only token 16 of 32 has a label, which the last token of rank 0 predicts on two ranks."""
    return samples(12, 32, 33, supervise=lambda i, n: range(16, 17))


def test_the_first_label_of_a_shard():
    got = equals_one_process(2, Run(batch=1, data=first_of_rank_1))
    assert all(loss > 0 for loss in got[0]["losses"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_label_smoothing(accumulation):
    args = (("label_smoothing_factor", 0.2), ("gradient_accumulation_steps", accumulation))
    equals_one_process(2, Run(args=args))
    assert reference(Run(args=args))["losses"] != reference(Run(args=args[1:]))["losses"]


@pytest.mark.parametrize("stage,tile", [(2, 5), (3, 5), (2, None)])
def test_tiles_of_the_loss(stage, tile):
    args = (("label_smoothing_factor", 0.2), ("gradient_accumulation_steps", 2))
    equals_one_process(2, Run(stage=stage, args=args, loss_tile=tile))


def of_each_group():
    """The first and the third of every four samples have few labels, so groups have unequal numbers in a step."""
    return samples(16, 24, 25, supervise=lambda i, n: range(n - 3, n) if i % 4 < 2 else range(2, n))


def test_tokens_not_averaged_across_devices():
    """Returns the mean of the means of the data-parallel groups, as two processes without sharing compute it."""
    args = (("average_tokens_across_devices", False), ("gradient_accumulation_steps", 2))
    got = over_ranks(4, Run(batch=1, data=of_each_group, args=args, steps=1))
    runs = [Run(batch=2, data=functools.partial(part, group), steps=1) for group in range(2)]
    want = [reference(run) for run in runs]
    mean = sum(answer["losses"][0] for answer in want) / 2
    assert abs(got[0]["losses"][0] - mean) < 1e-5 * mean
    for name, change in got[0]["change"].items():
        wanted = (want[0]["change"][name] + want[1]["change"][name]) / 2
        assert (change - wanted).norm() <= 1e-4 * wanted.norm() + 1e-6, name


def part(group):
    """Returns the samples that a group of two ranks reads in the first round of four batches."""
    return of_each_group()[2 * group : 2 * group + 2]


def own_loss():
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    return {"compute_loss_func": compute_loss_func}


def test_compute_loss_func_is_refused():
    raises_on_ranks(2, ValueError, "compute_loss_func is not supported", sharded, Run(trainer=own_loss))


def test_neftune_is_refused():
    run = Run(args=(("neftune_noise_alpha", 5.0),))
    raises_on_ranks(2, ValueError, "neftune_noise_alpha is not supported", sharded, run)


def ignores_shift_labels(model):
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.float().logsumexp(-1).mean()
    return model


def test_a_loss_of_the_models_own_is_refused():
    raises_on_ranks(2, ValueError, "a loss other than the cross entropy", sharded, Run(prepare=ignores_shift_labels))


def without_labels():
    return [{name: row[name] for name in ("input_ids", "sample")} for row in samples()]


def test_batches_without_labels_are_refused():
    raises_on_ranks(2, ValueError, "the batch has no labels", sharded, Run(data=without_labels))


def routers(model):
    model.config.output_router_logits = True
    model.router_aux_loss_coef = 1.0  # as large as the cross entropy, so that a wrong scale shows
    return model


def padded_left():
    return {"data_collator": Collate("left")}


ROUTED = Run("qwen3_moe", prepare=routers)


@pytest.mark.parametrize(
    "stage,accumulation,trainer", [(2, 1, None), (2, 2, padded_left), (3, 1, padded_left), (3, 2, None)]
)
def test_auxiliary_losses(stage, accumulation, trainer):
    args = (("gradient_accumulation_steps", accumulation),)
    equals_one_process(2, dataclasses.replace(ROUTED, stage=stage, args=args, trainer=trainer))


@pytest.mark.parametrize("stage", [2, 3])
def test_auxiliary_losses_of_data_parallel_groups_add_up(stage):
    """As in Trainer under data parallelism; and as in one process, whose micro-batches are those of all groups."""
    got = over_ranks(4, dataclasses.replace(ROUTED, stage=stage, args=(("gradient_accumulation_steps", 2),)))
    want = reference(dataclasses.replace(ROUTED, args=(("gradient_accumulation_steps", 4),)))
    for answer in got:
        assert_equal(answer, want)


def test_auxiliary_losses_of_a_compiled_model():
    args = (("torch_compile", True), ("torch_compile_backend", "aot_eager"))
    equals_one_process(2, dataclasses.replace(ROUTED, args=args, steps=1))


def test_auxiliary_losses_count():
    losses = [reference(run)["losses"] for run in (ROUTED, dataclasses.replace(ROUTED, prepare=None))]
    assert losses[0][0] > losses[1][0] + 1


def test_label_smoothing_leaves_auxiliary_losses_out():
    equals_one_process(2, dataclasses.replace(ROUTED, args=(("label_smoothing_factor", 0.2),)))


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_hold_equal_parameters(stage):
    answers = over_ranks(4, Run(stage=stage, extra=checksums))
    assert len({tuple(sorted(answer["extra"].items())) for answer in answers}) == 1


def tokens_seen(trainer):
    return trainer.state.num_input_tokens_seen


class WithoutMask(Collate):
    def __call__(self, rows):
        return {name: x for name, x in super().__call__(rows).items() if name != "attention_mask"}


def without_mask():
    """The token of padding is another one than that with which sharding pads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(128)}
    raw = Tokenizer(models.WordLevel(words, unk_token="<1>"))
    return {
        "data_collator": WithoutMask(),
        "processing_class": PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<5>", eos_token="<2>"),
    }


@pytest.mark.parametrize("trainer", [None, without_mask])
@pytest.mark.parametrize("counted", ["all", "non_padding"])
def test_input_tokens_seen(counted, trainer):
    """The batches have odd lengths too, which sharding pads."""
    run = Run("llama", args=(("include_num_input_tokens_seen", counted),), extra=tokens_seen, trainer=trainer)
    wanted = reference(run)["extra"]
    assert wanted > 0 and [answer["extra"] for answer in over_ranks(2, run)] == [wanted] * 2


def checksums(trainer):
    import zlib

    from trainer_runs import parameters

    return {name: zlib.crc32(p.numpy().tobytes()) for name, p in parameters(trainer.model).items()}


def from_files(stage):
    from trainer_runs import Hashed

    from ds_mla_ulysses.integrations.deepspeed import load_config

    folder = Path(__file__).parents[2] / "configs"
    settings = load_config([folder / f"zero{stage}.json", folder / "cpu.json"])
    settings = {name: Hashed(x) if isinstance(x, dict) else x for name, x in settings.items()}
    return tuple(({"train_batch_size": "auto"} | settings).items())


def test_the_configs_of_this_repository():
    """With AdamW, clipping and the bucket sizes of the configs, the ZeRO stages agree with each other."""
    said_twice = (("adam_beta2", 0.95), ("weight_decay", 0.1), ("max_grad_norm", 1.0))
    args = (("learning_rate", 1e-3), *said_twice)
    runs = [over_ranks(2, Run(config=from_files(stage), args=args))[0] for stage in (1, 2, 3)]
    for got in runs[1:]:
        assert got["losses"] == pytest.approx(runs[0]["losses"], rel=1e-5)
        assert got["norms"] == pytest.approx(runs[0]["norms"], rel=1e-4)


def test_the_comparison_can_fail():
    from trainer_runs import assert_equal

    got, want = over_ranks(2, Run(args=(("learning_rate", 0.0501),)))[0], reference(Run())
    with pytest.raises(AssertionError):
        assert_equal(got, want)
    assert torch.isfinite(torch.tensor(got["losses"])).all()


def of_handle(trainer):
    import ds_mla_ulysses

    handle = ds_mla_ulysses.handle_of(trainer.model)
    if handle is None:  # the plain Trainer
        return None
    return {"strategy": handle.strategy, "split": handle.split, "head_chunks": handle.head_chunks}


@pytest.mark.parametrize(
    "stage,settings",
    [
        (2, dict(strategy="latent_kv")),
        (3, dict(strategy="latent_kv")),
        (3, dict(strategy="latent_qkv")),
        (2, dict(strategy="gather_kv", split="head_tail")),
        (3, dict(strategy="gather_kv", split="head_tail", family="llama")),
        (3, dict(strategy="latent_kv", head_chunks=2)),
        (3, dict(strategy="packed", head_chunks=2, family="llama", args=(("gradient_checkpointing", True),))),
    ],
)
def test_strategies(stage, settings):
    for answer in equals_one_process(2, Run(stage=stage, extra=of_handle, **settings)):
        assert {name: answer["extra"][name] for name in settings if name in answer["extra"]} == {
            name: value for name, value in settings.items() if name not in ("family", "args")
        }
