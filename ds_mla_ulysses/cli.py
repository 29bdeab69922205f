"""The command `ds-mla-ulysses`: `plan` before a run, `doctor` before anything."""

from __future__ import annotations

import argparse
import sys

from .doctor import examine

try:
    from . import plan as _plan
except ImportError as error:  # the doctor says of what is missing what to do
    _plan, _missing = None, (error.name or "torch").split(".")[0]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; ends with status 2 and a sentence if what was given does not fit."""
    parser = argparse.ArgumentParser(prog="ds-mla-ulysses", description="Sequence parallelism for MLA and MoBA models.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="what each strategy costs, and what strategy='auto' would choose",
        description="One attention layer, forward and backward, on the rank that has the most to do.",
    )
    if _plan is not None:
        _plan.add_arguments(plan)
    commands.add_parser("doctor", help="what is installed, what of it is used here, and what to do about the rest")
    args, unknown = parser.parse_known_args(arguments)
    if args.command == "plan" and _plan is None:
        plan.error(f"there is no {_missing}: `ds-mla-ulysses doctor` says what to install.")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command == "doctor":
        findings = examine()
        print("\n".join(map(str, findings)))
        sys.exit(any(finding.state == "missing" for finding in findings))
    try:
        print(_plan.plan(args))
    except (ValueError, OSError, ImportError) as error:
        plan.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
