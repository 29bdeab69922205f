"""What install replaces and puts back, and the life of models, Trainers and checkpoints around it."""

import contextlib
import importlib
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from models import assert_gradients, tiny_model
from rank_pool import raises_on_ranks, run_ranks
from trainer_runs import (
    Collate,
    Hashed,
    Run,
    assert_equal,
    build,
    dataset,
    equals_one_process,
    fresh_state,
    parameters,
    reference,
    result,
    samples,
    sharded,
)

import ds_mla_ulysses
from ds_mla_ulysses.version import REQUIREMENTS

# Every row of the table in integrations/install.py.
SYMBOLS = [
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF", "register_with_transformers"),
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", None, "UlyssesSPDataLoaderAdapter"),
    ("deepspeed", None, "initialize"),
    ("deepspeed.utils.groups", None, "_get_sequence_parallel_group"),
    ("deepspeed.utils.groups", None, "_get_sequence_parallel_world_size"),
    ("deepspeed.utils.groups", None, "_get_sequence_parallel_rank"),
    ("accelerate.accelerator", "Accelerator", "deepspeed_ulysses_dl_adapter"),
    ("accelerate.accelerator", None, "skip_first_batches"),
    ("transformers.trainer", None, "skip_first_batches"),
    ("transformers.trainer", "Trainer", "compute_loss"),
    ("transformers.trainer", "Trainer", "_get_num_items_in_batch"),
    ("transformers.trainer", "Trainer", "_track_num_input_tokens"),
    ("transformers.trainer", "Trainer", "prediction_step"),
]


def found():
    values = []
    for module, owner, name in SYMBOLS:
        holder = importlib.import_module(module)
        values.append(vars(getattr(holder, owner) if owner else holder)[name])
    return values


def others():
    """Returns all other attributes of the modules and classes in which install replaces symbols."""
    from transformers import AttentionInterface

    everything = {"attention functions": (AttentionInterface._global_mapping.keys() - {"ds_mla_ulysses"})}
    for module, owner, _ in SYMBOLS:
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        names = {name for m, o, name in SYMBOLS if (m, o) == (module, owner)}
        everything |= {(module, owner, k): id(v) for k, v in vars(holder).items() if k not in names and k[:2] != "__"}
    return everything


@pytest.fixture(autouse=True)
def uninstalled():
    yield
    ds_mla_ulysses.uninstall()


@pytest.mark.parametrize("sp_in_eval", [False, True])
def test_uninstall_puts_every_symbol_back(sp_in_eval):
    before, rest = found(), others()
    ds_mla_ulysses.install(sp_in_eval=sp_in_eval)
    replaced = [a is not b for a, b in zip(found(), before, strict=True)]
    assert replaced == [True] * 12 + [sp_in_eval]
    assert others() == rest
    ds_mla_ulysses.uninstall()
    assert all(a is b for a, b in zip(found(), before, strict=True))
    assert others() == rest
    ds_mla_ulysses.uninstall()


def test_the_end_of_the_interpreter_uninstalls(monkeypatch):
    import atexit

    before, at_exit = found(), []
    monkeypatch.setattr(atexit, "register", lambda function, *args: at_exit.append((function, args)))
    ds_mla_ulysses.install(sp_in_eval=True)
    assert (ds_mla_ulysses.uninstall, ()) in at_exit
    assert not any(a is b for a, b in zip(found(), before, strict=True))
    for function, args in reversed(at_exit):
        function(*args)
    assert all(a is b for a, b in zip(found(), before, strict=True))


def test_a_symbol_that_is_replaced_twice():
    """Every original is read before the first replacement, so no replacement is taken for an original."""
    from ds_mla_ulysses.integrations.accelerate import RegisteredModels
    from ds_mla_ulysses.integrations.install import Installation, symbols_of

    before, models = found(), RegisteredModels({})
    symbols = symbols_of(models, sp_in_eval=True)
    installation = Installation({}, models, [*symbols, *symbols])
    assert not any(a is b for a, b in zip(found(), before, strict=True))
    installation.undo()
    assert all(a is b for a, b in zip(found(), before, strict=True))


