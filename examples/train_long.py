"""Trains on the longest sequence that fits into a given memory, with everything that makes sequences longer.

deepspeed --num_gpus 2 examples/train_long.py               # on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_long.py --verify      # compares with plain transformers in one process
deepspeed --num_gpus 8 examples/train_long.py --model PATH --memory 80 --host-memory 1900

It plans the length as `ds-mla-ulysses plan --memory` does, and prints what a step holds, planned and measured.
"""

import argparse
import os
import sys

import torch
from accelerate.utils import ParallelismConfig
from transformers import AutoModelForCausalLM
from transformers.trainer import Trainer, TrainingArguments

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.longest_sequence import LongestSequence
from ds_mla_ulysses.small_models import small_model, text_windows
from ds_mla_ulysses.verify import run  # adds --verify and --json


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
    dmu.install(**longest.settings)
    config = longest.config(os.path.join(os.path.dirname(__file__), "../configs/zero3_long.json"))
    checkpointing = {"use_reentrant": False, "offload": longest.offloads}
    extra = {"activation_checkpointing": True, "activation_checkpointing_kwargs": checkpointing, "bf16": True}
    extra |= {"max_steps": args.steps, "logging_steps": 1, "save_strategy": "no", "use_cpu": not longest.offloads}
    extra |= {"per_device_train_batch_size": 1, "adam_beta2": 0.95, "weight_decay": 0.1}
    if ranks > 1:
        extra["deepspeed"] = config | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}
        extra["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=ranks)
    training = TrainingArguments("checkpoints/long", **extra)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)  # ZeRO-3 shards it here
    trainer = Trainer(model, training, train_dataset=[{"input_ids": x, "labels": x} for x in windows[: 4 * args.steps]])
    trainer.training_step = longest.peak.around(trainer.training_step)
    trainer.train()
    if trainer.is_world_process_zero():
        print(longest.report())


if __name__ == "__main__":
    run(main)
