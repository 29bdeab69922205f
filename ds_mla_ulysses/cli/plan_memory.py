"""`ds-mla-ulysses plan --memory`: the longest sequence that fits, setting by setting, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ..errors import UlyssesValueError
from ..hf.configs import find_model
from ..planner.memory import GB, Machines, StepMemory, ladder, most_head_chunks, step_memory
from ..planner.models import Model
from ..planner.strategies import STRATEGIES
from .output import figure_file, table

OFFLOADS = ("optimizer", "inputs")


def add_arguments(parser: argparse.ArgumentParser, number: Any, whole_number: Any) -> None:
    """Adds the arguments of `plan --memory` to a group of `parser`."""
    add = parser.add_argument_group("the longest sequence that fits").add_argument
    add("--memory", type=number, metavar="GB", help="memory of a GPU; plans the longest sequence")
    add(
        "--reserve",
        type=number,
        default=5.0,
        metavar="GB",
        help="memory of a GPU that is not counted (default %(default)g)",
    )
    add("--host-memory", type=number, metavar="GB", help="memory of all hosts together (default: no limit)")
    add("--zero", type=int, choices=range(4), default=3, help="the stage of ZeRO (default %(default)s)")
    add(
        "--offload",
        type=_offloads,
        default=OFFLOADS,
        metavar="WHAT",
        help="what the host keeps: optimizer, inputs (of layers), both separated by a comma (the default), or none",
    )
    add("--strategy", choices=STRATEGIES, default=next(iter(STRATEGIES)), help="(default %(default)s)")
    add(
        "--head-chunks",
        type=whole_number,
        help="of the rung head chunks (default 4, or fewer if a rank has fewer heads)",
    )


def _offloads(text: str) -> tuple[str, ...]:
    if text == "none":
        return ()
    found = tuple(part.strip() for part in text.split(","))
    if not set(found) <= set(OFFLOADS):
        raise argparse.ArgumentTypeError(f"must be none, or some of {', '.join(OFFLOADS)}, got {text!r}")
    return found


def plan_memory(args: argparse.Namespace, gpus: int, ranks: int) -> str:
    """Plans what a step holds on each GPU, and the longest sequence, for each rung of the ladder.

    Args:
        args: the parsed arguments of `plan`.
        gpus, ranks: of the job and of a sequence.

    Returns: the text to print.

    Raises:
        ValueError, OSError: an argument is invalid, or a file cannot be read or written.
    """
    if args.dtype != "bf16":
        raise UlyssesValueError(f"--memory plans for --dtype bf16, got {args.dtype}.")
    if args.reserve >= args.memory:
        raise UlyssesValueError(f"--reserve {args.reserve:g} GB leaves nothing of --memory {args.memory:g} GB.")
    if args.tokens is not None and args.tokens % ranks:
        raise UlyssesValueError(
            f"--tokens {args.tokens} must be a multiple of the {ranks} ranks that share a sequence."
        )
    model = find_model(args.model)
    host = None if args.host_memory is None else args.host_memory * GB
    machines = Machines(gpus, ranks, args.zero, args.memory * GB, args.reserve * GB, host)
    chunks = args.head_chunks or max(1, min(4, most_head_chunks(model, args.strategy, ranks)))
    settings = ladder(chunks, args.offload)
    steps = [step_memory(model, args.strategy, machines, setting) for setting in settings]
    local = None if args.tokens is None else args.tokens // ranks
    if args.plot:
        _plot(args.plot, f"{args.model}: {gpus} GPUs of {args.memory:g} GB", steps, machines)
    if args.json:
        rows = [_of_step(step, machines, local) for step in steps]
        return json.dumps({"model": dataclasses.asdict(model), "parameters": model.parameters, "rows": rows})
    return "\n".join(_report(args, model, steps, machines, local))


def _report(
    args: argparse.Namespace, model: Model, steps: Sequence[StepMemory], machines: Machines, local: int | None
) -> list[str]:
    """The lines of the table and around it."""
    host = "" if machines.host_memory is None else f", {machines.host_memory / GB:,.0f} GB on the hosts"
    lines = [
        f"{args.model}: {model.parameters / 1e9:,.3g}B parameters, bf16, gradient checkpointing; ZeRO {machines.stage} on "
        f"{machines.gpus} GPUs of {args.memory:g} GB ({args.reserve:g} GB reserved){host}; {machines.ranks} ranks share a "
        f"sequence, strategy {args.strategy}",
        "",
        *table([_row(step, machines, local) for step in steps], "setting"),
        "",
        "KB are 1,000 bytes on a GPU for each of its tokens: what all layers keep, and the largest moment of a layer or of the "
        "loss, of which only the largest counts. Not counted, hence reserved: CUDA's context, buffers of collectives, "
        "fragmentation.",
    ]
    if not any(step.longest(machines)[0] for step in steps):
        lines.append("No setting fits: use more GPUs, a higher ZeRO stage, or --offload.")
    if args.plot:
        lines.append(f"plotted: {args.plot}")
    return lines


def _of_step(step: StepMemory, machines: Machines, local: int | None) -> dict[str, Any]:
    """One setting as JSON has it, in bytes."""
    tokens, limit = step.longest(machines)
    at = tokens if local is None else local
    component, phase = step.largest(at)
    found: dict[str, Any] = {
        "setting": dataclasses.asdict(step.setting),
        "fixed": step.fixed,
        "kept_per_token": step.kept,
        "components": [
            {"component": c.name, "phase": p.name, "bytes_per_token": p.per_token, "constant": p.constant}
            for c in step.components
            for p in [c.largest(at)]
        ],
        "largest": {"component": component.name, "phase": phase.name},
        "longest": tokens * machines.ranks,
        "limit": limit,
        "peak": step.peak(tokens),
        "host": step.host(tokens),
    }
    if local is not None:
        found |= {
            "tokens": local * machines.ranks,
            "peak_at_tokens": step.peak(local),
            "host_at_tokens": step.host(local),
        }
    return found


def _row(step: StepMemory, machines: Machines, local: int | None) -> dict[str, str]:
    """One setting as the table shows it."""
    tokens, limit = step.longest(machines)
    at = tokens if local is None else local
    row = {"setting": step.setting.name, "kept, KB": f"{step.kept / 1e3:,.1f}"}
    row |= {f"{c.name}, KB": f"{c.largest(at).per_token / 1e3:,.1f}" for c in step.components}
    row |= {
        "fixed, GB": f"{step.fixed / GB:,.1f}",
        "longest sequence": f"{tokens * machines.ranks:,}" if tokens else "none",
    }
    row |= {"limited by": limit, "host, GB": f"{step.host(tokens) / GB:,.0f}"}
    if local is not None:
        row[f"GB at {local * machines.ranks:,}"] = f"{step.peak(local) / GB:,.1f}"
    return row


def _plot(path: str, title: str, steps: Sequence[StepMemory], machines: Machines) -> None:
    """Draws the bytes per local token, and the longest sequence, of each setting."""
    with figure_file(path, 2, (11, 0.5 * len(steps) + 1.4)) as (figure, (bytes_axes, length_axes)):
        names = [step.setting.name for step in steps]
        tokens = [step.longest(machines)[0] for step in steps]
        kept = [step.kept / 1e3 for step in steps]
        moment = [step.largest(at)[1].per_token / 1e3 for step, at in zip(steps, tokens, strict=True)]
        bytes_axes.barh(names, kept, color="#b0b0b0", label="kept by all layers")
        bars = bytes_axes.barh(names, moment, left=kept, color="#30638e", label="the largest moment")
        bytes_axes.bar_label(bars, [f"{a + b:,.0f}" for a, b in zip(kept, moment, strict=True)], padding=4)
        bytes_axes.set(xlabel="KB per local token", title=title)
        bytes_axes.legend(loc="lower right")
        lengths = [at * machines.ranks / 1e6 for at in tokens]
        bars = length_axes.barh(names, lengths, color="#30638e")
        length_axes.bar_label(bars, [f"{length:,.2f}M" for length in lengths], padding=4)
        length_axes.set(xlabel="the longest sequence, 10^6 tokens", yticks=[])
        for axes in (bytes_axes, length_axes):
            axes.invert_yaxis()
            axes.margins(x=0.2)
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout()
