"""Tokens per second of the whole training step, stock DeepSpeed against ours: forward, loss, backward, optimizer step.

    python benchmarks/train_step.py --model llama --zero-stage 2 3 --ranks 2 --tokens 1024 --dtype fp32 [--json]

Two engines in one process group take steps in turns, and each pair starts with the other side. Both have the same small
model with the same weights, the same sequences, AdamW, the same ZeRO config, and transformers' sdpa on whole sequences. Each
stage has processes of its own. The table shows medians over the pairs with their quartiles; ratio is stock's time divided
by ours, pair by pair. Sharding the batch is not timed.

Stock is `deepspeed.initialize` with the mpu of DeepSpeed's sequence parallelism. Llama runs on `UlyssesSPAttentionHF`.
DeepSeek-V3, which that class refuses, runs on `DistributedAttention` with K and V of all heads, through transformers'
AttentionInterface. With --recompute, both sides are ours with gradient checkpointing: `recompute` recomputes whole layers,
the other side keeps attention. The loss of stock follows DeepSpeed's recipe: two all-gathers, one of the ranks' losses and one of their
numbers of tokens. Ours is `ds_mla_ulysses.initialize` and the loop of the README: one all-reduce for the number of tokens
and one for the loss.

The sides also differ in the scale of their gradients, which stock's mpu and loss change and ours do not. With clipping to a
norm of 1 and AdamW, the updates are the same. So the losses of both sides must agree in the first steps; otherwise the exit
status is 1. Stock's Llama gathers position ids in every layer. With gather_kv and head_tail, queries attend to the keys of
earlier ranks in flash blocks, where transformers' sdpa would compute all scores at once on a CPU if V is narrower than K.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pairs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_models import MODELS, STRATEGIES, build, materialise, tokens

if TYPE_CHECKING:
    from ds_mla_ulysses import Shard

CONFIGS = Path(__file__).parents[1] / "configs"
#: The largest relative difference of the losses in the first steps.
AGREE = {"fp32": 1e-4, "bf16": 2e-2}

#: Takes a shard, and returns the loss of the step over all ranks.
Step = Callable[["Shard"], float]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    from ds_mla_ulysses.integrations.deepspeed import load_config

    found = load_config([CONFIGS / f"zero{args.stage}.json", CONFIGS / "cpu.json"])
    found["bf16"] = {"enabled": args.dtype == "bf16"}
    found["train_micro_batch_size_per_gpu"] = found["gradient_accumulation_steps"] = 1
    found["optimizer"]["params"]["lr"] = 1e-3
    return found


def ours(args: argparse.Namespace, model: torch.nn.Module, recompute: str | None = None) -> tuple[Step, Any]:
    """A step, and the group that shards its batch. With --recompute, its layers are recomputed in backward."""
    import ds_mla_ulysses as dmu

    handle = dmu.parallelize(model, recompute=recompute, **STRATEGIES[args.strategy])
    if args.recompute is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = dmu.initialize(model=model, config=settings(args), handle=handle)

    def step(shard: Shard) -> float:
        num_items = handle.num_items([shard])
        logits = engine(**shard.inputs, use_cache=False).logits
        loss = handle.loss(logits, shard, num_items=num_items)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step, handle.group


def stock(args: argparse.Namespace, model: torch.nn.Module) -> Step:
    import deepspeed
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from deepspeed.utils import set_z3_leaf_modules_by_name
    from torch.distributed.nn.functional import all_gather

    from ds_mla_ulysses.integrations.deepspeed import without_cpu_extension

    if args.model == "llama":
        mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", args.ranks, micro_batch_size=1)
    else:
        mpu.initialize_sequence_parallel(args.ranks)
        materialise(model, mpu.get_sequence_parallel_group())
        if args.stage == 3:  # otherwise ranks that route to different experts wait for each other
            set_z3_leaf_modules_by_name(model, [n for n, _ in model.named_modules() if n.endswith(".experts")])
    with without_cpu_extension():
        engine, *_ = deepspeed.initialize(model=model, config=settings(args), mpu=mpu)
    group = mpu.get_sequence_parallel_group()

    def step(shard: Shard) -> float:
        ids, positions = shard.inputs["input_ids"], shard.inputs["position_ids"]
        logits = engine(input_ids=ids, position_ids=positions, use_cache=False).logits
        labels = shard.shift_labels.flatten()
        local = F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100)
        losses = all_gather(local, group=group)
        counts = all_gather((labels != -100).sum(), group=group)
        loss = sum(x * n for x, n in zip(losses, counts, strict=True)) / sum(counts)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and losses of both sides, step by step."""
    from deepspeed.utils import groups

    from ds_mla_ulysses.comm.group import SequenceGroup

    def new() -> torch.nn.Module:
        return build(args.model, pairs.DTYPES[args.dtype])

    if args.recompute is not None:
        both = {"recompute": ours(args, new()), args.recompute: ours(args, new(), args.recompute)}
        return timed(args, both)
    # Ours is built first: `initialize` removes its mpu from DeepSpeed again, but that of stock stays, and
    # UlyssesSPAttentionHF replaces transformers' sdpa, which our model has looked up by then.
    our_step, our_group = ours(args, new())
    assert groups.mpu is None
    both = {"stock": (stock(args, new()), SequenceGroup.of(dist.group.WORLD)), args.strategy: (our_step, our_group)}
    return timed(args, both)


