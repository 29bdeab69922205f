"""Supervised fine-tuning with TRL on packed documents, over sequences that several processes share.

deepspeed --num_gpus 2 examples/train_sft.py               # on GPUs, or on a CPU
deepspeed --num_gpus 2 examples/train_sft.py --verify      # compares with a plain SFTTrainer in one process
deepspeed --num_gpus 8 examples/train_sft.py --model PATH --sp-size 4 --seq-len 32768 --zero-stage 3 --lora
accelerate launch --config_file configs/accelerate_zero3_sp.yaml examples/train_sft.py
"""

import argparse
import os
import sys

import torch
from accelerate.utils import ParallelismConfig, set_seed
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))  # for a clone that is not installed
import ds_mla_ulysses as dmu
from ds_mla_ulysses.small_models import python_documentation, small_model
from ds_mla_ulysses.verify import run  # adds --verify and --json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, on_gpu = parser.add_argument, torch.cuda.is_available()
    add("--local_rank", help="set by the deepspeed launcher")
    add("--model", type=small_model, default="deepseek_v3", help="name or folder; deepseek_v3, llama: small, random")
    add("--lora", action="store_true", help="train adapters of the linear layers, not the model")
    add("--sp-size", type=int, default=int(os.environ.get("WORLD_SIZE", 1)), help="processes that share each sequence")
    add("--strategy", default="packed", help="packed, latent_kv, latent_qkv, gather_kv or auto")
    add("--zero-stage", type=int, default=2)
    add("--seq-len", type=int, default=511, help="tokens that documents are packed into")
    add("--steps", type=int, default=20)
    add("--output", default="checkpoints/sft", help="folder for the trained model or its adapters")
    args = parser.parse_args()
    dmu.install(strategy=args.strategy)
    extra = {"packing": True, "per_device_train_batch_size": 1, "bf16": on_gpu, "use_cpu": not on_gpu}
    if "WORLD_SIZE" in os.environ and "ACCELERATE_USE_DEEPSPEED" not in os.environ:  # or its config file says both
        auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
        zero = {"stage": args.zero_stage, "stage3_param_persistence_threshold": "auto"}
        zero["stage3_gather_16bit_weights_on_model_save"] = True  # for save_model
        auto |= {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": zero}
        extra["deepspeed"] = auto
        extra["parallelism_config"] = ParallelismConfig(sp_backend="deepspeed", sp_size=args.sp_size)
    training = SFTConfig(args.output, max_steps=args.steps, max_length=args.seq_len, logging_steps=1, **extra)
    model = AutoModelForCausalLM.from_pretrained(args.model)  # ZeRO-3 shards it here, after SFTConfig
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = Dataset.from_dict({"text": python_documentation()})
    adapters = LoraConfig(target_modules="all-linear") if args.lora else None
    set_seed(training.seed)  # for the adapters
    trainer = SFTTrainer(model, training, train_dataset=texts, processing_class=tokenizer, peft_config=adapters)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    run(main)
