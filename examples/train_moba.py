"""Trains a model with Mixture of Block Attention, with DeepSpeed, over processes that share each sequence.

    deepspeed --num_gpus 2 examples/train_moba.py                                # GPUs, or processes on a CPU
    deepspeed --num_gpus 2 examples/train_moba.py --verify                       # against one process
    deepspeed --num_gpus 2 examples/train_moba.py --model deepseek_v3            # MLA
    deepspeed --num_gpus 4 examples/train_moba.py --sp-size 2 --strategy gather_kv
    deepspeed --num_gpus 2 examples/train_moba.py --full-layers -1 --full-after 0.9

As train_deepspeed.py, with whose options; only the model is another. A gate decides by the last bit between blocks of
nearly equal scores, so now and then --verify may find two runs apart that have no fault.
"""

from __future__ import annotations

import functools
import os
import sys

import torch
import train_deepspeed

import ds_mla_ulysses as dmu  # isort: skip  (train_deepspeed makes it known in a clone)
from common import SMALL


def main() -> int:
    parser = train_deepspeed.options(__doc__)
    add = parser.add_argument
    add("--model", default="llama", help=f"a small new {' or '.join(SMALL)} on bytes, or name or folder of any model")
    add("--block", type=int, default=32, help="tokens of a block (default 32)")
    add("--topk", type=int, default=3, help="blocks that a query attends to, its own counted (default 3)")
    add("--full-layers", type=int, nargs="*", default=(), help="layers with full attention, from the end if negative")
    add("--full-after", type=float, default=1.0, help="fraction of the steps after which attention is full everywhere")
    args = train_deepspeed.parse(parser)
    args.small = args.model
    if args.model in SMALL:
        args.model = None

    config = dmu.MoBAConfig(args.block, args.topk, full_attention_layers=args.full_layers)
    dmu.register_moba(config)
    build = functools.partial(train_deepspeed.build_model, attn_implementation="moba")

    schedule = dmu.FullAttentionCallback(args.full_after)  # of the Trainer; a loop asks it itself

    def before_step(model: torch.nn.Module, step: int) -> None:
        dmu.set_moba(model, schedule.runs_moba(step, args.steps))

    if os.environ.get("RANK", "0") == "0":
        print(f"MoBA: blocks of {args.block} tokens, {args.topk} for each query, its own one counted")
    return train_deepspeed.run(args, train_deepspeed.Recipe(build, before_step))


if __name__ == "__main__":
    sys.exit(main())
