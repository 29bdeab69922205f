"""Groups of rank processes that are forked from this one, watched, and replaced after a failure."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, connection
from typing import Any, NoReturn

from ..version import __version__
from .compare import run_rank
from .report import Report, Row
from .request import Request

#: How long a rank may be silent, and how long the others may go on after one has failed.
SILENCE_SECONDS = 90.0
_GRACE_SECONDS = 3.0


class _Group:
    """The rank processes of one run."""

    def __init__(self, request: Request, todo: Sequence[tuple[str, str]]) -> None:
        self.folder = tempfile.mkdtemp(prefix="ulysses-check-")
        self.processes: list[int] = []
        self.pipes: list[connection.Connection] = []
        for rank in range(request.ranks):
            ours, theirs = Pipe(duplex=False)
            process = os.fork()
            if process == 0:
                _be_a_rank(request, todo, rank, f"{self.folder}/store", theirs)
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def events(self, parent: int) -> tuple[list[list[dict[str, Any]]], float]:
        """The events of each rank, in order, until all ranks have ended, failed or fallen silent.

        Args:
            parent: the process for which this one works: if it is gone, there is nobody to report to.

        Returns:
            the events, and how long the ranks were silent at the end.
        """
        found: list[list[dict[str, Any]]] = [[] for _ in self.pipes]
        pending = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        last = time.monotonic()
        deadline = last + SILENCE_SECONDS
        while pending and time.monotonic() < deadline:
            if os.getppid() != parent:
                break
            for pipe in connection.wait(list(pending), 0.5):
                assert isinstance(pipe, connection.Connection)
                rank = pending[pipe]
                last = time.monotonic()
                try:
                    event = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    event = {"kind": "died"}
                found[rank].append(event)
                if event["kind"] in ("done", "failed", "problem", "died"):
                    del pending[pipe]
                if event["kind"] in ("failed", "problem", "died"):
                    deadline = min(deadline, last + _GRACE_SECONDS)
                elif all(events[-1:] and events[-1]["kind"] != "failed" for events in found):
                    deadline = last + SILENCE_SECONDS
        return found, time.monotonic() - last

    def end(self) -> list[int]:
        """Ends all processes; returns their statuses, as `os.waitpid` gives them."""
        statuses = []
        for process in self.processes:
            ended, status = os.waitpid(process, os.WNOHANG)
            if not ended:
                os.kill(process, signal.SIGKILL)
                _, status = os.waitpid(process, 0)
            statuses.append(status)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return statuses


def run_check(request: Request, parent: int) -> Report:
    """Compares everything that was requested, each strategy until it fails.

    A failure may leave the ranks at different collectives, so what is left runs in new processes.

    Args:
        parent: the process for which this one works.
    """
    start = time.monotonic()
    todo = [(strategy, case) for strategy in request.strategies for case in request.cases]
    rows: list[Row] = []
    model: Mapping[str, Any] = {"class": "", "config": {}}
    problem = ""
    while todo and not problem:
        group = _Group(request, todo)
        try:
            events, silence = group.events(parent)
        finally:
            statuses = group.end()
        for event in (event for of_rank in events for event in of_rank):
            if event["kind"] == "model":
                model = event
        rows += [Row(**_without_kind(event)) for event in events[0] if event["kind"] == "row"]
        problem = next((e["text"] for of_rank in events for e in of_rank if e["kind"] == "problem"), "")
        if problem or all(of_rank and of_rank[-1]["kind"] == "done" for of_rank in events):
            break
        failed = _failure(events, statuses, silence)
        rows.append(failed)
        order = [strategy for strategy, _ in todo]
        behind = order.index(failed.strategy) + order.count(failed.strategy) if failed.strategy in order else len(todo)
        todo = todo[behind:]
    return Report(
        model=request.model,
        model_class=model["class"],
        config=model["config"],
        ranks=request.ranks,
        dtype=request.dtype,
        tolerance=request.tolerance,
        rows=tuple(rows),
        problem=problem,
        seconds=round(time.monotonic() - start, 1),
        versions={"ds-mla-ulysses": __version__}
        | {name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    )


def _failure(events: Sequence[Sequence[Mapping[str, Any]]], statuses: Sequence[int], silence: float) -> Row:
    """The row about a run that did not end well: the ranks' errors, without those that only say a peer is gone."""
    last_stage: Mapping[str, Any] = {"strategy": "", "case": ""}
    said: dict[str, list[int]] = {}
    lost: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(events):
        stages = [event for event in of_rank if event["kind"] == "stage"]
        last_stage = stages[-1] if stages else last_stage
        end = of_rank[-1] if of_rank else {"kind": "silent"}
        if end["kind"] == "failed":
            (lost if end["is_lost_peer"] else said).setdefault(end["text"], []).append(rank)
        elif end["kind"] == "died":
            number = -os.waitstatus_to_exitcode(statuses[rank])
            name = signal.Signals(number).name if number > 0 else f"exit status {-number}"
            said.setdefault(f"the process died ({name})", []).append(rank)
        elif end["kind"] != "done":
            text = f"no answer for {silence:.0f} s" if silence >= SILENCE_SECONDS else "waits for the others"
            lost.setdefault(text, []).append(rank)
    parts = [_on_ranks(text, ranks, len(events)) for text, ranks in (said or lost).items()]
    if said and lost:
        waiting = sorted(rank for ranks in lost.values() for rank in ranks)
        parts.append(f"rank {', '.join(map(str, waiting))} waits")
    return Row(last_stage["strategy"], last_stage["case"], "fails", reason="; ".join(parts))


def _on_ranks(text: str, ranks: Sequence[int], size: int) -> str:
    return text if len(ranks) == size else f"on rank {', '.join(map(str, ranks))} only: {text}"


def _without_kind(event: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "kind"}


def _be_a_rank(
    request: Request, todo: Sequence[tuple[str, str]], rank: int, store: str, pipe: connection.Connection
) -> NoReturn:
    """Runs a rank in a process that was just forked. It ends without destructors, which would wait for peers."""
    status = 1
    try:
        run_rank(request, todo, rank, store, lambda event: pipe.send_bytes(json.dumps(event).encode()))
        status = 0
    finally:
        pipe.close()
        os._exit(status)
