"""Runs the same Trainer in one plain process and over ranks with install(), and compares the two.

A Run describes a run. `reference(run)` trains in this process, without this package, on the samples of the
same optimizer steps; `over_ranks(size, run)` trains over the ranks of a pool. Both return a dict:

    losses, norms      as the Trainer logs them, one for each optimizer step
    change             by how much each parameter changed, {name: tensor}
    steps              (global_step, max_steps)
    seen               which samples this rank has read, in order
    extra              what Run.extra returned
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from models import gradient_errors, tiny_model
from rank_pool import run_ranks

RTOL = 1e-4
OF_INSTALL = ("sp_in_eval", "strategy", "split", "head_chunks", "loss_tile", "mlp_tile")


@dataclasses.dataclass(frozen=True)
class Run:
    """Describes a training run. It can be pickled and hashed.

    Attributes:
        family, model: arguments of `tiny_model`.
        sp, stage: sequence-parallel size and ZeRO stage; `only_sp_size` leaves data parallelism out of the config.
        batch: samples of a micro-batch of one group.
        steps: optimizer steps; None for what `args` says.
        args: further TrainingArguments.
        data: a function of this module or a test's that returns the samples, and its arguments.
        prepare: `prepare(model) -> model` before the Trainer is built.
        trainer: `trainer(Run) -> dict` of further arguments of the Trainer; its class under "class".
        extra: `extra(trainer) -> Any` after training.
        sp_in_eval, strategy, split, head_chunks, loss_tile, mlp_tile: arguments of install.
        handler: arguments of DeepSpeedSequenceParallelConfig.
    """

    family: str = "deepseek_v3"
    model: tuple[tuple[str, Any], ...] = ()
    sp: int = 2
    stage: int = 2
    only_sp_size: bool = False
    batch: int = 2
    steps: int | None = 3
    args: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    data: Callable[[], list[dict[str, Any]]] | None = None
    prepare: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    trainer: Callable[[], dict[str, Any]] | None = None
    extra: Callable[[Any], Any] | None = None
    sp_in_eval: bool = False
    strategy: str = "packed"
    split: str = "contiguous"
    head_chunks: int = 1
    loss_tile: int | str | None = "auto"
    mlp_tile: int | None = None
    handler: tuple[tuple[str, Any], ...] = ()


class Hashed(dict):
    """Nested settings of a Run that can be hashed."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


