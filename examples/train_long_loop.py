"""Trains on the longest sequence that fits into a given memory, with everything that makes sequences longer, in a loop.

deepspeed --num_gpus 2 examples/train_long_loop.py               # on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_long_loop.py --verify      # compares with plain transformers in one process
deepspeed --num_gpus 8 examples/train_long_loop.py --model PATH --memory 80 --host-memory 1900

It plans the length as `ds-mla-ulysses plan --memory` does, and prints what a step holds, planned and measured.
"""

import argparse
import os
import sys

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.longest_sequence import LongestSequence
from ds_mla_ulysses.small_models import small_model, text_windows
from ds_mla_ulysses.verify import run  # adds --verify and --json

CONFIG = os.path.join(os.path.dirname(__file__), "..", "configs", "zero3_long.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, ranks = parser.add_argument, int(os.environ.get("WORLD_SIZE", 1))
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="llama", help="name or folder; llama, deepseek_v3: small, random")
    add("--memory", type=float, help="GB of a GPU (80), or of a process on a CPU (0.02)")
    add("--host-memory", type=float, help="GB of all hosts together; no limit by default")
    add("--zero-stage", type=int, default=3)
    add("--seq-len", type=int, help="tokens of a sequence, instead of as many as fit")
    add("--steps", type=int, default=3)
    args = parser.parse_args()
    memory = {"memory": args.memory, "host_memory": args.host_memory, "stage": args.zero_stage}
    longest = LongestSequence(args.model, ranks, **memory, tokens=args.seq_len)
    sys.argv += ["--seq-len", str(longest.tokens)]  # for the one process of --verify
    windows = text_windows(args.model, longest.tokens)  # int64 [number of windows, tokens]: put your data here
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).train()
    handle = dmu.parallelize(model, **longest.settings)
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=longest.offloads)
    auto = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "lr": 1e-3}
    engine, *_ = dmu.initialize(model=model, config=longest.config(CONFIG), handle=handle, **auto)
    for step in range(args.steps):
        ids = windows[step].unsqueeze(0).to(engine.device)
        shard = handle.shard({"input_ids": ids, "labels": ids})
        with longest.peak:
            loss = handle.loss(engine(**shard.inputs).logits, shard)
            engine.backward(loss)
        engine.step()
        if handle.group.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if handle.group.rank == 0:
        print(longest.report())


if __name__ == "__main__":
    run(main)
