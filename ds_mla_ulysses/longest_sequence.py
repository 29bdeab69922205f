"""The longest sequence that fits, for training scripts: its length, DeepSpeed's settings, and what a step holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from .errors import UlyssesValueError
from .hf.configs import find_model
from .planner.memory import GB, MLP_TILE, Machines, Setting, step_memory
from .stored_bytes import PeakBytes


class LongestSequence:
    """Plans a step with tiles, head chunks and, on GPUs, layer inputs and the optimizer on the host.

    Args:
        model: a preset of the planner, a `config.json`, or a folder with one.
        ranks: GPUs of the job, all of which share a sequence.
        memory: GB of a GPU, or of a process on a CPU; by default 80, and 0.02.
        host_memory: GB of all hosts together; no limit by default.
        stage: of ZeRO.
        head_chunks: see `parallelize`.
        tokens: a length instead of the longest.

    Attributes:
        tokens: of the whole sequence.
        settings: arguments of `install` or `parallelize`.
        offloads: whether layer inputs and the optimizer are to be on the host.
        peak: measures a block: `with longest.peak: ...`.

    Raises:
        ValueError: not even one token fits, or the model cannot be planned.
    """

    def __init__(
        self,
        model: str,
        ranks: int,
        *,
        memory: float | None = None,
        host_memory: float | None = None,
        stage: int = 3,
        head_chunks: int = 2,
        tokens: int | None = None,
    ) -> None:
        self.offloads = torch.cuda.is_available()
        given = memory if memory is not None else 80.0 if self.offloads else 0.02
        hosts = None if host_memory is None else host_memory * GB
        machines = Machines(ranks, ranks, stage, given * GB, 5 * GB if self.offloads else 0.0, hosts)
        everything = Setting("everything", True, self.offloads, self.offloads, True, head_chunks)
        self._step = step_memory(find_model(model), "packed", machines, everything)
        self.tokens = tokens or ranks * self._step.longest(machines)[0]
        if not self.tokens:
            raise UlyssesValueError(
                f"{given:g} GB hold no token: weights and buckets alone take {self._step.fixed / GB:.3g} GB."
            )
        self.settings = {"mlp_tile": MLP_TILE, "head_chunks": head_chunks}
        self.peak, self._ranks, self._stage = PeakBytes(), ranks, stage

    def config(self, path: str | Path) -> dict[str, Any]:
        """Returns a DeepSpeed config for the stage. On a CPU the optimizer is torch's: DeepSpeed's needs a compiler.

        Args:
            path: of a JSON file, such as `configs/zero3_long.json`.
        """
        config: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        config["zero_optimization"]["stage"] = self._stage
        if not self.offloads:
            del config["zero_optimization"]["offload_optimizer"]
            config["optimizer"]["params"]["torch_adam"] = True
        return config

    def report(self) -> str:
        """Returns what a step holds, planned and measured, beside what is there before it."""
        planned, fixed = self._step.peak(self.tokens / self._ranks), self._step.fixed
        return (
            f"{self.tokens} tokens on {self._ranks} processes. A step holds {self.peak.bytes / GB:.3g} GB, planned in bf16: "
            f"{(planned - fixed) / GB:.3g} GB, beside weights and optimizer, planned: {fixed / GB:.3g} GB"
        )
