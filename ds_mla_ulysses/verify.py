"""`--verify` of the examples: trains once more in one process without sequence parallelism, and compares.

```python
from ds_mla_ulysses.verify import run
...
if __name__ == "__main__":
    run(main)
```
`run(main)` calls `main()`. Two options are its own, so the script's parser does not see them: `--json FILE` writes what was
measured, and `--verify` compares with one process. For that, rank 0 starts the script once more as a new process without
the launcher's environment. In the new process, `parallelize`, `initialize` and `install` are replaced by stand-ins: the
model is the unpatched one, the optimizer is torch's, and a Trainer is the plain Trainer. The script's own `main` runs, on
the same data. Losses, gradient norms and trained parameters have to agree. Options that `main` appends to `sys.argv` reach the new
process too: use them for values that depend on the number of processes.

Both runs train with SGD, in fp32 and without clipping. Adam would hide a gradient of the wrong scale, and so would
clipping. The script needs the option `--steps`, which is 5 with `--verify` unless given, has to load its model with
`from_pretrained`, and has to call `ds_mla_ulysses.parallelize`, `.initialize` and `.install` by these names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .comm.traffic import TrafficMeter
from .errors import UlyssesRuntimeError, UlyssesValueError

#: The package, in which names are replaced.
dmu = importlib.import_module("ds_mla_ulysses")
#: The largest relative difference that counts as equal.
TOLERANCE = 1e-4
STEPS, LEARNING_RATE = 5, 0.02
CURVES = ("loss", "grad_norm", "eval_loss")
#: Tells a process that it is the one process to compare with: JSON, the arguments of `_run_as_one_process`.
_ONE_PROCESS = "DS_MLA_ULYSSES_ONE_PROCESS"
#: Beginnings of the names of the variables that launchers set.
_OF_LAUNCHERS: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_", "CROSS_", "GROUP_", "ROLE_", "MASTER_")
_OF_LAUNCHERS += ("ACCELERATE_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "DEEPSPEED_")

Worst = tuple[float, str]  # a difference, and the name of the parameter that has it


@dataclass
class Observed:
    """What was seen of a training run.

    Attributes:
        curves: by name, the values of each optimizer step (of each evaluation for "eval_loss").
        model: the trained model.
        start: by name, its parameters before training; in the one process only.
        handle: what `parallelize` returned, None for a Trainer.
        tokens: the number of tokens that this rank's group trained on, without padding; for a loop only.
        trainer: the Trainer, if the script has one.
    """

    curves: dict[str, list[float]] = field(default_factory=dict)
    model: nn.Module | None = None
    start: dict[str, Tensor] = field(default_factory=dict)
    handle: Any = None
    tokens: int = 0
    trainer: Any = None

    def add(self, name: str, value: float | None) -> None:
        if value is not None:
            self.curves.setdefault(name, []).append(float(value))

    def read_trainer(self) -> None:
        """Takes the curves from the log of the Trainer, if there is one."""
        if self.trainer is not None:
            logs = self.trainer.state.log_history
            self.curves = {name: [log[name] for log in logs if name in log] for name in CURVES}


def run(main: Callable[[], object]) -> None:
    """Calls `main`, and with `--verify` compares with one process. Ends the process group.

    Raises:
        SystemExit: 1 if something differs by more than TOLERANCE.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--json", type=Path)
    options, given = parser.parse_known_args()
    if options.verify:
        sys.argv[1:] = ["--steps", str(STEPS), *given]  # what is given comes later, and wins
    else:
        sys.argv[1:] = given
    _prepare_process()
    if options.verify and "transformers" in sys.modules:
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    if _ONE_PROCESS in os.environ:
        _run_as_one_process(main, **json.loads(os.environ[_ONE_PROCESS]))
        return
    observed = Observed()
    with TrafficMeter() as meter, _observing(observed, options.verify):
        main()
    observed.read_trainer()
    result: dict[str, Any] = dict(observed.curves)
    if options.verify:
        result |= _compare(observed, meter, sys.argv[1:])
    if not dist.is_initialized() or dist.get_rank() == 0:
        if options.json:
            options.json.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if not result.get("equal", True):
        raise SystemExit(1)


