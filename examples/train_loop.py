"""Trains a causal language model with DeepSpeed on sequences that several processes share.

deepspeed --num_gpus 2 examples/train_loop.py               # on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_loop.py --verify      # compares with plain transformers in one process
deepspeed --num_gpus 8 examples/train_loop.py --model PATH --sp-size 4 --seq-len 32768 --zero-stage 3
"""

import argparse
import os
import sys

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.small_models import small_model, text_windows
from ds_mla_ulysses.verify import run  # adds --verify and --json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="deepseek_v3", help="name or folder; deepseek_v3, llama: small, random")
    add("--sp-size", type=int, help="processes that share each sequence; all by default")
    add("--strategy", default="packed", help="packed, latent_kv, latent_qkv, gather_kv or auto")
    add("--zero-stage", type=int, default=2)
    add("--seq-len", type=int, default=512)
    add("--batch-size", type=int, default=4, help="sequences of an optimizer step; a multiple of the groups")
    add("--steps", type=int, default=50)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model).train()
    windows = text_windows(args.model, args.seq_len)  # int64 [number of windows, seq_len]: put your data here
    handle = dmu.parallelize(model, sp_size=args.sp_size, strategy=args.strategy)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.batch_size // handle.data_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": torch.cuda.is_available()},
    }
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    for step in range(args.steps):
        rows = torch.randint(len(windows), (args.batch_size,), generator=torch.Generator().manual_seed(step))
        local = windows[rows[handle.data_rank :: handle.data_size]].to(engine.device)  # each group trains on others
        shards = [handle.shard({"input_ids": ids, "labels": ids}) for ids in local.split(1)]
        num_items, total = handle.num_items(shards), 0.0
        for shard in shards:
            logits = engine(**shard.inputs).logits
            loss = handle.loss(logits, shard, num_items=num_items)
            engine.backward(loss)
            engine.step()
            total += loss.item() * handle.data_size
        if handle.data_rank == handle.group.rank == 0:
            print(f"step {step}: loss {total:.4f}", flush=True)


if __name__ == "__main__":
    run(main)
