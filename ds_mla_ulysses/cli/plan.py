"""`ds-mla-ulysses plan`: shows what each strategy costs, as a table, JSON or a plot."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ..comm.group import SPLITS
from ..errors import UlyssesValueError
from ..hf.configs import find_widths
from ..layout.widths import HeadWidths, MLAWidths
from ..planner.cost import Estimate, choose, estimate, estimates, other_splits, sent_elements
from ..planner.models import PRESETS
from ..planner.strategies import STRATEGIES, names_with_split
from ..planner.work import Machine, Work

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `plan` to `parser`."""
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(PRESETS)}, a config.json, or a folder with one")
    add("--sp", type=whole_number, required=True, metavar="RANKS", help="number of ranks that share each sequence")
    add("--tokens", type=whole_number, required=True, help="tokens of all sequences of a micro-batch together")
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
        help="also plot the elements sent per token against the number of ranks (needs matplotlib)",
    )


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
    """Estimates one attention layer, forward and backward, under every strategy, on the rank with the most work.

    Args:
        args: the parsed arguments of `add_arguments`.

    Returns: the text to print.

    Raises:
        ValueError, OSError: an argument is invalid, or a file cannot be read or written.
    """
    widths = find_widths(args.model)
    chunks = args.sp * (2 if args.split == "head_tail" and args.sp > 1 else 1)
    if args.tokens % chunks:
        of = f"{chunks}, twice --sp {args.sp}" if chunks > args.sp else f"--sp {args.sp}"
        raise UlyssesValueError(f"--tokens {args.tokens} must be a multiple of {of}: shard_batch pads to one.")
    work = Work(widths, args.sp, args.tokens, args.sequence, _BYTES[args.dtype], args.split)
    machine = Machine(args.link_gbps, args.tflops)
    found = estimates(work, machine)
    best, why = choose(found)
    why += other_splits(work, machine, best)
    if args.plot:
        _plot(args.plot, args.model, widths, args.sp)
    if args.json:
        rows = [
            dataclasses.asdict(e) | {"ms": e.ms}
            if e.refused is None
            else {"strategy": e.strategy, "refused": e.refused}
            for e in found
        ]
        return json.dumps({"rows": rows, "auto": best.strategy, "why": why, "widths": dataclasses.asdict(widths)})
    lines = [
        f"{args.model}: one layer, forward and backward, {args.tokens} tokens on {args.sp} ranks, {args.dtype}, "
        f"{args.link_gbps:g} Gbit/s, {args.tflops:g} TFLOP/s",
        "",
        *_table([_row(e) for e in found]),
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
    if not Path(path).suffix:  # matplotlib would append .png and write another file
        raise UlyssesValueError(f"--plot takes the name of a file to write, such as bytes.png, got {path!r}.")
    try:
        import matplotlib
    except ImportError:
        raise UlyssesValueError("--plot needs matplotlib: pip install 'ds-mla-ulysses[show]'.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [n for n in (2, 4, 8, 16, 32, 64, 128) if n <= max(64, ranks)]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for strategy in STRATEGIES:
        possible = [n for n in counts if estimate(Work(widths, n, n), strategy, Machine()).refused is None]
        sent = [max(sent_elements(widths, strategy, n, rank)[0] for rank in range(n)) for n in possible]
        if possible:
            axes.plot(possible, sent, marker="o", label=strategy)
    axes.axvline(ranks, color="grey", linestyle=":", label=f"{ranks} ranks")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(n) for n in counts])
    axes.set(xlabel="ranks", ylabel="elements that a rank sends per local token", title=f"{model}: one layer, forward")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


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


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = max(rows, key=len)
    widths = {
        name: max([len(name), *(len(str(r[name])) for r in rows if name in r and len(r) == len(names))])
        for name in names
    }
    lines = ["  ".join(name.rjust(widths[name]) if name != "strategy" else name.ljust(10) for name in names)]
    for row in rows:
        lines.append(
            "  ".join(
                str(value).ljust(10) if name == "strategy" else str(value).rjust(widths[name])
                for name, value in row.items()
            )
        )
    return lines
