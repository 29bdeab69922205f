"""Trains a model with Mixture of Block Attention (MoBA) on sequences that all processes share.

    deepspeed --num_gpus 2 examples/train_moba.py               # on GPUs, or on a CPU
    deepspeed --num_gpus 2 examples/train_moba.py --verify      # compares with one process
    deepspeed --num_gpus 2 examples/train_moba.py --model deepseek_v3 --full-layers -1 --full-after 0.9

If two blocks have the same score up to rounding, --verify can choose another one than the run over several processes.
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
    add("--model", type=small_model, default="llama", help="name or folder; deepseek_v3, llama: small, random")
    add("--block-size", type=int, default=32, help="tokens of a block")
    add("--top-k", type=int, default=3, help="blocks that a query attends to, including the block that it is in")
    add("--full-layers", type=int, nargs="*", default=(), help="layers with full attention; negative: from the end")
    add("--full-after", type=float, default=1.0, help="fraction of the steps after which all layers attend fully")
    add("--strategy", default="packed", help="packed, latent_kv, latent_qkv, gather_kv or auto")
    add("--split", default="contiguous", help="contiguous, or head_tail for gather_kv")
    add("--head-chunks", type=int, default=1)
    add("--zero-stage", type=int, default=2)
    add("--seq-len", type=int, default=512)
    add("--steps", type=int, default=50)
    args = parser.parse_args()
    dmu.register_moba(dmu.MoBAConfig(args.block_size, args.top_k, full_attention_layers=args.full_layers))
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="moba").train()
    windows = text_windows(args.model, args.seq_len)  # int64 [number of windows, seq_len]: put your data here
    schedule = dmu.FullAttentionCallback(args.full_after)  # a Trainer takes it in `callbacks`
    handle = dmu.parallelize(model, strategy=args.strategy, split=args.split, head_chunks=args.head_chunks)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": torch.cuda.is_available()}}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config["zero_optimization"] = {"stage": args.zero_stage}
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle)
    for step in range(args.steps):
        dmu.set_moba(model, schedule.runs_moba(step, args.steps))
        ids = windows[torch.randint(len(windows), (2,), generator=torch.Generator().manual_seed(step))]
        shard = handle.shard({"input_ids": ids.to(engine.device), "labels": ids.to(engine.device)})
        loss = handle.loss(engine(**shard.inputs).logits, shard)
        engine.backward(loss)
        engine.step()
        if handle.group.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    run(main)
