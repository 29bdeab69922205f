"""`ds-mla-ulysses plan`: shows what each strategy costs, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ..comm.group import SPLITS
from ..errors import UlyssesValueError
from ..hf.configs import find_widths
from ..layout.widths import HeadWidths, MLAWidths
from ..planner.cost import Estimate, choose, estimate, estimates, other_splits, sent_elements
from ..planner.models import PRESETS
from ..planner.strategies import STRATEGIES, names_with_split
from ..planner.work import Machine, Work
from . import plan_memory as memory
from .output import figure_file, table

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan` to `parser`."""
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(PRESETS)}, a config.json, or a folder with one")
    add("--gpus", type=whole_number, metavar="N", help="number of ranks of the job (default: --sp)")
    add("--sp", type=whole_number, metavar="RANKS", help="number of ranks that share each sequence (default: --gpus)")
    add(
        "--tokens",
        type=whole_number,
        help="tokens of all sequences of a micro-batch together; with --memory it may be left out",
    )
    add("--sequence", type=whole_number, help="tokens of one sequence (default: all tokens are one sequence)")
    add("--dtype", choices=_BYTES, default="bf16")
    of_splits = "; ".join(f"{split}: {', '.join(names_with_split(split))}" for split in SPLITS)
    add(
        "--link-gbps",
        type=number,
        default=Machine.link_gbps,
        help="Gbit/s that each rank can send (default %(default)g)",
    )
    add(
        "--tflops",
        type=number,
        default=Machine.tflops,
        help="TFLOP/s of a rank in matrix products (default %(default)g)",
    )
    add("--split", choices=SPLITS, default="contiguous", help=f"which tokens each rank holds ({of_splits})")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add(
        "--plot",
        metavar="FILE.png",
        help="also plot the elements sent per token against the number of ranks, or with --memory the settings (needs "
        "matplotlib)",
    )
    memory.add_arguments(parser, number, whole_number)


def number(text: str) -> float:
    """Parses a positive quantity of hardware."""
    value = float(text)
    if not 1e-9 <= value <= 1e15:
        raise argparse.ArgumentTypeError(f"must be positive, and a number that hardware can have, got {text}")
    return value


def whole_number(text: str) -> int:
    """Parses a positive whole number."""
    value = int(text)
    if not 1 <= value <= 2**48:
        raise argparse.ArgumentTypeError(f"must be positive, and not beyond 2**48, got {text:.20}")
    return value


def plan(args: argparse.Namespace) -> str:
    """Estimates one attention layer under every strategy or, with `--memory`, the longest sequence that fits.

    Args:
        args: the parsed arguments of `add_arguments`.

    Returns: the text to print.

    Raises:
        ValueError, OSError: an argument is invalid, or a file cannot be read or written.
    """
    gpus, ranks = args.gpus or args.sp, args.sp or args.gpus
    if gpus is None or ranks is None:
        raise UlyssesValueError(
            "give --gpus, the number of ranks of the job, or --sp, how many of them share a sequence."
        )
    if gpus % ranks:
        raise UlyssesValueError(f"--gpus {gpus} must be a multiple of --sp {ranks}.")
    if args.memory is not None:
        return memory.plan_memory(args, gpus, ranks)
    if args.tokens is None:
        raise UlyssesValueError("give --tokens, or --memory for the longest sequence that fits.")
    return _plan_strategies(args, ranks)


def _plan_strategies(args: argparse.Namespace, ranks: int) -> str:
    """Estimates one attention layer, forward and backward, under every strategy, on the rank with the most work."""
    widths = find_widths(args.model)
    chunks = ranks * (2 if args.split == "head_tail" and ranks > 1 else 1)
    if args.tokens % chunks:
        of = f"{chunks}, twice --sp {ranks}" if chunks > ranks else f"--sp {ranks}"
        raise UlyssesValueError(f"--tokens {args.tokens} must be a multiple of {of}: shard_batch pads to one.")
    work = Work(widths, ranks, args.tokens, args.sequence, _BYTES[args.dtype], args.split)
    machine = Machine(args.link_gbps, args.tflops)
    found = estimates(work, machine)
    best, why = choose(found)
    why += other_splits(work, machine, best)
    if args.plot:
        _plot(args.plot, args.model, widths, ranks)
    if args.json:
        rows = [
            dataclasses.asdict(e) | {"ms": e.ms}
            if e.refused is None
            else {"strategy": e.strategy, "refused": e.refused}
            for e in found
        ]
        return json.dumps({"rows": rows, "auto": best.strategy, "why": why, "widths": dataclasses.asdict(widths)})
    lines = [
        f"{args.model}: one layer, forward and backward, {args.tokens} tokens on {ranks} ranks, {args.dtype}, "
        f"{args.link_gbps:g} Gbit/s, {args.tflops:g} TFLOP/s",
        "",
        *table([_row(e) for e in found], "strategy"),
        "",
        f"auto: {why}",
        *([f"plotted: {args.plot}"] if args.plot else []),
        *(
            []
            if args.model.lower() in PRESETS
            else ["This compares widths only; parallelize checks whether the model is supported."]
        ),
    ]
    return "\n".join(lines)


def _plot(path: str, model: str, widths: MLAWidths | HeadWidths, ranks: int) -> None:
    """Plots the elements that one layer sends per token, forward, against the number of ranks, for each possible strategy."""
    counts = [n for n in (2, 4, 8, 16, 32, 64, 128) if n <= max(64, ranks)]
    with figure_file(path, 1, (7, 4.5)) as (_, axes):
        for strategy in STRATEGIES:
            possible = [n for n in counts if estimate(Work(widths, n, n), strategy, Machine()).refused is None]
            sent = [max(sent_elements(widths, strategy, n, rank)[0] for rank in range(n)) for n in possible]
            if possible:
                axes.plot(possible, sent, marker="o", label=strategy)
        axes.axvline(ranks, color="grey", linestyle=":", label=f"{ranks} ranks")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set(
            xlabel="ranks", ylabel="elements that a rank sends per local token", title=f"{model}: one layer, forward"
        )
        axes.legend()


def _row(e: Estimate) -> dict[str, Any]:
    if e.refused is not None:
        return {"strategy": e.strategy, "collectives": f"not possible: {e.refused}"}
    return {
        "strategy": e.strategy,
        "collectives": e.collectives,
        "MB sent": f"{e.sent_bytes / 1e6:.4g}",
        "extra TFLOP": f"{e.extra_tflop:.3g}",
        "imbalance": f"{e.imbalance:.3g}",
        "K and V, GB": f"{e.kv_bytes / 1e9:.3g}",
        "ms sending": f"{e.send_ms:,.4g}",
        "ms computing": f"{e.compute_ms:,.4g}",
        "ms": f"{e.ms:,.4g}",
    }