def timed(args: argparse.Namespace, sides: dict[str, tuple[Step, Any]]) -> dict[str, Any]:
    """Seconds and losses of the sides, each a step and the group that shards its batch."""
    import deepspeed
    import transformers

    import ds_mla_ulysses as dmu

    steps, held = ({name: side[i] for name, side in sides.items()} for i in (0, 1))
    times: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for pair in range(pairs.WARMUP + args.pairs):
        batch = tokens(args.tokens, pair)
        for name in list(steps) if pair % 2 else reversed(steps):
            shard = dmu.shard_batch(batch, held[name])
            dist.barrier()
            begin = time.perf_counter()
            losses[name].append(steps[name](shard))
            dist.barrier()
            times[name].append(time.perf_counter() - begin)
    versions = {library.__name__: library.__version__ for library in (torch, deepspeed, transformers)}
    return {"seconds": {name: s[pairs.WARMUP :] for name, s in times.items()}, "losses": losses, "versions": versions}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return (values[0],) * 3
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, statistics.median(values), upper


def apart(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of the losses in the first steps; later ones drift apart by rounding."""
    stock, ours = (series[: pairs.WARMUP] for series in losses.values())
    return max(abs(a - b) / abs(a) for a, b in zip(stock, ours, strict=True))


def rows(args: argparse.Namespace, found: dict[str, Any]) -> list[dict[str, Any]]:
    seconds, base = found["seconds"], next(iter(found["seconds"].values()))
    table = []
    for name, ours in seconds.items():
        speed = [round(args.tokens / s) for s in reversed(quartiles(ours))]
        ratio = [round(r, 3) for r in quartiles([b / s for b, s in zip(base, ours, strict=True)])]
        row = {"zero": args.stage, "side": name, "tokens/s": speed[1], "q1": speed[0], "q3": speed[2]}
        row |= {"ms": round(1e3 * statistics.median(ours), 1), "ratio": ratio[1], "ratio q1": ratio[0]}
        table.append(row | {"ratio q3": ratio[2]})
    return table


def main() -> int:
    parser = pairs.common_options(__doc__)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--model", choices=MODELS, default="deepseek_v3")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), nargs="+", default=[2, 3])
    parser.add_argument("--strategy", choices=STRATEGIES, default="packed", help="our strategy")
    parser.add_argument(
        "--recompute",
        choices=("keep_attention", "keep_output"),
        help="compare ours under gradient checkpointing: whole layers recomputed, and layers that keep attention",
    )
    parser.set_defaults(tokens=1024)
    args = parser.parse_args()
    if args.ranks < 2 or args.pairs < 1:
        parser.error("wanted at least 2 ranks and 1 pair")
    if args.model == "llama" and "latent" in args.strategy:
        parser.error(f"--strategy {args.strategy} is for MLA only")
    if "RANK" in os.environ and len(args.zero_stage) > 1:
        parser.error("each stage needs new processes: give one --zero-stage if the ranks are started from outside")
    table, versions, losses = [], {}, {}
    for stage in args.zero_stage:
        args.stage = stage
        found = pairs.on_ranks(measure, args)
        far = apart(found["losses"])
        if not far <= AGREE[args.dtype]:
            print(
                f"ZeRO {args.stage}: losses of the sides differ by {far:.2e}: they do not train alike.", file=sys.stderr
            )
            return 1
        table += rows(args, found)
        versions, losses[stage] = found["versions"], found["losses"]
    if args.json:
        print(json.dumps({"rows": table, "losses": losses, "versions": versions} | vars(args)))
    else:
        pairs.print_table(table)
    return 0


if __name__ == "__main__":
    pairs.leave(main())
