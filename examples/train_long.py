"""Trains on the longest sequence that fits into a given memory, with everything that makes sequences longer.

deepspeed --num_gpus 2 examples/train_long.py               # with the Trainer, on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_long.py --loop        # in a loop
deepspeed --num_gpus 2 examples/train_long.py --verify      # compares with plain transformers in one process
deepspeed --num_gpus 8 examples/train_long.py --model PATH --memory 80 --host-memory 1900

It plans the length as `ds-mla-ulysses plan --memory` does, and prints how much a step holds, planned and measured. On a
CPU, the memory is that of one process, and layer inputs and the optimizer have no other place to go.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from accelerate.utils import ParallelismConfig
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
CONFIG, PEAK = Path(__file__).parents[1] / "configs" / "zero3_long.json", PeakBytes()


class MeasuredTrainer(Trainer):
    """A Trainer that measures what each step holds."""

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        with PEAK:
            return super().training_step(*args, **kwargs)


def with_the_trainer(args, samples, config, **settings) -> None:
    dmu.install(**settings)
    config |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}}  # these are TrainingArguments
    training = TrainingArguments(
        "checkpoints/long",
        max_steps=args.steps,
        logging_steps=1,
        per_device_train_batch_size=1,
        bf16=True,
        adam_beta2=0.95,
        weight_decay=0.1,
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": False, "offload": ON_GPU},
        save_strategy="no",
        use_cpu=not ON_GPU,
        deepspeed=config if RANKS > 1 else None,
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=RANKS) if RANKS > 1 else None,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)  # ZeRO-3 shards it here
    MeasuredTrainer(model, training, train_dataset=samples).train()


def in_a_loop(args, samples, config, **settings) -> None:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).train()
    handle = dmu.parallelize(model, **settings)
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=ON_GPU)
    auto = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "lr": 1e-3}
    engine, *_ = dmu.initialize(model=model, config=config, handle=handle, **auto)
    for step in range(args.steps):
        batch = {name: x.unsqueeze(0).to(engine.device) for name, x in samples[step].items()}
        shard = handle.shard(batch)
        with PEAK:
            loss = handle.loss(engine(**shard.inputs).logits, shard)
            engine.backward(loss)
        engine.step()
        if handle.group.rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="llama", help="name or folder; llama, deepseek_v3: small, random")
    add("--memory", type=float, default=80.0 if ON_GPU else 0.02, help="GB of a GPU, or of a process")
    add("--host-memory", type=float, default=1e6, help="GB of all hosts together; no limit by default")
    add("--seq-len", type=int, help="tokens of a sequence, instead of as many as fit")
    add("--head-chunks", type=int, default=2)
    add("--zero-stage", type=int, default=3)
    add("--steps", type=int, default=3)
    add("--loop", action="store_true", help="train in a loop instead of with the Trainer")
    args = parser.parse_args()
    machines = Machines(
        RANKS, RANKS, args.zero_stage, args.memory * GB, 5 * GB if ON_GPU else 0.0, args.host_memory * GB
    )
    setting = Setting("everything", True, ON_GPU, ON_GPU, tiles_layers=True, head_chunks=args.head_chunks)
    planned = step_memory(find_model(args.model), "packed", machines, setting)
    if args.seq_len is None:
        args.seq_len = RANKS * planned.longest(machines)[0]
        if not args.seq_len:
            parser.error(f"{args.memory} GB hold no token: weights and buckets alone take {planned.fixed / GB:.3g} GB")
        sys.argv += ["--seq-len", str(args.seq_len)]  # for the one process of --verify
    windows = text_windows(args.model, args.seq_len)[: 4 * args.steps]
    config = json.loads(CONFIG.read_text())
    config["zero_optimization"]["stage"] = args.zero_stage
    if not ON_GPU:  # the optimizer is on the host already, and DeepSpeed's for CPUs needs a compiler
        del config["zero_optimization"]["offload_optimizer"]
        config["optimizer"]["params"]["torch_adam"] = True
    samples = [{"input_ids": window, "labels": window} for window in windows]
    train = in_a_loop if args.loop else with_the_trainer
    train(args, samples, config, mlp_tile=MLP_TILE, head_chunks=args.head_chunks)
    if int(os.environ.get("RANK", 0)) == 0:
        step, fixed = planned.peak(args.seq_len / RANKS) - planned.fixed, planned.fixed
        print(f"{args.seq_len} tokens on {RANKS} processes; planned beside a step: {fixed / GB:.3g} GB")
        print(f"a step: {step / GB:.3g} GB planned (in bf16), {PEAK.bytes / GB:.3g} GB measured")


if __name__ == "__main__":
    run(main)
