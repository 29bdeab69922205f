"""`check`, and the worker process as its callers see it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ..attention.chunks import check_count
from ..errors import UlyssesValueError
from ..hf.configs import read_config, refuse_endless
from ..planner.strategies import STRATEGIES
from .report import Report
from .request import CASES, TOLERANCES, Request

_PARENT = str(Path(__file__).parents[2])


def check(
    config: Any,
    *,
    sp_size: int = 2,
    strategy: str | Sequence[str] | None = None,
    dtype: str = "float64",
    model_code: str | None = None,
    head_chunks: int = 1,
) -> Report:
    """Compares a small model of an architecture on several local processes with one process.

    The small model has the layer types of the config and heads in proportion; its widths are cut and every parameter is
    moved off its initial value. Compared are the loss, the logits and the gradient of every parameter, for batches of
    whole rows, of packed documents, and padded on the left and on the right. One process runs each document alone. This
    needs no GPU, and takes seconds for each strategy. The calling process is left as it is.

    Args:
        config: a transformers config, a dict, the path of a config.json or of a folder with one, or a model type, whose
            class's default config is then meant. Defaults may lack layers that checkpoints have.
        sp_size: the number of processes.
        strategy: a strategy of `parallelize`, or several; all that the model allows by default.
        dtype: "float64", in which what models compute in fp32 is widened too; or "float32".
        model_code: "FILE.py:Class", the model's class if it is not in transformers. The file is run.
        head_chunks: an argument of `parallelize`. The small model has few heads: with 2 processes, 2 chunks usually fit.

    Returns:
        the Report. `print(report)` shows it; `report.verdict` is "equal", "different", "fails" (after `parallelize`
        accepted the model), "refused" (by `parallelize`), or "not checked".

    Raises:
        ValueError: there is no such config, strategy or dtype.
    """
    with Worker() as worker:
        return worker.check(make_request(config, sp_size, strategy, dtype, model_code, head_chunks=head_chunks))


def make_request(
    config: Any,
    sp_size: int = 2,
    strategy: str | Sequence[str] | None = None,
    dtype: str = "float64",
    model_code: str | None = None,
    cases: Sequence[str] = CASES,
    variant: Mapping[str, Any] | None = None,
    head_chunks: int = 1,
) -> Request:
    """Returns what is asked of a worker.

    Args:
        config, sp_size, strategy, dtype, model_code, head_chunks: see `check`.
        cases: the batches, of `CASES`.
        variant: settings of the small config, by dotted name.

    Raises:
        ValueError: one of them is wrong.
    """
    names = tuple(STRATEGIES) if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy)
    for name in names:
        if name not in STRATEGIES:
            raise UlyssesValueError(f"strategy must be one of {list(STRATEGIES)}, got {name!r}.")
    if dtype not in TOLERANCES:
        raise UlyssesValueError(f"dtype must be one of {list(TOLERANCES)}, got {dtype!r}.")
    if type(sp_size) is not int or not 2 <= sp_size <= 8:
        raise UlyssesValueError(f"sp_size must be a number of processes from 2 to 8, got {sp_size!r}.")
    check_count(head_chunks)
    if model_code is not None:
        file, _, _ = model_code.rpartition(":")
        if not Path(file).is_file():
            raise UlyssesValueError(f"model_code must be FILE.py:Class, got {model_code!r}.")
        model_code = str(Path(file).resolve()) + model_code[len(file) :]
    model, values, is_type = _config_of(config)
    return Request(
        model,
        values,
        is_type,
        variant=dict(variant or {}),
        model_code=model_code,
        ranks=sp_size,
        strategies=names,
        cases=tuple(cases),
        dtype=dtype,
        head_chunks=head_chunks,
    )


class Worker:
    """A worker process, started on the first check. It answers checks one after the other and ends with the block."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._said: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self, request: Request) -> Report:
        """Returns the report. Whatever happens in the processes is in it."""
        start = time.monotonic()
        if self._process is None:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request.to_json() + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        seconds = round(time.monotonic() - start, 1)
        if answer:
            return replace(Report.from_dict(json.loads(answer)), seconds=seconds)
        self._said.seek(0)
        last = " ".join(self._said.read()[-400:].split())
        self.stop()
        problem = f"the process that runs the comparison ended: {last}"
        return Report(request.model, ranks=request.ranks, dtype=request.dtype, problem=problem, seconds=seconds)

    def stop(self) -> None:
        """Ends the process."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and process.stdout is not None
        for pipe in (process.stdin, process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._said.close()

    def _start(self) -> None:
        # All of it before torch and DeepSpeed are imported, which read it then.
        environment = os.environ | {
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": os.pathsep.join([_PARENT, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)  # a launcher's, if this process has one
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # `stop` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ds_mla_ulysses.checking.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment,
        )


def _config_of(config: Any) -> tuple[str, dict[str, Any], bool]:
    """The name of a model, its config as a dict, and whether only its type is known."""
    if isinstance(config, Mapping):
        return str(config.get("model_type", "a config")), _checked(dict(config), "the config"), False
    if hasattr(config, "to_json_string"):
        return str(config.model_type), _checked(json.loads(config.to_json_string(use_diff=False)), "the config"), False
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if isinstance(config, str) and config.replace("-", "_").replace(".", "_").isidentifier():
            return config, {"model_type": config}, True
        raise UlyssesValueError(f"{str(config)!r} is neither a config.json, nor a folder with one, nor a model type.")
    return str(config), _checked(read_config(path), str(path)), False


def _checked(values: Any, name: str) -> dict[str, Any]:
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise UlyssesValueError(f"{name} has no model_type.")
    refuse_endless(values, name)
    return values
