"""The cost of `checks`: every check of `ds_mla_ulysses/hf/checks.py`, "always" against "never", in a training step.

    python benchmarks/checks.py [--model llama] [--zero-stage 3] [--json]

One engine of one process group trains the small model of train_step.py in that benchmark's default step. A step here is the
whole loop, with sharding: `handle.shard`, `handle.num_items`, forward, `handle.loss`, backward with the check of its loss,
and the optimizer step. Steps with all checks and with none alternate. A single check costs less than steps vary, so the call
that contains it is also timed by itself, with and without it, in turns: cost_us is the median over the repeats of the
difference of two neighbouring turns, and percent is cost_us relative to the median step without checks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import pairs
import torch
import torch.distributed as dist
from small_models import MODELS, STRATEGIES, build, tokens
from train_step import quartiles, settings

SIDES = ("never", "always")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of steps and of single calls, by side."""
    import deepspeed
    import transformers

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.hf.checks import Checks

    model = build(args.model, pairs.DTYPES[args.dtype])
    handle = dmu.parallelize(model, **STRATEGIES[args.strategy])
    engine, *_ = dmu.initialize(model=model, config=settings(args), handle=handle)
    policies = {side: Checks(side) for side in SIDES}

    def step(number: int) -> None:
        shard = handle.shard(tokens(args.tokens, number))
        num_items = handle.num_items([shard])
        logits = engine(**shard.inputs, use_cache=False).logits
        engine.backward(handle.loss(logits, shard, num_items=num_items))
        engine.step()

    def turns(call: Callable[[int], Any], count: int) -> dict[str, list[float]]:
        """Seconds of the call with all checks and with none, the first side changing from turn to turn."""
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(pairs.WARMUP + count):
            for side in SIDES if turn % 2 else reversed(SIDES):
                handle.checks = policies[side]
                dist.barrier()
                begin = time.perf_counter()
                call(turn)
                seconds[side].append(time.perf_counter() - begin)
        return {side: found[pairs.WARMUP :] for side, found in seconds.items()}

    found = {"step": turns(step, args.pairs)}
    batch = tokens(args.tokens, 0)
    shard = handle.shard(batch)
    with torch.no_grad():
        logits = engine(**shard.inputs, use_cache=False).logits
    loss = handle.loss(logits, shard, num_items=args.tokens - 1)
    calls = {
        "batch": lambda _: handle.shard(batch),
        "labels": lambda _: handle.loss(logits, shard, num_items=args.tokens - 1),
        "loss": lambda _: handle.check_loss(loss),
    }
    found |= {name: turns(call, args.repeats) for name, call in calls.items()}
    versions = {library.__name__: library.__version__ for library in (torch, deepspeed, transformers)}
    return {"seconds": found, "versions": versions}


def rows(seconds: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """One row for each check and one for the whole step, in microseconds."""
    whole = 1e6 * statistics.median(seconds["step"]["never"])
    table = []
    for name, sides in seconds.items():
        costs = [1e6 * (with_checks - without) for without, with_checks in zip(*sides.values(), strict=True)]
        lower, cost, upper = quartiles(costs)
        medians = {f"{side}_us": round(1e6 * statistics.median(found), 1) for side, found in sides.items()}
        row = {"check": name} | medians | {"cost_us": round(cost, 1), "cost q1": round(lower, 1)}
        table.append(row | {"cost q3": round(upper, 1), "percent": round(100 * cost / whole, 3)})
    return table


def main() -> int:
    parser = pairs.common_options(__doc__)
    parser.add_argument("--pairs", type=int, default=21, help="steps of each side (default 21)")
    parser.add_argument(
        "--repeats", type=int, default=401, help="calls of each check, with and without it (default 401)"
    )
    parser.add_argument("--model", choices=MODELS, default="deepseek_v3")
    parser.add_argument("--zero-stage", dest="stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--strategy", choices=STRATEGIES, default="packed")
    parser.set_defaults(tokens=1024)
    args = parser.parse_args()
    if args.ranks < 2 or args.pairs < 1 or args.repeats < 1:
        parser.error("wanted at least 2 ranks, 1 pair and 1 repeat")
    found = pairs.on_ranks(measure, args)
    table = rows(found["seconds"])
    if args.json:
        print(json.dumps({"rows": table, "versions": found["versions"]} | vars(args)))
    else:
        pairs.print_table(table)
    return 0


if __name__ == "__main__":
    pairs.leave(main())
