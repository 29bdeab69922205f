"""Shared by the benchmarks: two or more sides in one process group, in turns; medians over the pairs; plots.

A benchmark gives `start` a function that makes a `Comparison` on every rank. A benchmark that measures in another way gives
`on_ranks` a function of its own. Ranks are started here (gloo, one thread each), unless RANK is set: then this process is
that rank, by torchrun's variables.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported; it would warn that there is no GPU

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WARMUP = 3
#: Kinds of operators, by parts of their names.
PROFILE = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm"),
    "copies": ("aten::copy_", "aten::cat", "aten::fill_", "aten::add"),
    "sums": ("aten::sum",),
}


@dataclass
class Comparison:
    """The sides by name. The first is the one to compare with; each returns the output of one forward.

    Attributes:
        inputs: leaves whose gradients are dropped before each turn.
        grad: the gradient of every side's output.
        sent: returns the bytes that one forward and backward of a side sends to other ranks; called after the timing. None
            if nothing is sent.
        rows: makes the printed rows of the milliseconds of each side, pair by pair, in place of `_rows`.
        auto: the strategy that "auto" would choose here, and why.
    """

    sides: dict[str, Callable[[], Tensor]]
    inputs: list[Tensor]
    grad: Tensor
    sent: Callable[[str], int] | None = None
    rows: Callable[[dict[str, list[float]]], list[dict[str, Any]]] | None = None
    auto: str | None = None


class Core(torch.autograd.Function):
    """A stand-in for attention: its gradients are new tensors, like those of a kernel. A subclass has the forward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format).fill_(1e-3) for x in ctx.saved_tensors)


def parser(doc: str) -> argparse.ArgumentParser:
    found = common_options(doc)
    found.add_argument("--pairs", type=int, default=21)
    found.add_argument("--profile", action="store_true", help="print where the time of each side goes")
    return found


def common_options(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--ranks", type=int, default=int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 2)
    found.add_argument("--tokens", type=int, default=4096, help="tokens of the whole sequence")
    found.add_argument("--dtype", choices=DTYPES, default="bf16")
    found.add_argument("--json", action="store_true")
    return found


def start(
    compare: Callable[[argparse.Namespace], Comparison],
    arguments: argparse.Namespace,
    plot: Callable[[list[dict[str, Any]], argparse.Namespace], None] | None = None,
) -> None:
    """Compares and prints; with `--plot`, `plot` draws the rows."""
    if plot is not None and arguments.plot and not Path(arguments.plot).suffix:  # matplotlib would write another name
        sys.exit(f"--plot takes the name of a file to write, such as bars.png, got {arguments.plot!r}.")
    found = on_ranks(partial(_compare, compare), arguments)
    if plot is not None and arguments.plot:
        plot(found["rows"], arguments)
    if arguments.json:
        print(json.dumps(found | vars(arguments)))
    else:
        print_table(found["rows"])
        if "auto" in found:
            print(f"auto: {found['auto']}")
    leave(0)


def on_ranks(function: Callable[[argparse.Namespace], Any], arguments: argparse.Namespace) -> Any:
    """Calls a function on every rank and returns the result of rank 0, which has to be JSON.

    Ranks other than 0 that were started from outside end here.
    """
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_spawned, args=(function, arguments, Path(folder)), nprocs=arguments.ranks)
            return json.loads((Path(folder) / "found.json").read_text())
    if arguments.ranks != int(os.environ["WORLD_SIZE"]):
        sys.exit(f"--ranks {arguments.ranks}, but {os.environ['WORLD_SIZE']} were started: leave --ranks out")
    found = _rank(int(os.environ["RANK"]), function, arguments, "env://")
    if os.environ["RANK"] != "0":
        leave(0)
    return found


def leave(status: int) -> None:
    """Ends the process at once, without exit handlers: threads of gloo may still be waiting."""
    sys.stdout.flush()
    os._exit(status)


def print_table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>14}" for value in row.values()))