def plain(settings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Returns settings of a Run as ordinary dicts, which checkpoints may pickle."""
    return {name: dict(value) if isinstance(value, Hashed) else value for name, value in settings}


def samples(
    count: int = 24, low: int = 12, high: int = 40, seed: int = 3, supervise: Callable[[int, int], range] | None = None
) -> list[dict[str, Any]]:
    """Returns random samples of different odd and even lengths, each of which begins with a prompt without labels.

    Args:
        supervise: (sample, length) -> tokens with labels.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        n = int(torch.randint(low, high, (), generator=generator))
        ids = torch.randint(3, 110, (n,), generator=generator).tolist()
        wanted = range(int(torch.randint(n, (), generator=generator)), n) if supervise is None else supervise(i, n)
        labels = [token if j in wanted else -100 for j, token in enumerate(ids)]
        made.append({"input_ids": ids, "labels": labels, "sample": i})
    return made


class Collate:
    """Pads on the right (or left), adds a mask, and records the samples that it has seen."""

    def __init__(self, side: str = "right") -> None:
        self.seen: list[int] = []
        self.side = side

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.seen += [row["sample"] for row in rows if "sample" in row]
        longest = max(len(row["input_ids"]) for row in rows)
        names = {"input_ids": 0, "labels": -100, "position_ids": 0}
        batch = {}
        for name, padding in names.items():
            if name in rows[0]:
                batch[name] = torch.tensor([self._pad(row[name], longest, padding) for row in rows])
        mask = [self._pad([1] * len(row["input_ids"]), longest, 0) for row in rows]
        return batch | {"attention_mask": torch.tensor(mask)}

    def _pad(self, values: list[int], length: int, padding: int) -> list[int]:
        added = [padding] * (length - len(values))
        return added + values if self.side == "left" else values + added


def dataset(run: Run) -> list[dict[str, Any]]:
    return samples() if run.data is None else run.data()


def reference(run: Run, groups: int = 1) -> dict[str, Any]:
    """Trains in this process; the batch is `groups` times as large, as with so many data-parallel groups.

    Runs that differ only in how they are spread over ranks share one result.
    """
    spread = ("sp", "stage", "only_sp_size", "config", "handler", *OF_INSTALL)
    return _of_one_process(dataclasses.replace(run, **{name: getattr(Run, name) for name in spread}), groups)


@functools.cache
def _of_one_process(run: Run, groups: int) -> dict[str, Any]:
    return _train(run, 0, groups)


def over_ranks(size: int, run: Run) -> list[dict[str, Any]]:
    """Returns the results of all ranks."""
    return run_ranks(size, sharded, run)


def sharded(run: Run) -> dict[str, Any]:
    """Trains on a rank of a pool with install(), and uninstalls afterwards."""
    import torch.distributed as dist

    with installed(run):
        return _train(run, dist.get_world_size(), 1)


@contextlib.contextmanager
def installed(run: Run) -> Iterator[None]:
    """Calls install() with the run's arguments in a fresh state, and uninstalls afterwards."""
    import ds_mla_ulysses

    with fresh_state():
        ds_mla_ulysses.install(**{name: getattr(run, name) for name in OF_INSTALL})
        try:
            yield
        finally:
            ds_mla_ulysses.uninstall()


@contextlib.contextmanager
def fresh_state():
    """Resets Accelerate, transformers and DeepSpeed to their state in a new process, before and after the block."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    def reset() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PARALLELISM_CONFIG_"))]:
            del os.environ[name]

    reset()
    try:
        yield
    finally:
        reset()


def deepspeed_config(run: Run) -> dict[str, Any]:
    auto = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping"),
        "auto",
    )
    return auto | {"zero_optimization": {"stage": run.stage}, "zero_allow_untested_optimizer": True} | plain(run.config)


def training_arguments(run: Run, world: int, groups: int = 1, kind: Any = None, **more: Any) -> Any:
    """Returns the TrainingArguments of a run, or those of a subclass `kind`. `world` 0 is one plain process."""
    from transformers import TrainingArguments

    settings: dict[str, Any] = dict(
        output_dir=tempfile.gettempdir(),
        use_cpu=True,
        per_device_train_batch_size=run.batch * groups,
        max_steps=run.steps if run.steps is not None else -1,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        log_level="error",
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )
    settings |= plain(run.args) | more
    if world:
        from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

        data_parallel = 1 if run.only_sp_size else world // run.sp
        sizes = dict(sp_backend="deepspeed", sp_size=run.sp, dp_shard_size=data_parallel)
        if run.handler:
            sizes["sp_handler"] = DeepSpeedSequenceParallelConfig(**dict(run.handler))
        settings |= dict(deepspeed=deepspeed_config(run), parallelism_config=ParallelismConfig(**sizes))
    return (kind or TrainingArguments)(**settings)


def build(run: Run, world: int, groups: int = 1, **more: Any) -> Any:
    """Returns the Trainer of a run. Its model is built before the TrainingArguments, so without zero.Init."""
    from transformers import Trainer

    model = tiny_model(run.family, **{"dtype": torch.float32, **dict(run.model)})
    if run.prepare is not None:
        model = run.prepare(model)
    arguments = training_arguments(run, world, groups, **more)
    given = {} if run.trainer is None else run.trainer()
    trainer = given.pop("class", Trainer)(
        model=model, args=arguments, **{"train_dataset": dataset(run), "data_collator": Collate(), **given}
    )
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def _train(run: Run, world: int, groups: int) -> dict[str, Any]:
    trainer = build(run, world, groups)
    before = parameters(trainer.model)
    trainer.train()
    return result(trainer, before) | {"extra": None if run.extra is None else run.extra(trainer)}


def result(trainer: Any, before: dict[str, torch.Tensor]) -> dict[str, Any]:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    after = parameters(trainer.model)
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry.get("grad_norm") for entry in logs],
        "change": {name: after[name] - before[name] for name in before},
        "steps": (trainer.state.global_step, trainer.state.max_steps),
        "seen": getattr(trainer.data_collator, "seen", None),
    }


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns copies of all parameters, gathered if ZeRO-3 has partitioned them."""
    from deepspeed.runtime.zero import GatheredParameters

    copies = {}
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]) if hasattr(parameter, "ds_id") else contextlib.nullcontext():
            copies[name] = parameter.detach().clone()
    return copies


def assert_equal(got: dict[str, Any], want: dict[str, Any], rtol: float = RTOL) -> None:
    """Compares losses, gradient norms and the change of every parameter."""
    assert len(got["losses"]) == len(want["losses"]) > 0
    for name in ("losses", "norms"):
        for a, b in zip(got[name], want[name], strict=True):
            assert a is not None and abs(a - b) <= rtol * max(abs(b), 1e-6), (name, got[name], want[name])
    assert all(torch.isfinite(x).all() for x in got["change"].values())
    worst = gradient_errors(got["change"], want["change"])[:3]
    # Parameters are rounded to fp32, which limits the precision of small changes.
    worst = [(error, name) for error, name in worst if error > rtol and not _is_rounding(got, want, name)]
    assert not worst, worst


def _is_rounding(got: dict[str, Any], want: dict[str, Any], name: str) -> bool:
    return bool((got["change"][name] - want["change"][name]).abs().max() <= 2**-22)


def equals_one_process(size: int, run: Run, rtol: float = RTOL) -> list[dict[str, Any]]:
    """Trains in one process and over ranks, compares every rank, and returns the results of the ranks."""
    want = reference(run, size // run.sp)
    got = over_ranks(size, run)
    for answer in got:
        assert_equal(answer, want, rtol)
    return got


def seen_by_all(answers: Sequence[dict[str, Any]]) -> list[int]:
    return sorted(sample for answer in answers for sample in answer["seen"])