def _prepare_process() -> None:
    """Quiet logs; on a CPU, DeepSpeed's accelerator, and threads such that the processes share the cores."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
        if "OMP_NUM_THREADS" not in os.environ:
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # Accelerate reads it


@contextmanager
def _replaced(owner: Any, **new: Any) -> Iterator[None]:
    """Attributes of a module or class are others inside the block."""
    before = {name: vars(owner)[name] if name in vars(owner) else getattr(owner, name) for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _loading_in_float32() -> Iterator[None]:
    """Inside the block, `from_pretrained` of every model gives fp32."""
    from transformers import PreTrainedModel

    original = vars(PreTrainedModel)["from_pretrained"]

    def in_float32(cls: type, *args: Any, **kwargs: Any) -> Any:
        return original.__get__(None, cls)(*args, **(kwargs | {"dtype": torch.float32}))

    with _replaced(PreTrainedModel, from_pretrained=classmethod(in_float32)):
        yield


# ---------------------------------------------------------------------- the run over all processes


@contextmanager
def _observing(observed: Observed, verify: bool) -> Iterator[None]:
    """Notes what `main` trains; if `verify`, with SGD in fp32."""
    parallelize, initialize = dmu.parallelize, dmu.initialize

    def observed_parallelize(model: nn.Module, **settings: Any) -> Any:
        handle = parallelize(model, **settings)
        shard = handle.shard

        def counted_shard(batch: Mapping[str, Any]) -> Any:
            observed.tokens += batch["input_ids"].numel()
            return shard(batch)

        handle.shard = counted_shard
        observed.model, observed.handle = model, handle
        return handle

    def observed_initialize(*, config: Any, **arguments: Any) -> Any:
        if verify:
            config = _comparable_config(config)
            arguments.pop("lr", None)
        engine, *others = initialize(config=config, **arguments)
        _observe_engine(engine, observed)
        return engine, *others

    with ExitStack() as stack:
        stack.enter_context(_replaced(dmu, parallelize=observed_parallelize, initialize=observed_initialize))
        if verify:
            stack.enter_context(_loading_in_float32())
        if "transformers.trainer" in sys.modules:
            stack.enter_context(_observing_trainer(observed, _make_comparable if verify else None))
        yield


def _comparable_config(config: Any) -> dict[str, Any]:
    """The DeepSpeed config with SGD, in fp32 and without clipping."""
    from .integrations.deepspeed import load_config

    settings = load_config(config)
    settings.pop("scheduler", None)
    settings["optimizer"] = {"type": "SGD", "params": {"lr": LEARNING_RATE}}
    return settings | {"zero_allow_untested_optimizer": True, "gradient_clipping": 0.0, "bf16": {"enabled": False}}


def _observe_engine(engine: Any, observed: Observed) -> None:
    """Notes loss and gradient norm of each optimizer step of a DeepSpeed engine."""
    backward, step = engine.backward, engine.step
    losses: list[Tensor] = []

    def observed_backward(loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        losses.append(loss.detach().float())
        return backward(loss, *args, **kwargs)

    def observed_step(*args: Any, **kwargs: Any) -> Any:
        is_last = engine.is_gradient_accumulation_boundary()
        result = step(*args, **kwargs)
        if is_last:
            total = torch.stack(losses).sum()
            losses.clear()
            # Each rank of a group has the group's loss; the losses of the groups sum to that of the step.
            dist.all_reduce(total)
            observed.add("loss", total.item() / observed.handle.group.size)
            observed.add("grad_norm", engine.get_global_grad_norm())
        return result

    engine.backward, engine.step = observed_backward, observed_step


@contextmanager
def _observing_trainer(
    observed: Observed, change: Callable[[Any], None] | None, keep_start: bool = False
) -> Iterator[None]:
    """Notes the Trainer that is made, whose TrainingArguments `change` may change before they are checked."""
    from transformers import Trainer, TrainingArguments

    init, check = Trainer.__init__, TrainingArguments.__post_init__

    def observed_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        observed.trainer, observed.model = self, self.model
        if keep_start:
            observed.start = _copy_of(self.model)

    def changed_post_init(self: Any) -> None:
        if change is not None:
            change(self)
        check(self)

    with _replaced(Trainer, __init__=observed_init), _replaced(TrainingArguments, __post_init__=changed_post_init):
        yield


def _make_comparable(training: Any) -> None:
    """TrainingArguments with SGD, in fp32, without clipping and checkpoints, and with the samples in order."""
    training.optim, training.learning_rate, training.lr_scheduler_type = "sgd", LEARNING_RATE, "constant"
    training.bf16, training.max_grad_norm = False, 1e9  # 0 would switch the norm off too
    if isinstance(training.deepspeed, dict):
        training.deepspeed.pop("optimizer", None)  # it would take the place of SGD
    training.train_sampling_strategy, training.save_strategy = "sequential", "no"
    training.logging_steps, training.logging_strategy, training.disable_tqdm = 1, "steps", True


# ---------------------------------------------------------------------- the run in one process


def _run_as_one_process(main: Callable[[], object], file: str, processes: int, sp_size: int) -> None:
    """Trains the unpatched model, and saves what was observed.

    Args:
        file: where it is saved.
        processes, sp_size: of the run to compare with; they decide in which order it reads the samples of a Trainer.
    """
    observed = Observed()
    folder = str(Path(file).parent / "output")

    def parallelize(model: nn.Module, **_: Any) -> _PlainHandle:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        observed.model, observed.start = model, _copy_of(model)
        return _PlainHandle(model)

    def initialize(*, model: nn.Module, config: Any, **auto: Any) -> tuple[Any, ...]:
        from .integrations.deepspeed import load_config

        steps = load_config(config).get("gradient_accumulation_steps", 1)
        steps = auto["gradient_accumulation_steps"] if steps == "auto" else steps
        return _PlainEngine(model, steps, observed), None, None, None

    def change(training: Any) -> None:
        training.deepspeed = training.parallelism_config = None
        training.output_dir = folder
        training.gradient_accumulation_steps *= processes // sp_size
        _make_comparable(training)

    def order(self: Any, dataset: Any = None) -> list[int]:
        found = _order_of_one_process(self.args, processes, sp_size)
        if len(found) > len(self.train_dataset):
            raise UlyssesValueError(f"--verify needs {len(found)} samples, the data has {len(self.train_dataset)}.")
        return found

    def no_saving(self: Any, *args: Any, **kwargs: Any) -> None: ...

    with ExitStack() as stack:
        stand_ins = {"parallelize": parallelize, "initialize": initialize, "install": lambda **_: None}
        stack.enter_context(_replaced(dmu, **stand_ins))
        stack.enter_context(_loading_in_float32())
        if "transformers.trainer" in sys.modules:
            from transformers import Trainer

            stack.enter_context(_observing_trainer(observed, change, keep_start=True))
            stack.enter_context(_replaced(Trainer, _get_train_sampler=order, save_model=no_saving))
        main()
    observed.read_trainer()
    if observed.model is None:
        raise UlyssesRuntimeError(
            "the script trained nothing: it has to call ds_mla_ulysses.parallelize, or make a Trainer."
        )
    if dmu.handle_of(observed.model) is not None or getattr(observed.trainer, "is_deepspeed_enabled", False):
        raise UlyssesRuntimeError("the one process does not train the plain model.")
    trained = {name: p.detach() for name, p in observed.model.named_parameters()}
    torch.save({"curves": observed.curves, "start": observed.start, "trained": trained}, file)


class _PlainHandle:
    """In the place of a Handle: batches stay whole, and the loss is that of transformers."""

    data_rank, data_size = 0, 1
    group = SimpleNamespace(rank=0, size=1)

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def shard(self, batch: Mapping[str, Any]) -> Any:
        inputs = dict(batch)
        return SimpleNamespace(labels=inputs.pop("labels"), inputs=inputs)

    def num_items(self, shards: Sequence[Any]) -> int:
        return sum(int((shard.labels[:, 1:] != -100).sum()) for shard in shards)

    def loss(self, logits: Tensor, shard: Any, num_items: int | None = None) -> Tensor:
        size = self.model.config.get_text_config().vocab_size
        loss: Tensor = self.model.loss_function(
            logits=logits, labels=shard.labels, vocab_size=size, num_items_in_batch=num_items
        )
        return loss


class _PlainEngine:
    """In the place of a DeepSpeed engine: torch's SGD."""

    def __init__(self, model: nn.Module, accumulation: int, observed: Observed) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.module, self.observed = model.to(self.device), observed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LEARNING_RATE)
        self.accumulation, self.losses = accumulation, list[float]()

    def __call__(self, **inputs: Any) -> Any:
        return self.module(**inputs)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.losses.append(loss.item())

    def step(self) -> None:
        if len(self.losses) < self.accumulation:
            return
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        self.observed.add("loss", sum(self.losses))
        self.observed.add("grad_norm", norm.item())
        self.losses.clear()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Saves nothing: the checkpoint is that of the run over all processes."""

    def load_checkpoint(self, *_: Any, **__: Any) -> Any:
        raise UlyssesValueError("--verify starts anew: leave the checkpoint out.")


def _order_of_one_process(training: Any, processes: int, sp_size: int) -> list[int]:
    """The samples in the order in which one process reads them to train on the same ones in each step.

    Accelerate gives batch `i` to process `i % processes`, and the processes of a group train on theirs one after the other.
    """
    groups, size = processes // sp_size, training.per_device_train_batch_size
    indices: list[int] = []
    for micro_batch in range(training.max_steps * training.gradient_accumulation_steps // groups):
        turn, member = divmod(micro_batch, sp_size)
        for group in range(groups):
            first = (turn * processes + group * sp_size + member) * size
            indices.extend(range(first, first + size))
    return indices


# ---------------------------------------------------------------------- the comparison


def _compare(observed: Observed, meter: TrafficMeter, given: Sequence[str]) -> dict[str, Any]:
    """Runs the script in one process and compares on rank 0, which prints; returns the same on all ranks."""
    trainer = observed.trainer
    if observed.model is None:
        raise UlyssesRuntimeError(
            "the script trained nothing: it has to call ds_mla_ulysses.parallelize, or make a Trainer."
        )
    if trainer is not None and not trainer.is_deepspeed_enabled:
        raise SystemExit("--verify needs several processes: start the script with a launcher.")
    is_first, processes = dist.get_rank() == 0, dist.get_world_size()
    sp_size = observed.handle.group.size if trainer is None else trainer.get_sp_size()
    one: dict[str, Any] = {"curves": {}, "start": None, "trained": None}
    failed = [False]
    if is_first:
        try:
            one = _one_process(given, processes, sp_size)
        except subprocess.CalledProcessError:
            failed = [True]
    dist.broadcast_object_list(failed)  # the other ranks wait here
    if failed[0]:
        raise UlyssesRuntimeError("the script failed in one process: its error is above.")
    to_norm, to_change = _largest_differences(observed.model, one["start"], one["trained"])
    said: list[Any] = [None]
    if is_first:
        names = [name for name, values in observed.curves.items() if values and one["curves"].get(name)]
        if trainer is not None and sp_size == 1:
            names.remove("eval_loss")  # transformers weights it differently on several processes
        worst = {
            name.replace("_", " "): _report_curve(
                name.replace("_", " "), one["curves"][name], observed.curves[name], processes
            )
            for name in names
        }
        _report_parameters(to_norm, to_change)
        worst |= {"parameter to norm": to_norm[0], "parameter to change": to_change[0]}
        sent = {} if observed.handle is None else _report_traffic(observed, meter, processes)
        said = [{**sent, "of_one": one["curves"], "largest_difference": worst, "equal": _report_verdict(worst)}]
    dist.broadcast_object_list(said)
    return said[0]


def _one_process(given: Sequence[str], processes: int, sp_size: int) -> dict[str, Any]:
    """What the script does in a new process without a launcher, in which stand-ins replace this package."""
    rest = [word for word in given if not word.startswith("--local_rank")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    if torch.cuda.is_available():
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "one_process.pt")
        environment[_ONE_PROCESS] = json.dumps({"file": file, "processes": processes, "sp_size": sp_size})
        command = [sys.executable, sys.argv[0], "--verify", *rest]
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = torch.load(file, map_location="cpu")
    return found


def _copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _relative(distance: float, to: float) -> float:
    if not math.isfinite(distance) or (distance and not to):
        return math.inf
    return distance / to if distance else 0.0


def _largest_differences(
    model: nn.Module, start: dict[str, Tensor] | None, trained: dict[str, Tensor] | None
) -> tuple[Worst, Worst]:
    """The largest relative differences of a parameter: to its norm, and to how much it changed.

    Args:
        model: what the processes trained; with ZeRO-3 all of them have to make this call.
        start, trained: by name, the parameters before and after the training in one process; None on other ranks.
    """
    from deepspeed.runtime.zero import GatheredParameters

    to_norm, to_change = (0.0, ""), (0.0, "")
    for name, parameter in model.named_parameters():
        with GatheredParameters([parameter]), torch.no_grad():  # with ZeRO-3 every rank holds a shard
            if trained is None or start is None:
                continue
            wanted = trained[name].to(parameter.device)
            distance, norm = (parameter - wanted).norm().item(), wanted.norm().item()
            changed = (wanted - start[name].to(parameter.device)).norm().item()
            to_norm = max(to_norm, (_relative(distance, norm), name))
            # Stored values are rounded, even if they hardly changed.
            rounding = min(distance, torch.finfo(parameter.dtype).eps * norm)
            to_change = max(to_change, (_relative(distance - rounding, changed), name))
    return to_norm, to_change


def _report_curve(name: str, one: list[float], ours: list[float], processes: int) -> float:
    """Prints two curves side by side, and returns their largest relative difference."""
    print(f"\n{name:>10}{'one process':>16}{f'{processes} processes':>16}{'difference':>14}")
    for step, (a, b) in enumerate(zip(one, ours, strict=True)):
        print(f"{step:>10}{a:>16.7f}{b:>16.7f}{abs(a - b):>14.1e}")
    worst = max(_relative(abs(a - b), abs(a)) for a, b in zip(one, ours, strict=True))
    print(f"largest relative difference of the {name}: {worst:.1e}")
    return worst


def _report_parameters(to_norm: Worst, to_change: Worst) -> None:
    print(f"\nlargest difference of a parameter, relative to its norm: {to_norm[0]:.1e} ({to_norm[1]})")
    beyond = f"{to_change[0]:.1e} ({to_change[1]})" if to_change[0] else "none"
    print(f"  relative to how much it changed, beyond the rounding of stored values: {beyond}")


def _report_traffic(observed: Observed, meter: TrafficMeter, processes: int) -> dict[str, float]:
    """Prints and returns the bytes that attention sent per token and layer, measured, and by three all-to-alls."""
    config, ranks = observed.handle.model.config.get_text_config(), observed.handle.group.size
    counted = sum(count for (_, direction), count in meter.bytes.items() if direction in ("forward", "backward"))
    tokens = observed.tokens * observed.handle.data_size
    sent = counted * processes / tokens / config.num_hidden_layers
    three = 2 * 4 * _attention_width(config) * (ranks - 1) / ranks  # forward and backward, 4 bytes an element
    print(f"\nsent per token and layer, forward and backward: {sent:,.0f} bytes (measured)")
    if three > sent:
        print(f"Q, K and V of all heads in three all-to-alls:   {three:,.0f} bytes ({1 - sent / three:.1%} saved)")
    return {"sent": sent, "sent_by_three_all_to_alls": three}


def _attention_width(config: Any) -> int:
    """Elements per token and layer of Q, K and V with all their heads, and of the output."""
    H = config.num_attention_heads
    if hasattr(config, "kv_lora_rank"):
        return int(2 * H * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim))
    width = getattr(config, "head_dim", None) or config.hidden_size // H
    return int(2 * (H + config.num_key_value_heads) * width)


def _report_verdict(worst: dict[str, float]) -> bool:
    """Prints and returns whether none of the differences is larger than the tolerance."""
    equal = all(value <= TOLERANCE for value in worst.values())
    says = f"equal: nothing differs by more than {TOLERANCE}" if equal else f"DIFFERENT by more than {TOLERANCE}"
    print("\n" + says)
    return equal
