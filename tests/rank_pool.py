"""Rank processes that live for the whole test run and are sent functions.

Starting a process costs 4-17 s (importing torch and deepspeed is slow); sending it a function costs
milliseconds. There is one pool per world size, started on first use. Workers hold a gloo process
group over a file store, so no port is fixed.

    results = run_ranks(2, fn, *args)                            # fn(*args) on every rank, in rank order
    raises_on_ranks(2, ValueError, "shapes", fn, *args)          # every rank raises, none hangs

`fn` is a module-level function of a test file, sent by reference; arguments and results by pickle.
A pool that raised, hung or died unexpectedly is killed and built anew on next use: its ranks may be
at different collectives. Before each function torch is seeded, and DeepSpeed's mpu is forgotten.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PATHS = [
    str(TESTS.parent),
    str(TESTS),
    *sorted(str(p) for p in TESTS.iterdir() if p.is_dir() and p.name[0] not in "._"),
]
_frozen = 0
#: Once a rank has failed, its peers may wait for it in a collective forever: how long they are given.
GRACE_SECONDS = 10
_pools: dict[int, _Pool] = {}


class RankError(AssertionError):
    """Some rank raised, died or did not answer; the message has every rank's part."""


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240, **kwargs: Any) -> list[Any]:
    """What fn(*args, **kwargs) returns on each of `size` ranks.

    Raises:
        RankError: with each rank's traceback, result or silence.
    """
    pool = _pool(size)
    answers = pool.call(fn, args, kwargs, timeout)
    if not all(answer and answer[0] == "ok" for answer in answers):
        pool.kill()
        raise RankError(_report(size, fn, answers, pool.waited))
    return [answer[1] for answer in answers]


def raises_on_ranks(
    size: int,
    error: type[BaseException],
    match: str,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    **kwargs: Any,
) -> None:
    """Asserts that every rank raises `error` with a message in which the pattern is found.

    Raises:
        RankError: some rank returned, hung, or raised something else.
    """
    pool = _pool(size)
    answers = pool.call(fn, args, kwargs, timeout)
    wanted = _name(error)
    for answer in answers:
        if not (answer and answer[0] == "raised" and wanted in answer[1] and re.search(match, answer[3])):
            pool.kill()
            expected = f"every rank has to raise {wanted} matching {match!r}\n"
            raise RankError(expected + _report(size, fn, answers, pool.waited))


def freeze_modules() -> None:
    """Leaves out of garbage collections what was imported since the last call, and makes them rare.

    Trainers and ZeRO-3 collect explicitly in every run, and the modules are half a million objects: 0.3 s each time.
    """
    global _frozen
    gc.set_threshold(50_000, 20, 20)  # those of importing and compiling alone are a fifth of their time
    if len(sys.modules) > _frozen:
        gc.collect()  # garbage would stay forever
        gc.freeze()
        _frozen = len(sys.modules)


def _pool(size: int) -> _Pool:
    at_most = int(os.environ.get("RANKS_AT_MOST", size))  # of `make test-fast`
    if size > at_most:
        raise RankError(f"the test runs on {size} ranks, more than the {at_most} allowed: mark it four_ranks.")
    if size not in _pools or not _pools[size].alive:
        _pools[size] = _Pool(size)
    return _pools[size]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _report(size: int, fn: Callable[..., Any], answers: list[Any], waited: float) -> str:
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    lines = [f"{fn.__qualname__} on {size} ranks"]
    if silent:
        lines[0] += f"; no answer after {waited:.0f} s from ranks {silent}"
    for rank, answer in enumerate(answers):
        if answer is None:
            text = "no answer"
        elif answer[0] == "ok":
            value = repr(answer[1])
            text = "returned " + (value if len(value) <= 200 else value[:200] + "...")
        else:
            text = answer[2].rstrip()
        lines.append(f"--- rank {rank} of {size}: {text}")
    return "\n".join(lines)


class _Pool:
    """Workers of one world size.

    `call` answers per rank: ("ok", value), ("raised", names of the exception's classes, traceback,
    message), or None where nothing came back in time.
    """

    def __init__(self, size: int) -> None:
        self.alive = True
        self.waited = 0.0
        self.folder = tempfile.mkdtemp(prefix="rank-pool-")
        self.workers, self.pipes = [], []
        atexit.register(self.kill)
        context = mp.get_context("spawn")  # a fork would inherit torch's threads
        for rank in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(rank, size, self.folder, theirs))
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        # Pickled before anything is sent: arguments that cannot be must not reach only some of the ranks.
        work = ForkingPickler.dumps((fn.__module__, fn.__qualname__, args, kwargs))
        start = time.monotonic()
        deadline = start + timeout
        answers: list[Any] = [None] * len(self.pipes)
        pending = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        for pipe, rank in list(pending.items()):
            try:
                pipe.send_bytes(work)
            except OSError:
                answers[rank] = self._died(pending.pop(pipe))
        while pending and time.monotonic() < deadline:
            for pipe in connection.wait(list(pending), max(0.0, deadline - time.monotonic())):
                rank = pending.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    answers[rank] = self._died(rank)
                if answers[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        self.waited = time.monotonic() - start
        return answers

    def _died(self, rank: int) -> tuple:
        self.workers[rank].join(5)
        text = f"the process ended with exit code {self.workers[rank].exitcode}"
        stderr = Path(_stderr_of(self.folder, rank))
        last_words = stderr.read_text(errors="replace")[-20_000:] if stderr.exists() else ""
        return ("raised", [], f"{text}\n{last_words}", text)

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        atexit.unregister(self.kill)
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def _stderr_of(folder: str, rank: int) -> str:
    return f"{folder}/stderr-{rank}"


def _work(rank: int, size: int, folder: str, pipe: connection.Connection) -> None:
    # In a file, so that a report can end with what a process said before it died.
    stderr = os.open(_stderr_of(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stderr, 2)
    faulthandler.enable()
    # All of it before torch and deepspeed are imported, which read it then.
    os.environ.update(
        DS_ACCELERATOR="cpu",
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    sys.path[:0] = [path for path in PATHS if path not in sys.path]
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated.*")
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # those of C++, which faulthandler cannot see
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    while True:
        try:
            work = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # destructors of process groups would wait for peers that are gone
        freeze_modules()
        torch.manual_seed(0)
        if "deepspeed" in sys.modules:
            sys.modules["deepspeed"].utils.groups.mpu = None
        try:
            module, name, args, kwargs = ForkingPickler.loads(work)
            fn: Any = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            answer = ("ok", fn(*args, **kwargs))
        except BaseException as error:  # whatever it is, pytest shall see it
            answer = ("raised", [_name(cls) for cls in type(error).__mro__], traceback.format_exc(), str(error))
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)
        except Exception as error:
            text = f"the result cannot be sent: {traceback.format_exc()}"
            pipe.send(("raised", [_name(type(error))], text, text))
