"""Rank processes that live for the whole test run and are sent functions.

Starting a process costs 4-17 s (importing torch and deepspeed is slow); sending it a function costs
milliseconds. There is one pool per world size, started on first use. Workers hold a gloo process
group over a file store, so no port is fixed.

    results = run_ranks(2, fn, *args)                            # fn(*args) on every rank, in rank order
    raises_on_ranks(2, ValueError, "shapes", fn, *args)          # every rank raises, none hangs

`fn` is a module-level function of a test file; results are sent back by pickle (tensors as arrays).
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing as mp
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_pools: dict[int, _Pool] = {}


class RankError(AssertionError):
    """Some rank raised or did not answer."""


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout: float = 240, **kwargs: Any) -> list[Any]:
    """What fn(*args, **kwargs) returns on each of `size` ranks."""
    pool = _pool(size)
    answers = pool.call(fn, args, kwargs, timeout)
    failed = {rank: answer for rank, answer in enumerate(answers) if not (answer and answer[0] == "ok")}
    if failed:
        pool.kill()
        raise RankError(
            "\n".join(
                f"--- rank {rank} of {size}: " + (answer[2] if answer else f"no answer after {timeout} s")
                for rank, answer in failed.items()
            )
        )
    return [answer[1] for answer in answers]


def raises_on_ranks(
    size: int, error: type[BaseException], match: str, fn: Callable[..., Any], *args: Any, timeout: float = 120
) -> None:
    """Asserts that every rank raises `error` with a message that contains the pattern."""
    pool = _pool(size)
    answers = pool.call(fn, args, {}, timeout)
    for rank, answer in enumerate(answers):
        names = answer[1] if answer and answer[0] == "raised" else []
        if error.__name__ not in names or not re.search(match, answer[2]):
            pool.kill()
            raise RankError(f"rank {rank} of {size} did not raise {error.__name__}({match!r}): {answer}")


def _pool(size: int) -> _Pool:
    if size not in _pools or not _pools[size].alive:
        _pools[size] = _Pool(size)
    return _pools[size]


class _Pool:
    def __init__(self, size: int) -> None:
        self.alive = True
        context = mp.get_context("spawn")
        store = tempfile.mktemp(prefix="rank-pool-")
        self.workers, self.pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(rank, size, store, theirs))
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.pipes.append(ours)
        atexit.register(self.kill)

    def call(self, fn: Callable[..., Any], args: tuple, kwargs: dict, timeout: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((fn.__module__, fn.__qualname__, args, kwargs))
        deadline, answers = time.monotonic() + timeout, [None] * len(self.pipes)
        failed_at = None
        for rank in range(len(self.pipes)):
            while answers[rank] is None:
                # Once a rank has failed its peers may wait for it in a collective: give them a moment only.
                failed_at = failed_at or (time.monotonic() if self._take(answers) else None)
                limit = deadline if failed_at is None else min(deadline, failed_at + 10)
                if time.monotonic() > limit or not any(w.is_alive() for w in self.workers):
                    self._take(answers)
                    return answers
        return answers

    def _take(self, answers: list[Any]) -> bool:
        """Collects what has arrived; whether something has failed."""
        for rank, pipe in enumerate(self.pipes):
            try:
                if answers[rank] is None and pipe.poll(0.005):
                    answers[rank] = pipe.recv()
            except (EOFError, OSError):
                answers[rank] = ("raised", [], "the process ended")
        return any(answer and answer[0] != "ok" for answer in answers)

    def kill(self) -> None:
        self.alive = False
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.join()


def _work(rank: int, size: int, store: str, pipe: Any) -> None:
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
    )
    sys.path[:0] = [str(p) for p in (TESTS.parent, TESTS, *(TESTS / n for n in ("unit", "ranks", "hf", "deepspeed")))]
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*deprecated.*")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            module, name, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        torch.manual_seed(0)
        try:
            fn = importlib.import_module(module)
            for part in name.split("."):
                fn = getattr(fn, part)
            answer = ("ok", fn(*args, **kwargs))
        except BaseException as error:  # whatever it is, pytest shall see it
            names = [cls.__name__ for cls in type(error).__mro__]
            answer = ("raised", names, f"{error}\n{traceback.format_exc()}")
        try:
            pipe.send(answer)
        except Exception:
            pipe.send(("raised", [], f"the result cannot be sent: {traceback.format_exc()}"))
