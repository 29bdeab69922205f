"""Calls `install()` and then runs a training script.

    deepspeed --num_gpus 8 --module ds_mla_ulysses.run train.py --my-argument 1
    accelerate launch --config_file config.yaml --module ds_mla_ulysses.run train.py --my-argument 1
    torchrun --nproc-per-node 8 --module ds_mla_ulysses.run train.py --my-argument 1

`--sp-in-eval`, `--strategy`, `--split`, `--head-chunks`, `--loss-tile`, `--mlp-tile`, `--recompute` and `--checks` go in front
of the script and are
passed to `install`. With `-m`, the script is the name of a module.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from .integrations.install import install


def _tile(text: str) -> int | str | None:
    return {"auto": "auto", "none": None}[text] if text in ("auto", "none") else int(text)


def main(arguments: list[str]) -> None:
    """Calls `install` and runs the script as `__main__` with the arguments that follow it."""
    parser = argparse.ArgumentParser(prog="python -m ds_mla_ulysses.run", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--sp-in-eval", action="store_true", help="the ranks also share sequences in the evaluation of a Trainer"
    )
    parser.add_argument("--strategy", default="packed", help="how attention exchanges data, as for parallelize")
    parser.add_argument("--split", default="contiguous", help="which tokens each rank holds, as for parallelize")
    parser.add_argument(
        "--head-chunks", type=int, default=1, help="number of chunks of the local heads, as for parallelize"
    )
    parser.add_argument(
        "--loss-tile", type=_tile, default="auto", help="tokens of a tile of the loss, auto or none, as for parallelize"
    )
    parser.add_argument("--mlp-tile", type=int, help="tokens of a tile of norms, MLPs and experts, as for parallelize")
    parser.add_argument("--recompute", help="what gradient checkpointing keeps of attention, as for parallelize")
    parser.add_argument("--checks", default="always", help="when to run the checks that cost time, as for parallelize")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher puts it first
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to the script")
    args = parser.parse_args(arguments)
    launchers = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    install(
        sp_in_eval=args.sp_in_eval,
        strategy=args.strategy,
        split=args.split,
        head_chunks=args.head_chunks,
        loss_tile=args.loss_tile,
        mlp_tile=args.mlp_tile,
        recompute=args.recompute,
        checks=args.checks,
    )
    sys.argv = [args.script, *launchers, *args.arguments]
    if args.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(args.script)))  # as `python script.py` does
        runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
