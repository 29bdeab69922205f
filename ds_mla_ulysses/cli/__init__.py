"""The command `ds-mla-ulysses`: `plan` compares strategies before a run, `check` compares a small model on several
processes with one process, and `doctor` checks the installation."""

from __future__ import annotations

import argparse
import sys
from types import ModuleType

from .doctor import examine

_plan: ModuleType | None
_check: ModuleType | None
try:
    from . import check as _check
    from . import plan as _plan
except ImportError as error:  # `doctor` runs without torch and says how to install what is missing
    _plan, _check, _missing = None, None, (error.name or "torch").split(".")[0]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command. If an argument is invalid, it prints an explanation and exits with status 2.

    Args:
        arguments: the words after the command's name; by default those of `sys.argv`.
    """
    parser = argparse.ArgumentParser(prog="ds-mla-ulysses", description="Sequence parallelism for MLA and MoBA models.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="show what each strategy costs, and which one strategy='auto' would choose",
        description="Estimates one attention layer, forward and backward, on the rank with the most work.",
    )
    if _plan is not None:
        _plan.add_arguments(plan)
    check = commands.add_parser(
        "check",
        help="compare a small model of an architecture on several processes with one process",
        description="Exit status: 0 equal, 1 different or failing, 2 not checked, 3 refused by parallelize.",
    )
    if _check is not None:
        _check.add_arguments(check)
    commands.add_parser(
        "doctor", help="show what is installed, what this package can use here, and how to fix the rest"
    )
    args, unknown = parser.parse_known_args(arguments)
    if args.command != "doctor" and _plan is None:
        command = plan if args.command == "plan" else check
        command.error(f"{_missing} is not installed: `ds-mla-ulysses doctor` shows what to install.")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command == "doctor":
        findings = examine()
        print("\n".join(map(str, findings)))
        sys.exit(any(finding.state == "missing" for finding in findings))
    assert _plan is not None and _check is not None
    if args.command == "check":
        try:
            report = _check.run(args)
        except (ValueError, OSError) as error:
            check.error(str(error))
        print(report.to_json() if args.json else report)
        sys.exit(report.exit_status)
    try:
        print(_plan.plan(args))
    except (ValueError, OSError, ImportError) as error:
        plan.error(str(error))
