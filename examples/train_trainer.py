"""Trains a causal language model with the Hugging Face Trainer on sequences that several processes share.

deepspeed --num_gpus 2 examples/train_trainer.py               # on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_trainer.py --verify      # compares with a plain Trainer in one process
deepspeed --num_gpus 8 examples/train_trainer.py --model PATH --sp-size 4 --seq-len 32768 --zero-stage 3
accelerate launch --config_file configs/accelerate_zero3_sp.yaml examples/train_trainer.py
"""

import argparse
import os
import sys

import torch
from accelerate.utils import ParallelismConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling
from transformers.trainer import Trainer, TrainingArguments

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.small_models import python_documentation, small_model
from ds_mla_ulysses.verify import run  # adds --verify and --json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, on_gpu = parser.add_argument, torch.cuda.is_available()
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="deepseek_v3", help="name or folder; deepseek_v3, llama: small, random")
    add("--attn", default="sdpa", help="the attention implementation")
    add("--sp-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="processes that share each sequence")
    add("--strategy", default="packed", help="packed, latent_kv, latent_qkv, gather_kv or auto")
    add("--zero-stage", type=int, default=2)
    add("--seq-len", type=int, default=512, help="tokens of the longest sample")
    add("--accumulation", type=int, default=1)
    add("--steps", type=int, default=50)
    add("--sp-in-eval", action="store_true", help="evaluation shares sequences too")
    add("--output", default="checkpoints/trainer", help="folder for the trained model")
    args = parser.parse_args()
    dmu.install(strategy=args.strategy, sp_in_eval=args.sp_in_eval)
    extra = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": args.accumulation, "bf16": on_gpu}
    if "WORLD_SIZE" in os.environ and "ACCELERATE_USE_DEEPSPEED" not in os.environ:  # or its config file says both
        auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        zero = {"stage": args.zero_stage, "stage3_param_persistence_threshold": "auto"}
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # for save_model
        auto |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero}
        extra["deepspeed"] = auto
        extra["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=args.sp_size)
    training = TrainingArguments(args.output, max_steps=args.steps, logging_steps=1, use_cpu=not on_gpu, **extra)
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation=args.attn)  # ZeRO-3 shards it here
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [text for page in python_documentation() for text in page.split("\n\n") if len(text) > 16]
    rows = [tokenizer(text, truncation=True, max_length=args.seq_len) for text in texts]
    trainer = Trainer(model, training, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows[64:], rows[:64])
    trainer.train()
    trainer.evaluate()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
