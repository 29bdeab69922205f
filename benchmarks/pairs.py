"""What the benchmarks share: two sides of an exchange in one process group, alternating; medians of the pairs.

A benchmark gives `start` a function that makes, on every rank, a `Comparison`; one that measures otherwise gives
`on_ranks` a function of its own. Ranks are started here (gloo, one thread each), unless RANK is set: then this process
is that rank, by torchrun's variables.
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

os.environ["DS_ACCELERATOR"] = "cpu"  # before anything imports DeepSpeed, which else says that there is no GPU

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
    """Sides by name, the one to compare with first: each returns the output of one forward.

    Attributes:
        inputs: leaves whose gradients are dropped before each turn.
        grad: the gradient of every side's output.
        sent: what one forward and backward of a side sends to other ranks, in bytes, asked after the timing.
        rows: makes what is printed of the milliseconds of each side, pair by pair, in the place of `_rows`.
        auto: what strategy="auto" would take here, and why.
    """

    sides: dict[str, Callable[[], Tensor]]
    inputs: list[Tensor]
    grad: Tensor
    sent: Callable[[str], int] | None = None
    rows: Callable[[dict[str, list[float]]], list[dict[str, Any]]] | None = None
    auto: str | None = None


class Core(torch.autograd.Function):
    """A stand-in for attention: its gradients are new tensors, as a kernel's are. The forward is a benchmark's own."""

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format).fill_(1e-3) for x in ctx.saved_tensors)


def parser(doc: str) -> argparse.ArgumentParser:
    found = common_options(doc)
    found.add_argument("--pairs", type=int, default=21)
    found.add_argument("--profile", action="store_true", help="where the time of each side goes, in the place of times")
    return found


def common_options(doc: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc.splitlines()[0])
    found.add_argument("--ranks", type=int, default=int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 2)
    found.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    found.add_argument("--dtype", choices=DTYPES, default="bf16")
    found.add_argument("--json", action="store_true")
    return found


def start(compare: Callable[[argparse.Namespace], Comparison], arguments: argparse.Namespace) -> None:
    found = on_ranks(partial(_compare, compare), arguments)
    if arguments.json:
        print(json.dumps(found | vars(arguments)))
    else:
        print_table(found["rows"])
        if "auto" in found:
            print(f"auto: {found['auto']}")
    leave(0)


def on_ranks(function: Callable[[argparse.Namespace], Any], arguments: argparse.Namespace) -> Any:
    """What a function of each rank, JSON, is on rank 0. Other ranks that were started from outside end here."""
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
    """Ends the process without what else runs at its exit: gloo's threads may still be waiting."""
    sys.stdout.flush()
    os._exit(status)


def print_table(rows: list[dict[str, Any]]) -> None:
    print("  ".join(f"{name:>14}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{value:>14}" for value in row.values()))


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
    os.environ.setdefault("LOCAL_RANK", str(rank))  # DeepSpeed's engines want it
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the benchmark's
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
    """ms of a turn that operators spend by themselves, by what they do; most of the rest waits for other ranks."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(turns):
            _turn(this, name)
    found = dict.fromkeys((*PROFILE, "rest"), 0.0)
    for event in profiler.key_averages():
        if not event.key.startswith("gloo:"):  # runs in a thread of its own while an operator waits
            kind = next((kind for kind, names in PROFILE.items() if event.key.startswith(names)), "rest")
            found[kind] += event.self_cpu_time_total / 1e3 / turns
    return {"side": name} | {f"{kind} ms": round(total, 1) for kind, total in found.items()}


def ratio(ours: list[float], base: list[float]) -> float:
    """Median over the pairs of how many times as long the base takes."""
    return round(statistics.median(b / m for b, m in zip(base, ours, strict=True)), 3)


def _rows(this: Comparison, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    base = next(iter(times.values()))
    return [
        {
            "side": name,
            "MB": round(this.sent(name) / 1e6, 2),
            "ms": round(statistics.median(ms), 2),
            "ratio": ratio(ms, base),
        }
        for name, ms in times.items()
    ]