def test_signatures_are_kept():
    import inspect

    before = [inspect.signature(x) for x in found()[2:]]
    ds_mla_ulysses.install(sp_in_eval=True)
    for now, was in zip(found()[2:], before, strict=True):
        assert [*inspect.signature(now).parameters] == [*was.parameters]


def test_install_twice():
    ds_mla_ulysses.install()
    now = found()
    ds_mla_ulysses.install()
    assert all(a is b for a, b in zip(found(), now, strict=True))
    found_settings = r"installed already, with sp_in_eval=False, strategy='packed', split='contiguous', head_chunks=1, loss_tile='auto', mlp_tile=None, checks='always': call ds_mla_ulysses.uninstall"
    for other in (dict(sp_in_eval=True), dict(strategy="gather_kv"), dict(strategy="gather_kv", split="head_tail")):
        with pytest.raises(RuntimeError, match=found_settings):
            ds_mla_ulysses.install(**other)
    ds_mla_ulysses.uninstall()
    with pytest.raises(ValueError, match=r"strategy must be one of \['auto', 'packed', .* 'gather_kv'\], got 'ring'"):
        ds_mla_ulysses.install(strategy="ring")
    with pytest.raises(ValueError, match="split='head_tail' is for strategy='gather_kv'"):
        ds_mla_ulysses.install(split="head_tail")
    with pytest.raises(ValueError, match=r"checks must be one of \['always', 'first', 'never'\], got 'often'"):
        ds_mla_ulysses.install(checks="often")


def test_the_command_passes_every_argument_of_install(monkeypatch, tmp_path):
    import inspect
    import sys

    from ds_mla_ulysses import run

    script, given = tmp_path / "script.py", []
    script.write_text("import sys\nassert sys.argv[1:] == ['--checks', 'mine'], sys.argv")
    monkeypatch.setattr(run, "install", lambda **settings: given.append(settings))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    run.main([str(script), "--checks", "mine"])
    defaults = {name: p.default for name, p in inspect.signature(ds_mla_ulysses.install).parameters.items()}
    assert given == [defaults]
    wanted = dict(
        sp_in_eval=True, strategy="gather_kv", split="head_tail", head_chunks=2, loss_tile=7, mlp_tile=9, checks="first"
    )
    assert wanted.keys() == defaults.keys()
    options = (
        "--sp-in-eval --strategy gather_kv --split head_tail --head-chunks 2 --loss-tile 7 --mlp-tile 9 --checks first"
    )
    run.main([*options.split(), str(script), "--checks", "mine"])
    assert given[1] == wanted
    run.main(["--loss-tile", "none", str(script), "--checks", "mine"])
    assert given[2] == defaults | dict(loss_tile=None)


def test_untested_versions_are_named(monkeypatch):
    monkeypatch.setitem(REQUIREMENTS, "accelerate", ("0.1", "0.2"))
    message = r"accelerate 1\.\S+ is outside the tested range \(0.1 to 0.2\)"
    with pytest.warns(UserWarning, match=message) as caught:
        ds_mla_ulysses.install()
    assert len([w for w in caught if "tested range" in str(w.message)]) == 1


