"""Bytes that one attention layer sends under each strategy, and that a step holds, by the planner's formulas.

    python benchmarks/traffic.py --model deepseek-v3 --sp 8 [--plot docs/images/traffic.png]

Nothing runs here: tests/ranks/test_traffic.py compares what real runs send with the same formulas. Numbers are bytes
per local token and layer, forward and backward, on the rank that sends the most. The first row is stock DeepSpeed,
which sends materialised Q, K, V and the output by four all-to-alls; its formula needs heads divisible by the ranks.

With --plot it draws a second chart: bytes per local token that a training step holds on each GPU, all layers and the loss,
as `ds-mla-ulysses plan --memory` has them. Stock is a loop that makes whole logits, with gradient checkpointing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ds_mla_ulysses.cli import main as ds_mla_ulysses_command
from ds_mla_ulysses.hf.configs import find_model
from ds_mla_ulysses.planner.memory import GB, Machines, ladder, most_head_chunks, step_memory

STOCK = "DeepSpeed, three all-to-alls"
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}


def rows_of(model: str, ranks: int, dtype: str) -> list[dict[str, Any]]:
    """One row for each strategy that is possible, in the order of the planner; stock DeepSpeed first."""
    words = ["plan", "--model", model, "--sp", str(ranks), "--tokens", str(ranks), "--dtype", dtype, "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ds_mla_ulysses_command(words)
    plan = json.loads(printed.getvalue())
    rows = []
    heads, widths = plan["widths"]["heads"], plan["widths"]
    if heads % ranks == 0:
        elements = 2 * heads * _stock_widths(widths) * (ranks - 1) // ranks
        rows.append({"strategy": STOCK, "bytes": elements * ELEMENT_BYTES[dtype]})
    for row in plan["rows"]:
        if row.get("refused") is None:
            rows.append({"strategy": row["strategy"], "bytes": row["sent_bytes"]})
    return [row | {"of_stock": round(row["bytes"] / rows[0]["bytes"], 3)} for row in rows]


def _stock_widths(widths: dict[str, Any]) -> float:
    """What stock DeepSpeed sends per query head: query, key, value and output."""
    if "nope" in widths:
        return 2 * (widths["nope"] + widths["rope"] + widths["value"])
    return (widths["key"] + widths["value"]) * (1 + widths["kv_heads"] / widths["heads"])


#: What the planner's settings are called in the picture.
SETTINGS = {
    "as it is": "whole logits (stock)",
    "tiled loss": "tiled loss",
    "offload": "layer inputs on the host",
    "tiled layers": "tiled layers",
    "head chunks": "head chunks",
}


def memory_rows(model: str, ranks: int) -> list[dict[str, Any]]:
    """What a step holds per local token under each setting of the ladder; stock first."""
    numbers, machines = find_model(model), Machines(ranks, ranks, 3, 80 * GB)
    chunks, tokens = min(4, most_head_chunks(numbers, "packed", ranks)), 2**20
    rows = []
    for setting in ladder(chunks):
        if setting.name in SETTINGS:
            step = step_memory(numbers, "packed", machines, setting)
            held = (step.peak(2 * tokens) - step.peak(tokens)) / tokens
            rows.append({"strategy": SETTINGS[setting.name], "bytes": held})
    return [row | {"of_stock": round(row["bytes"] / rows[0]["bytes"], 3)} for row in rows]


def plot(path: Path, title: str, rows: list[dict[str, Any]], held: list[dict[str, Any]]) -> None:
    """A horizontal bar for each row, in kilobytes: what is sent, and below what is held."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, figsize=(8, 5.8), layout="constrained")
    above.set(xlabel="KB that a rank sends per local token and layer, forward and backward", title=title)
    below.set(xlabel="KB that a GPU holds per local token, each bar with everything of the bars above it")
    for axes, drawn in ((above, rows), (below, held)):
        colors = ["#b0b0b0", *["#30638e"] * (len(drawn) - 1)]
        bars = axes.barh([row["strategy"] for row in drawn], [row["bytes"] / 1e3 for row in drawn], color=colors)
        axes.bar_label(bars, [f"{row['bytes'] / 1e3:,.0f} KB ({row['of_stock']:.1%})" for row in drawn], padding=4)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deepseek-v3", help="as of `ds-mla-ulysses plan` (default deepseek-v3)")
    parser.add_argument("--sp", type=int, default=8, help="ranks that share a sequence (default 8)")
    parser.add_argument("--dtype", choices=ELEMENT_BYTES, default="bf16")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the table, too (needs matplotlib)")
    args = parser.parse_args()
    rows = rows_of(args.model, args.sp, args.dtype)
    if args.plot:
        plot(args.plot, f"{args.model} on {args.sp} ranks, {args.dtype}", rows, memory_rows(args.model, args.sp))
    if args.json:
        print(json.dumps({"rows": rows, "model": args.model, "sp": args.sp, "dtype": args.dtype}))
        return
    for row in rows:
        print(f"{row['strategy']:<30}{row['bytes']:>12,} bytes{row['of_stock']:>8.1%}")


if __name__ == "__main__":
    main()
