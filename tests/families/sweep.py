"""Checks model types one after the other, and stores what came out with date and versions.

python tests/families/sweep.py tests/results/families_DATE.json [--batches plain,packed] [--strategy packed] [NAME ...]

Without names it checks every entry that the file does not have yet, so that a sweep can go on where it ended. What is equal
on 2 ranks is checked on 4 as well, with fewer batches and one strategy. The file is written after each entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import inspect
import json
import os
import platform
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from entries import Entry, entries

from ds_mla_ulysses.checking.report import Report
from ds_mla_ulysses.checking.request import CASES
from ds_mla_ulysses.checking.run import Worker, make_request
from ds_mla_ulysses.planner.strategies import STRATEGIES

#: What runs on 4 ranks, under the first strategy of each model.
CASES_ON_4_RANKS = ("packed", "left")
PACKAGES = ("torch", "deepspeed", "transformers")
#: A model that does not run in float64 says so with one of these words.
_OF_DTYPES = ("dtype", "scalar type", "Double", "same type")


def check_entry(
    worker: Worker,
    name: str,
    entry: Entry,
    cases: tuple[str, ...] = CASES,
    strategies: tuple[str, ...] = tuple(STRATEGIES),
    ranks: int = 2,
) -> Report:
    """Checks one entry; in float32 if one process cannot run it in float64."""
    report = None
    for dtype in ("float64", "float32"):
        made = make_request(entry.model_type, ranks, strategies, dtype, cases=cases, variant=entry.settings)
        made = dataclasses.replace(
            made, model=name, config={**made.config, **entry.config}, with_images=entry.with_images
        )
        report = worker.check(made)
        if not any(word in report.problem for word in _OF_DTYPES):
            break
    assert report is not None
    return report


def result_of(report: Report, cases: tuple[str, ...]) -> dict[str, Any]:
    """What the file stores of a report."""
    errors = [max(row.loss or 0.0, row.logits or 0.0, row.gradient or 0.0) for row in report.rows]
    return {
        "verdict": report.verdict,
        "strategies": list(report.strategies),
        "reason": report.reason,
        "class": report.model_class,
        "config": dict(report.config),
        "dtype": report.dtype,
        "ranks": report.ranks,
        "batches": list(cases),
        "largest error": float(f"{max(errors, default=0.0):.2g}"),
        "seconds": report.seconds,
    }


def is_due_on_4_ranks(row: dict[str, Any]) -> bool:
    """Whether a model is equal on 2 ranks and was not checked on 4."""
    return row["verdict"] == "equal" and row["ranks"] == 2 and "on 4 ranks" not in row


def checkpoint_of(kind: str) -> str:
    """The checkpoint that the documentation of the config class names; empty if it names none."""
    from transformers import CONFIG_MAPPING

    source = inspect.getsource(sys.modules[CONFIG_MAPPING[kind].__module__])
    found = re.search(r'checkpoint="([^"]+)"', source)
    return found[1] if found else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--batches", default=",".join(CASES))
    parser.add_argument("--strategy", default=",".join(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--most", type=int, default=10**6, help="stop after so many entries")
    args = parser.parse_intermixed_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    known = entries()
    result = json.loads(args.file.read_text()) if args.file.exists() else {}
    done: dict[str, Any] = result.get("models", {})
    names = args.names or [name for name in known if name not in done or is_due_on_4_ranks(done[name])]
    cases, strategies = tuple(args.batches.split(",")), tuple(args.strategy.split(","))
    with Worker() as worker:
        for name in names[: args.most]:
            if args.names or name not in done:
                report = check_entry(worker, name, known[name], cases, strategies, args.ranks)
                done[name] = result_of(report, cases) | {"checkpoint": checkpoint_of(known[name].model_type)}
                print(f"{report.verdict:12} {name:26} {report.seconds:5.1f} s  {report.reason[:200]}", flush=True)
            if is_due_on_4_ranks(done[name]):
                first = tuple(done[name]["strategies"][:1])
                report = check_entry(worker, name, known[name], CASES_ON_4_RANKS, first, 4)
                done[name]["on 4 ranks"] = report.verdict
                print(
                    f"{report.verdict:12} {name:26} {report.seconds:5.1f} s  on 4 ranks {report.reason[:200]}",
                    flush=True,
                )
            store(args.file, done)
    print(dict(Counter(row["verdict"] for row in done.values())), f"{len(known) - len(set(known) & set(done))} to do")


def store(file: Path, done: dict[str, Any]) -> None:
    """Writes the result, sorted."""
    result = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "models": dict(sorted(done.items())),
    }
    file.parent.mkdir(exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(file)


if __name__ == "__main__":
    main()
