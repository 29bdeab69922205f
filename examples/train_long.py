"""Trains on the longest sequence that fits into a given memory, with everything that makes sequences longer.

deepspeed --num_gpus 2 examples/train_long.py               # with the Trainer, on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_long.py --loop        # in a loop
deepspeed --num_gpus 2 examples/train_long.py --verify      # compares with plain transformers in one process
deepspeed --num_gpus 8 examples/train_long.py --model PATH --memory 80 --host-memory 1900

It plans the length as `ds-mla-ulysses plan --memory` does, and prints the planned and the measured peak of a step. On a
CPU the memory is that of one process, and layer inputs have no other place to go.
"""

import argparse
import os
import sys

import torch
from accelerate.utils import ParallelismConfig
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM
from transformers.trainer import Trainer, TrainingArguments

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.hf.configs import find_model
from ds_mla_ulysses.planner.memory import GB, MLP_TILE, Machines, Setting, step_memory
from ds_mla_ulysses.small_models import small_model, text_windows
from ds_mla_ulysses.stored_bytes import PeakBytes
from ds_mla_ulysses.verify import run  # adds --verify and --json

ON_GPU, RANKS = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))


class Windows(Dataset):
    """The windows of a text as samples of a Trainer."""

    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[i], "labels": self.windows[i]}


class MeasuredTrainer(Trainer):
    """A Trainer that measures the peak of each step."""

    peak = PeakBytes()

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        with self.peak:
            return super().training_step(*args, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="llama", help="name or folder; llama, deepseek_v3: small, random")
    add("--memory", type=float, default=80.0 if ON_GPU else 0.2, help="GB of a GPU, or of a process")
    add("--host-memory", type=float, help="GB of all hosts together; no limit by default")
    add("--seq-len", type=int, help="a length instead of the longest that fits")
    add("--head-chunks", type=int, default=2)
    add("--zero-stage", type=int, default=3)
    add("--steps", type=int, default=3)
    add("--loop", action="store_true", help="train in a loop instead of with the Trainer")
    args = parser.parse_args()
    reserve = 5.0 if ON_GPU else 0.0
    machines = Machines(RANKS, RANKS, args.zero_stage, args.memory * GB, reserve * GB, (args.host_memory or 1e9) * GB)
    setting = Setting("everything", True, ON_GPU, ON_GPU, True, args.head_chunks)
    planned = step_memory(find_model(args.model), "packed", machines, setting)
    length = args.seq_len or RANKS * planned.longest(machines)[0]
    windows = text_windows(args.model, min(length, 100_000) if args.seq_len is None else length)
    length = windows.shape[1]
    # What makes sequences longer: these arguments, gradient checkpointing, and the host.
    settings = {"mlp_tile": MLP_TILE, "head_chunks": args.head_chunks}
    checkpointing = {"use_reentrant": False, "offload": ON_GPU}
    zero = {"stage": args.zero_stage, "stage3_gather_16bit_weights_on_model_save": True}
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if ON_GPU else {}
    train = in_a_loop if args.loop else with_the_trainer
    peak = train(args, windows, settings, checkpointing, zero)
    if peak is not None and int(os.environ.get("RANK", 0)) == 0:
        beside = planned.peak(length / RANKS) - planned.fixed
        print(f"{length} tokens, {RANKS} processes: a step holds {peak / GB:.4f} GB, planned {beside / GB:.4f} GB, beside")
        print(f"weights and optimizer, planned {planned.fixed / GB:.4f} GB")
