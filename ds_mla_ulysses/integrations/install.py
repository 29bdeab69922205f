"""install / uninstall: HF Trainer, Accelerate and TRL with `ParallelismConfig(sp_backend="deepspeed")`.

These symbols are replaced for the whole process, until `uninstall`:

| symbol                                                           | what the replacement does                           |
|------------------------------------------------------------------|-----------------------------------------------------|
| deepspeed: `UlyssesSPAttentionHF.register_with_transformers`     | parallelizes the given model, and no other          |
| deepspeed: `UlyssesSPDataLoaderAdapter`                          | is `ShardedDataLoader`                              |
| deepspeed: `initialize`                                          | builds engines of such models as our `initialize`   |
| deepspeed: `utils.groups._get_sequence_parallel_group`           | returns the group of the model parallelized last    |
| deepspeed: `utils.groups._get_sequence_parallel_world_size`      | returns the size of that group                      |
| deepspeed: `utils.groups._get_sequence_parallel_rank`            | returns the rank of this process in that group      |
| accelerate: `Accelerator.deepspeed_ulysses_dl_adapter`           | is `ShardedDataLoader` with the model's group       |
| accelerate: `skip_first_batches`                                 | skips in a `ShardedDataLoader`                      |
| transformers: `trainer.skip_first_batches`                       | skips in a `ShardedDataLoader`                      |
| transformers: `Trainer.__init__`                                 | permits label smoothing in TRL's SFTTrainer         |
| transformers: `Trainer.compute_loss`                             | computes the loss of the group's whole sequences    |
| transformers: `Trainer._get_num_items_in_batch`                  | counts supervised tokens of the step over all ranks |
| transformers: `Trainer._track_num_input_tokens`                  | leaves out the padding that sharding adds           |
| transformers: `Trainer.prediction_step` (with `sp_in_eval`)      | evaluates with shared sequences                     |

Each replacement calls the original for models and batches that are not sequence-parallel. A batch is sequence-parallel
if it has a layout (`ulysses_layout`); neither `training` nor a setting decides it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UlyssesRuntimeError
from ..hf.checks import Checks
from ..hf.recompute import check_recompute
from ..hf.strategies import check_strategy
from ..hf.tiled_layers import check_mlp_tile
from ..layout.tiled_loss import check_loss_tile
from ..planner.auto import Auto
from ..process_state import PROCESS
from ..requirements import check, highest_tested, installed, lowest
from .accelerate import RegisteredModels, adapt_dataloader, wrap_dl_adapter, wrap_initialize, wrap_skip
from .deepspeed import init_deepspeed_on_cpu
from .trainer import wrap_compute_loss, wrap_init, wrap_num_items, wrap_prediction_step, wrap_track_tokens

#: The packages in which `install` replaces symbols.
_REPLACES_IN = ("deepspeed", "accelerate", "transformers")
_ULYSSES = "deepspeed.runtime.sequence_parallel.ulysses_sp"
_GROUPS = "deepspeed.utils.groups"


def install(
    *,
    sp_in_eval: bool = False,
    strategy: str | Auto = "packed",
    split: str = "contiguous",
    head_chunks: int = 1,
    loss_tile: int | str | None = "auto",
    mlp_tile: int | None = None,
    recompute: str | None = None,
    checks: str = "always",
) -> None:
    """Makes Trainer and Accelerate train over sequences that ranks share, with the numbers of one process.

    Call it before the TrainingArguments, the Trainer and the Accelerator are built. A second call with the same settings
    does nothing. On a machine without an accelerator, it initialises DeepSpeed's communication (gloo) if a launcher has
    started the process, because Accelerate does this on other machines only. When the interpreter exits, `uninstall` is
    called.

    Args:
        sp_in_eval: whether the ranks share sequences in evaluation and prediction of a Trainer too. By default each rank
            evaluates different samples with the plain model, as without sequence parallelism.
        strategy, split, head_chunks, loss_tile, mlp_tile, recompute, checks: arguments of `parallelize`, for every model.

    Raises:
        TypeError: head_chunks is not an int, loss_tile is neither an int nor "auto" nor None, or mlp_tile is neither an
            int nor None.
        ValueError: the strategy, the policy of checks, head_chunks, loss_tile, mlp_tile or recompute is not valid, or two of
            them do not go together.
        RuntimeError: the installed versions lack a symbol of the table, or other settings are installed already.

    Warns:
        UserWarning: the version of a package is outside the tested range; one warning for each package.
    """
    of_models = {
        "strategy": strategy,
        "split": split,
        "head_chunks": head_chunks,
        "loss_tile": loss_tile,
        "mlp_tile": mlp_tile,
        "recompute": recompute,
        "checks": checks,
    }
    settings = {"sp_in_eval": sp_in_eval, **of_models}
    if PROCESS.installation is not None:
        if PROCESS.installation.settings != settings:
            found = ", ".join(f"{name}={value!r}" for name, value in PROCESS.installation.settings.items())
            raise UlyssesRuntimeError(f"installed already, with {found}: call ds_mla_ulysses.uninstall() first.")
        return
    check_strategy(strategy, split, head_chunks)
    check_loss_tile(loss_tile)
    check_mlp_tile(mlp_tile)
    check_recompute(recompute, head_chunks)
    Checks(checks)
    for package in _REPLACES_IN:
        if check(package) != "ok":
            warnings.warn(
                f"{package} {installed(package)} is outside the tested range ({lowest(package)} to "
                f"{highest_tested(package)}).",
                stacklevel=2,
            )
    models = RegisteredModels(of_models)
    PROCESS.installation = Installation(settings, models, symbols_of(models, sp_in_eval=sp_in_eval))
    # The threads of a process group that outlive the interpreter can abort the process after all work is done.
    atexit.register(uninstall)
    init_deepspeed_on_cpu()


def uninstall() -> None:
    """Puts every replaced symbol back, and restores the models that were parallelized through them."""
    if PROCESS.installation is not None:
        PROCESS.installation.undo()
        PROCESS.installation = None
        atexit.unregister(uninstall)


@dataclass(frozen=True)
class Symbol:
    """An attribute that `install` replaces.

    Attributes:
        module: the name of a module.
        path: the name of an attribute of the module, or of a class in the module and its attribute ("Trainer.compute_loss").
        make: given the original, it returns the replacement.
    """

    module: str
    path: str
    make: Callable[[Any], Any]


def symbols_of(models: RegisteredModels, *, sp_in_eval: bool) -> list[Symbol]:
    """Returns the table at the top of this file."""
    symbols = [
        Symbol(
            _ULYSSES, "UlyssesSPAttentionHF.register_with_transformers", lambda _: classmethod(models.register_model)
        ),
        Symbol(_ULYSSES, "UlyssesSPDataLoaderAdapter", lambda _: adapt_dataloader),
        Symbol("deepspeed", "initialize", wrap_initialize),
        Symbol(_GROUPS, "_get_sequence_parallel_group", models.answering(lambda group: group.process_group)),
        Symbol(_GROUPS, "_get_sequence_parallel_world_size", models.answering(lambda group: group.size)),
        Symbol(_GROUPS, "_get_sequence_parallel_rank", models.answering(lambda group: group.rank)),
        Symbol("accelerate.accelerator", "Accelerator.deepspeed_ulysses_dl_adapter", wrap_dl_adapter),
        Symbol("accelerate.accelerator", "skip_first_batches", wrap_skip),
        Symbol("transformers.trainer", "skip_first_batches", wrap_skip),
        Symbol("transformers.trainer", "Trainer.__init__", wrap_init),
        Symbol("transformers.trainer", "Trainer.compute_loss", wrap_compute_loss),
        Symbol("transformers.trainer", "Trainer._get_num_items_in_batch", wrap_num_items),
        Symbol("transformers.trainer", "Trainer._track_num_input_tokens", wrap_track_tokens),
    ]
    if sp_in_eval:
        symbols.append(Symbol("transformers.trainer", "Trainer.prediction_step", wrap_prediction_step))
    return symbols


class Installation:
    """The replaced symbols of this process and the models that were parallelized through them.

    All symbols are looked up before the first one is replaced.

    Attributes:
        settings: the arguments of `install`.

    Raises:
        RuntimeError: the installed versions lack a symbol. Nothing has been replaced then.
    """

    def __init__(self, settings: dict[str, Any], models: RegisteredModels, symbols: Sequence[Symbol]) -> None:
        self.settings, self._models = settings, models
        self._found = [_Found.find(symbol.module, symbol.path) for symbol in symbols]
        for found, symbol in zip(self._found, symbols, strict=True):
            found.replace(symbol.make(found.original))

    def undo(self) -> None:
        """Puts every symbol back, and restores the models."""
        for found in self._found:
            found.put_back()
        self._models.restore()


@dataclass(frozen=True)
class _Found:
    """An attribute of a module, or of a class in it, with the value that it had before."""

    owner: Any
    name: str
    original: Any

    @classmethod
    def find(cls, module: str, path: str) -> _Found:
        owner: Any = importlib.import_module(module)
        *classes, name = path.split(".")
        for part in classes:
            owner = getattr(owner, part, object)
        if name not in vars(owner):
            package = module.split(".")[0]
            raise UlyssesRuntimeError(
                f"{package} {importlib.metadata.version(package)} has no {module}.{path}, which install() replaces: "
                f"use {package}=={highest_tested(package)}."
            )
        # It is read from the class's dict, because each lookup of a classmethod makes a new object.
        return cls(owner, name, vars(owner)[name])

    def replace(self, new: Any) -> None:
        setattr(self.owner, self.name, new)

    def put_back(self) -> None:
        setattr(self.owner, self.name, self.original)