def save_bars(path: str, title: str, unit: str, bars: dict[str, dict[str, float]]) -> None:
    """Draws a horizontal bar for each value, in groups.

    Args:
        path: the picture to write, with a suffix such as .png.
        unit: of the values, for the axis.
        bars: the values by group and by label; a group with one label "" needs no legend.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(dict.fromkeys(label for group in bars.values() for label in group))
    height = 0.8 / len(labels)
    figure, axes = pyplot.subplots(figsize=(7, 1.2 + 0.28 * len(bars) * len(labels) + 0.15 * len(bars)))
    for i, label in enumerate(labels):
        places = [
            (g + (i - (len(labels) - 1) / 2) * height, group[label])
            for g, group in enumerate(bars.values())
            if label in group
        ]
        drawn = axes.barh([y for y, _ in places], [value for _, value in places], height=0.9 * height, label=label)
        axes.bar_label(
            drawn, fmt=lambda value: f"{value:,.0f}" if value >= 1000 else f"{value:.3g}", padding=3, fontsize=8
        )
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel=unit, title=title)
    if labels != [""]:
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def traffic_of(step: Callable[[], Any]) -> int:
    """Bytes that this package sends to other ranks in a step."""
    import ds_mla_ulysses as dmu

    with dmu.TrafficMeter() as meter:
        step()
    return meter.total_bytes


def _spawned(rank: int, function: Callable[[argparse.Namespace], Any], args: argparse.Namespace, folder: Path) -> None:
    found = _rank(rank, function, args, f"file://{folder}/ranks")
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave(0)


def _rank(rank: int, function: Callable[[argparse.Namespace], Any], args: argparse.Namespace, init: str) -> Any:
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed's engines read it
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to stderr
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=args.ranks)
    import deepspeed

    from ds_mla_ulysses.integrations.deepspeed import without_cpu_extension

    with without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = function(args)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    os.close(stdout)
    return found


def _compare(compare: Callable[[argparse.Namespace], Comparison], args: argparse.Namespace) -> dict[str, Any]:
    import deepspeed

    this = compare(args)
    times: dict[str, list[float]] = {name: [] for name in this.sides}
    for pair in range(args.pairs + WARMUP if not args.profile else WARMUP):
        for name in this.sides:
            ms = _turn(this, name)
            if pair >= WARMUP:
                times[name].append(ms)
    if args.profile:
        rows = [_profile(this, name, args.pairs) for name in this.sides]
    else:
        rows = this.rows(times) if this.rows else _rows(this, times)
    said = {"rows": rows} | ({} if this.auto is None else {"auto": this.auto})
    return said | {"torch": torch.__version__, "deepspeed": deepspeed.__version__}


def _turn(this: Comparison, name: str) -> float:
    """One forward and backward of a side, between barriers, in ms."""
    for x in this.inputs:
        x.grad = None
    dist.barrier()
    begin = time.perf_counter()
    this.sides[name]().backward(this.grad)
    dist.barrier()
    return 1e3 * (time.perf_counter() - begin)


def _profile(this: Comparison, name: str, turns: int) -> dict[str, Any]:
    """Milliseconds of a turn by kind of operator; most of the rest is waiting for other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(turns):
            _turn(this, name)
    found = dict.fromkeys((*PROFILE, "rest"), 0.0)
    for event in profiler.key_averages():
        if not event.key.startswith("gloo:"):  # runs in another thread while an operator waits
            kind = next((kind for kind, names in PROFILE.items() if event.key.startswith(names)), "rest")
            found[kind] += event.self_cpu_time_total / 1e3 / turns
    return {"side": name} | {f"{kind} ms": round(total, 1) for kind, total in found.items()}


def ratio(ours: list[float], base: list[float]) -> float:
    """The median over the pairs of base time divided by our time."""
    return round(statistics.median(b / m for b, m in zip(base, ours, strict=True)), 3)


def _rows(this: Comparison, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    base = next(iter(times.values()))
    return [
        {
            "side": name,
            **({} if this.sent is None else {"MB": round(this.sent(name) / 1e6, 2)}),
            "ms": round(statistics.median(ms), 2),
            "ratio": ratio(ms, base),
        }
        for name, ms in times.items()
    ]
