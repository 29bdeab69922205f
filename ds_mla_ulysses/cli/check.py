"""`ds-mla-ulysses check`: compares a small model of an architecture on several processes with one process."""

from __future__ import annotations

import argparse

from ..checking.report import Report
from ..checking.request import TOLERANCES
from ..checking.run import check
from ..planner.strategies import STRATEGIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `check` to `parser`."""
    add = parser.add_argument
    add("--model", required=True, help="a config.json, a folder with one, or a model type of transformers")
    add("--sp", type=int, default=2, metavar="RANKS", help="number of processes (default %(default)s)")
    add("--strategy", choices=STRATEGIES, help="compare this strategy only (default: all that the model allows)")
    add(
        "--dtype",
        choices=TOLERANCES,
        default="float64",
        help="float64 also widens what models compute in fp32 (default %(default)s)",
    )
    add(
        "--model-code", metavar="FILE.py:Class", help="the model's class, if it is not in transformers; the file is run"
    )
    add("--head-chunks", type=int, default=1, metavar="N", help="head_chunks of parallelize (default %(default)s)")
    add("--json", action="store_true", help="print the report as JSON")


def run(args: argparse.Namespace) -> Report:
    """Runs the comparison.

    Args:
        args: the parsed arguments of `add_arguments`.

    Raises:
        ValueError: there is no such config or class.
    """
    return check(
        args.model,
        sp_size=args.sp,
        strategy=args.strategy,
        dtype=args.dtype,
        model_code=args.model_code,
        head_chunks=args.head_chunks,
    )
