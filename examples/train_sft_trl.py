"""Supervised fine-tuning with TRL on packed documents, over processes that share each sequence.

    deepspeed --num_gpus 2 examples/train_sft_trl.py                    # GPUs, or processes on a CPU
    deepspeed --num_gpus 4 examples/train_sft_trl.py --sp-size 2 --lora --zero-stage 3
    accelerate launch --config_file configs/accelerate_zero3_sp.yaml examples/train_sft_trl.py

By default the model is a new small DeepSeek-V3 and nothing is downloaded; --model takes a real one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(path) for path in (Path(__file__).resolve().parents[1], Path(__file__).resolve().parent)]

import common  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    common.add_parallel_options(parser)
    add("--model", help="name or folder of a Hugging Face model; default: a small new DeepSeek-V3")
    add("--lora", action="store_true", help="train adapters of the linear layers, not the model")
    add("--max-length", type=int, default=511, help="tokens that documents are packed into (default 511)")
    add("--steps", type=int, default=20, help="optimizer steps (default 20)")
    add("--lr", type=float, default=2e-3)
    add("--output", type=Path, default=Path("checkpoints/sft_trl"), help="where the trained model is saved")
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:  # under a launcher
        import ds_mla_ulysses

        ds_mla_ulysses.install()

    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    # Before the model: under ZeRO-3 from_pretrained then splits it over the processes as it loads it.
    on_gpu = torch.cuda.is_available()
    training = SFTConfig(
        output_dir=str(args.output),
        packing=True,  # documents attend to themselves only, whichever the attention implementation
        max_length=args.max_length,
        per_device_train_batch_size=1,
        max_steps=args.steps,
        learning_rate=args.lr,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        **common.parallel_arguments(args),
    )
    if not args.model:
        args.model = str(args.output / "new")
        with training.main_process_first(local=False):
            if training.process_index == 0:
                common.save_small_model(args.output / "new", training.seed, args.max_length)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16 if on_gpu else torch.float32),
        args=training,
        train_dataset=Dataset.from_dict({"text": common.documentation()}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(target_modules="all-linear") if args.lora else None,
    )
    trainer.train()
    trainer.save_model()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