def test_versions_inside_the_tested_range_do_not_warn(monkeypatch):
    monkeypatch.setitem(REQUIREMENTS, "accelerate", ("1.1.0", "99.0"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ds_mla_ulysses.install()


def test_tested_versions_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ds_mla_ulysses.install()


def test_a_missing_symbol(monkeypatch):
    from transformers import Trainer

    monkeypatch.delattr(Trainer, "_get_num_items_in_batch")
    monkeypatch.setitem(globals(), "SYMBOLS", [s for s in SYMBOLS if s[2] != "_get_num_items_in_batch"])
    before = found()
    with pytest.raises(RuntimeError, match=r"has no transformers.trainer.Trainer._get_num_items_in_batch.*use transf"):
        ds_mla_ulysses.install()
    assert all(a is b for a, b in zip(found(), before, strict=True))


def test_a_trainer_without_sequence_parallelism():
    """install changes nothing for a Trainer in one process without DeepSpeed."""
    want = reference(Run())
    with fresh_state():
        ds_mla_ulysses.install(sp_in_eval=True)
        trainer = build(Run(), 0)
        before = parameters(trainer.model)
        trainer.train()
        got = result(trainer, before)
        assert trainer.evaluate(samples(4))["eval_loss"] > 0
    assert got["losses"] == want["losses"] and got["norms"] == want["norms"]


@contextlib.contextmanager
def installed(**settings):
    with fresh_state():
        ds_mla_ulysses.install(**settings)
        try:
            yield
        finally:
            ds_mla_ulysses.uninstall()


def without_sp(run):
    """Trains with DeepSpeed and data parallelism alone."""
    import torch.distributed as dist

    with installed():
        trainer = build(run, dist.get_world_size())
        before = parameters(trainer.model)
        trainer.train()
        assert ds_mla_ulysses.handle_of(trainer.model) is None
        return result(trainer, before)


@pytest.mark.parametrize("stage", [1, 3])
def test_sp_size_1(stage):
    for answer in run_ranks(2, without_sp, Run(sp=1, stage=stage)):
        assert_equal(answer, reference(Run(), 2))


def two_trainers(run, same_model, families):
    """Runs Trainers one after the other, each with a new optimizer, and counts the process groups after each."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _world

    answers, groups = [], []
    model = None
    with installed():
        for family in families:
            with fresh_state():
                trainer = build(Run(family, stage=run.stage, sp=run.sp, args=run.args), dist.get_world_size())
                if same_model and model is not None:
                    trainer.model = trainer.model_wrapped = model
                model = trainer.model
                before = parameters(model)
                trainer.train()
                answers.append(result(trainer, before))
                groups.append(len(_world.pg_map))
        assert ds_mla_ulysses.handle_of(model) is not None
    assert ds_mla_ulysses.handle_of(model) is None  # uninstall restored it
    return answers, groups


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_two_trainers(size, stage):
    steps = (("gradient_accumulation_steps", 2),)
    run = Run(stage=stage, args=steps)
    for answers, _ in run_ranks(size, two_trainers, run, False, ["deepseek_v3", "llama"]):
        for answer, family in zip(answers, ["deepseek_v3", "llama"], strict=True):
            assert_equal(answer, reference(Run(family, args=steps), size // 2))


def test_two_trainers_of_one_model():
    want = reference_of_two()
    for answers, _ in run_ranks(2, two_trainers, Run(stage=2), True, ["llama", "llama"]):
        for answer, wanted in zip(answers, want, strict=True):
            assert_equal(answer, wanted)


def reference_of_two():
    model, answers = None, []
    for _ in range(2):
        trainer = build(Run("llama"), 0)
        if model is not None:
            trainer.model = trainer.model_wrapped = model
        model = trainer.model
        before = parameters(model)
        trainer.train()
        answers.append(result(trainer, before))
    return answers


def trains_plainly_afterwards(run):
    """After uninstall, a plain model and a plain engine train correctly in the same process."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    sharded(run)
    assert groups.mpu is None
    with fresh_state():
        trainer = build(Run(sp=1, stage=2), dist.get_world_size())
        before = parameters(trainer.model)
        trainer.train()
        return result(trainer, before)


def test_after_uninstall():
    for answer in run_ranks(2, trains_plainly_afterwards, Run()):
        assert_equal(answer, reference(Run(), 2))


# Checkpoints


def saved(run, folder):
    """Trains sharded and saves as the Trainer does."""
    import torch.distributed as dist

    with installed():
        trainer = build(run, dist.get_world_size(), output_dir=folder, save_strategy="steps", save_steps=3)
        trainer.train()
        trainer.save_model(f"{folder}/final")
        return parameters(trainer.model)


@pytest.mark.parametrize("stage", [2, 3])
def test_saved_models_are_plain_ones(stage):
    import json
    import subprocess
    import sys

    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.mkdtemp())
    try:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        run = Run("llama", stage=stage, config=(("zero_optimization", Hashed(zero)),))
        want = run_ranks(2, saved, run, str(folder))[0]
        loaded = AutoModelForCausalLM.from_pretrained(folder / "final")
        assert [*dict(loaded.named_parameters())] == [*want]
        assert_gradients({name: p.detach() for name, p in loaded.named_parameters()}, want, 1e-7)
        assert "ulysses" not in json.dumps(json.loads((folder / "final/config.json").read_text()))
        checkpoint = folder / "checkpoint-3"
        script = [sys.executable, "zero_to_fp32.py", ".", "fp32"]
        done = subprocess.run(script, cwd=checkpoint, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        state = {}
        for file in (checkpoint / "fp32").glob("*.bin"):
            state |= torch.load(file)
        for file in (checkpoint / "fp32").glob("*.safetensors"):
            from safetensors.torch import load_file

            state |= load_file(file)
        assert_gradients({name: state[name] for name in want}, want, 1e-7)
    finally:
        shutil.rmtree(folder)


def continued(run, folder, sp):
    """Resumes from a checkpoint with another sequence-parallel size on the same number of processes."""
    import dataclasses

    import torch.distributed as dist

    with installed():
        other = dataclasses.replace(run, sp=sp)
        trainer = build(other, dist.get_world_size(), output_dir=folder, max_steps=5, ignore_data_skip=True)
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return logs, trainer.state.global_step


@pytest.mark.parametrize("stage", [1, 3])
def test_resuming_with_another_sp_size(stage):
    folder = tempfile.mkdtemp()
    try:
        run = Run("llama", stage=stage, batch=1)
        run_ranks(4, saved, run, folder)
        logs = {sp: run_ranks(4, continued, run, folder, sp)[0] for sp in (4, 2, 1)}
        assert all(steps == 5 for _, steps in logs.values())
        # All runs resume with the same log of the first three steps.
        assert len({tuple(losses[:3]) for losses, _ in logs.values()}) == 1
    finally:
        shutil.rmtree(folder)


# Models built by from_pretrained under ZeRO-3


def from_pretrained(folder, run):
    import torch.distributed as dist
    from trainer_runs import training_arguments
    from transformers import AutoModelForCausalLM, Trainer

    with installed():
        arguments = training_arguments(run, dist.get_world_size())  # transformers uses zero.Init as long as this exists
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        trainer = Trainer(model=model, args=arguments, train_dataset=dataset(run), data_collator=Collate())
        before = parameters(model)
        trainer.train()
        return result(trainer, before)


@pytest.mark.parametrize("size", [2, 4])
def test_models_loaded_under_zero_3(size):
    folder = tempfile.mkdtemp()
    try:
        tiny_model("llama", torch.float32).save_pretrained(folder)
        run = Run("llama", stage=3, args=(("gradient_accumulation_steps", 2),))
        for answer in run_ranks(size, from_pretrained, folder, run):
            assert_equal(answer, reference(run, size // 2))
    finally:
        shutil.rmtree(folder)


# Subclasses and custom loops


def own_loop(stage):
    """Trains with Accelerate without a Trainer. The loss comes from handle_of(engine)."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import ParallelismConfig

    with installed():
        model = tiny_model("llama", torch.float32)  # before the plugin, which makes transformers use zero.Init
        config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0}
        config |= {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
        sizes = ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_shard_size=dist.get_world_size() // 2)
        PartialState(cpu=True)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=sizes)
        loader = torch.utils.data.DataLoader(samples(), batch_size=2, collate_fn=Collate())
        before = parameters(model)
        engine, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
        handle = ds_mla_ulysses.handle_of(engine)
        losses, norms = [], []
        batches = iter(loader)
        for _ in range(3):
            step = [next(batches) for _ in range(2)]
            num_items, total = handle.num_items(step), 0.0
            for i, batch in enumerate(step):
                accelerator.gradient_state._set_sync_gradients(i == 1)
                loss = handle.loss(engine(**batch).logits, batch, num_items=num_items)
                accelerator.backward(loss)
                value = loss.detach().clone()
                dist.all_reduce(value)
                total += value.item() / handle.group.size
            losses.append(total)
            norms.append(accelerator.deepspeed_engine_wrapped.get_global_grad_norm())
        after = parameters(model)
        return {"losses": losses, "norms": norms, "change": {name: after[name] - before[name] for name in before}}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_with_accelerate(size, stage):
    want = reference(Run("llama", args=(("gradient_accumulation_steps", 2),)), size // 2)
    for answer in run_ranks(size, own_loop, stage):
        assert_equal(answer, want)


def documented_loop(stage, of_the_group):
    """Runs the loop of Accelerate's documentation and of its test_ds_alst_ulysses_sp.py, one SGD step for each batch."""
    import torch.distributed as dist
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import ParallelismConfig
    from deepspeed.runtime.utils import move_to_device
    from deepspeed.utils import groups

    with installed():
        model = tiny_model("llama", torch.float32)
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": 2}
        config |= {"zero_allow_untested_optimizer": True}
        sizes = ParallelismConfig(sp_backend="deepspeed", sp_size=2, dp_shard_size=dist.get_world_size() // 2)
        PartialState(cpu=True)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=sizes)
        loader = torch.utils.data.DataLoader(samples(), batch_size=2, collate_fn=Collate())
        before = parameters(model)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader)
        unwrapped = accelerator.unwrap_model(model)
        handle = ds_mla_ulysses.handle_of(model)
        sp_group, sp_world_size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
        assert (sp_world_size, groups._get_sequence_parallel_rank()) == (2, handle.group.rank)
        assert sp_group is handle.group.process_group
        losses, norms = [], []
        for _, batch in zip(range(3), loader, strict=False):
            optimizer.zero_grad()
            batch = move_to_device(batch, model.device)
            outputs = model(**batch)
            shift_labels = batch["shift_labels"]
            loss = unwrapped.loss_function(
                logits=outputs.logits, labels=None, shift_labels=shift_labels, vocab_size=unwrapped.config.vocab_size
            )
            if of_the_group:
                losses_per_rank = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
                good_tokens = (shift_labels != -100).view(-1).sum()
                good_tokens_per_rank = torch.distributed.nn.functional.all_gather(good_tokens, group=sp_group)
                total_loss = sum(
                    losses_per_rank[rank] * good_tokens_per_rank[rank]
                    for rank in range(sp_world_size)
                    if good_tokens_per_rank[rank] > 0
                )
                loss = total_loss / max(sum(good_tokens_per_rank), 1)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            norms.append(accelerator.deepspeed_engine_wrapped.get_global_grad_norm())
        after = parameters(unwrapped)
        return {"losses": losses, "norms": norms, "change": {name: after[name] - before[name] for name in before}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loop_that_accelerate_documents(stage):
    """A differentiable gather makes its loss the same on all ranks of the group, so it is accepted and correct."""
    want = reference(Run("llama"))
    for answer in run_ranks(2, documented_loop, stage, True):
        assert_equal(answer, want)


def test_a_mean_of_one_ranks_tokens_in_that_loop():
    raises_on_ranks(2, RuntimeError, "the loss is not that of the sequence-parallel group", documented_loop, 2, False)


def plain_engine_beside(stage):
    """Builds a plain engine while another model is sequence-parallel, and returns the weight after two steps."""
    import deepspeed
    from deepspeed.utils import groups

    with installed(checks="first"):
        trainer = build(Run("llama", stage=stage), 2)
        trainer.train()
        handle = ds_mla_ulysses.handle_of(trainer.model)
        assert handle.checks.policy == "first"
        assert groups._get_sequence_parallel_world_size() == 2
        plain = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(plain.weight)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine, *_ = deepspeed.initialize(model=plain, config=config)
        assert engine.sequence_parallel_size == 1
        for rows in range(1, 3):
            engine.backward(engine(torch.full((2, 3), float(rows + 2 * handle.group.rank))).sum())
            engine.step()
        assert groups._get_sequence_parallel_world_size() == 2
        assert groups._get_sequence_parallel_group() is handle.group.process_group
        return parameters(plain)["weight"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plain_engine_beside_a_parallelized_model(stage):
    """Each rank has two rows of `rows + 2 * rank`, so the mean over ranks of the gradient is 2 * (rows + 1)."""
    want = torch.full((3, 3), 1 - 0.1 * 2 * ((1 + 1) + (2 + 1)))
    for weight in run_ranks(2, plain_engine_beside, stage):
        torch.testing.assert_close(weight, want)


def register(how):
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    with installed():
        if how == "name":
            UlyssesSPAttentionHF.register_with_transformers("some/model", "sdpa", 2, 1)
        if how == "by hand":
            from accelerate import PartialState

            PartialState(cpu=True)
            model = tiny_model("llama")
            ds_mla_ulysses.parallelize(model)
            UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", 2, 1)


def test_register_with_a_name():
    raises_on_ranks(2, ValueError, "give the loaded model, not 'some/model'", register, "name")


def test_register_a_model_that_is_parallelized_by_hand():
    raises_on_ranks(2, RuntimeError, "parallelized already", register, "by hand")


def test_not_all_processes_are_seen():
    run = Run(args=(("use_cpu", False),))
    raises_on_ranks(2, ValueError, "Accelerate sees 1 of the 2 processes: .*use_cpu=True", sharded, run)


def forgets_the_layout():
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            wanted = {name: inputs[name] for name in ("input_ids", "position_ids")} | {"labels": inputs["shift_labels"]}
            return super().compute_loss(model, wanted, return_outputs, num_items_in_batch)

    return {"class": Own}


def test_a_batch_without_its_layout():
    raises_on_ranks(2, ValueError, "a training batch is not sharded", sharded, Run(trainer=forgets_the_layout))


def forward_without_a_layout():
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(input_ids=inputs["input_ids"], labels=inputs["input_ids"]).loss

    return {"class": Own}


def test_a_training_forward_without_a_layout():
    raises_on_ranks(
        2,
        RuntimeError,
        "was given no layout, so it would train on this rank",
        sharded,
        Run(trainer=forward_without_a_layout),
    )


def loss_of_its_own():
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("shift_labels")
            return torch.nn.functional.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())

    return {"class": Own}


def test_a_loss_of_one_ranks_tokens():
    raises_on_ranks(
        2, RuntimeError, "the loss is not that of the sequence-parallel group", sharded, Run(trainer=loss_of_its_own)
    )


def scaled_loss():
    from transformers import Trainer

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    return {"class": Own}


def test_a_compute_loss_on_top_of_the_trainers():
    args = (("gradient_accumulation_steps", 2),)
    equals_one_process(2, Run("llama", trainer=scaled_loss, args=args))


def other_forwards(run):
    """Runs plain forwards of whole sequences with gradients inside plain() between the steps."""
    import torch.distributed as dist
    from transformers import TrainerCallback

    whole, found = Collate()(samples(2)), []

    class Ask(TrainerCallback):
        def on_step_begin(self, args, state, control, model, **kwargs):
            with ds_mla_ulysses.handle_of(model).plain():
                found.append(model(**whole, use_cache=False).loss.item())

    with installed():
        trainer = build(run, dist.get_world_size())
        trainer.add_callback(Ask())
        before = parameters(trainer.model)
        trainer.train()
        return result(trainer, before) | {"found": found}


def test_plain_forwards_between():
    with torch.no_grad():
        want = tiny_model("llama", torch.float32)(**Collate()(samples(2)), use_cache=False).loss.item()
    for answer in run_ranks(2, other_forwards, Run("llama")):
        assert_equal(answer, reference(Run("llama")))
        assert answer["found"][0] == pytest.approx(want, rel=1e-6) and len(set(answer["found"])) == 3
