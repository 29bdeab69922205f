"""Trains a model on text with the Hugging Face Trainer, over processes that share each sequence.

    deepspeed --num_gpus 2 examples/train_hf_trainer.py                 # GPUs, or processes on a CPU
    deepspeed --num_gpus 2 examples/train_hf_trainer.py --verify        # against a plain Trainer in one process
    deepspeed --num_gpus 4 examples/train_hf_trainer.py --sp-size 2 --zero-stage 3
    deepspeed --num_gpus 2 examples/train_hf_trainer.py --attn moba --full-after 0.9
    accelerate launch --config_file configs/accelerate_zero3_sp.yaml examples/train_hf_trainer.py
    python examples/train_hf_trainer.py                                 # a plain Trainer: one process, no DeepSpeed

By default the model is a new small DeepSeek-V3 and nothing is downloaded; --model takes a real one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # runs from a clone too

import common  # noqa: E402


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    common.add_parallel_options(parser)
    common.add_strategy_options(parser)
    add(
        "--attn",
        default="sdpa",
        help="attention implementation (default sdpa); moba: of blocks, see --block and --topk",
    )
    add("--block", type=int, default=32, help="with --attn moba: tokens of a block (default 32)")
    add("--topk", type=int, default=3, help="with --attn moba: blocks of a query, its own counted (default 3)")
    add("--full-after", type=float, default=1.0, help="with --attn moba: full attention from this fraction of steps on")
    add("--model", help="name or folder of a Hugging Face model; default: a small new DeepSeek-V3")
    add("--seq-len", type=int, default=257, help="tokens of the longest sample; others have down to half as many")
    add("--batch-size", type=int, default=2, help="sequences of a micro-batch (default 2)")
    add("--accumulation", type=int, default=1, help="micro-batches of an optimizer step (default 1)")
    add("--steps", type=int, default=50, help="optimizer steps (default 50)")
    add("--lr", type=float, help="learning rate; default 2e-3 (AdamW), with --verify 0.02 (SGD)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on GPUs")
    add("--seed", type=int, default=0)
    add("--sp-in-eval", action="store_true", help="evaluation shares sequences too")
    add("--verify", action="store_true", help="compare with one process (SGD, float32): exit code 1 if apart")
    add("--output", type=Path, default=Path("checkpoints/hf_trainer"), help="where the trained model is saved")
    add("--json", type=Path, metavar="FILE", help="write losses and what --verify measured")
    # With these, --verify starts the one process: where it writes, and the order in which the others read the samples.
    add("--one-process", type=Path, help=argparse.SUPPRESS)
    add("--order", type=int, nargs=2, metavar=("PROCESSES", "SP_SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.verify and args.dtype == "bfloat16":
        parser.error("--verify compares in float32")
    if args.verify and "WORLD_SIZE" not in os.environ and not args.one_process:
        parser.error("--verify needs several processes: start it by a launcher")
    args.lr = args.lr or (0.02 if args.verify else 2e-3)
    args.dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() and not args.verify else "float32")
    return args


def samples(tokenizer: Any, count: int, longest: int, seed: int) -> list[dict[str, list[int]]]:
    """Pieces of the Python documentation: from random places, of random lengths."""
    tokens = tokenizer("\n".join(common.documentation()))["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(longest // 2, longest + 1, (count,), generator=generator).tolist()
    starts = [int(torch.randint(len(tokens) - n + 1, (), generator=generator)) for n in lengths]
    return [{"input_ids": tokens[start : start + n]} for start, n in zip(starts, lengths, strict=True)]


def main() -> int:
    args = parse_args()
    if "WORLD_SIZE" in os.environ:  # under a launcher
        import ds_mla_ulysses

        ds_mla_ulysses.install(sp_in_eval=args.sp_in_eval, **common.strategy_of(args))
    callbacks = []
    if args.attn == "moba":  # in one process too
        import ds_mla_ulysses

        ds_mla_ulysses.register_moba(ds_mla_ulysses.MoBAConfig(args.block, args.topk))
        callbacks.append(ds_mla_ulysses.FullAttentionCallback(args.full_after))
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    side_by_side = args.order[0] // args.order[1] if args.order else 1  # micro-batches that one process reads in turn
    # Before the model: under ZeRO-3 from_pretrained then splits it over the processes as it loads it.
    training = TrainingArguments(
        output_dir=str(args.output),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulation * side_by_side,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        bf16=args.dtype == "bfloat16",
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),
        train_sampling_strategy="sequential",  # the samples are in random order
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=args.verify,
        # Clipping would hide a gradient of the wrong scale.
        **({"optim": "sgd", "max_grad_norm": 1e9} if args.verify else {}),
        **common.parallel_arguments(args),
    )
    if not args.model:
        args.model = str(args.output / "new")
        with training.main_process_first(local=False):
            if training.process_index == 0:
                common.save_small_model(args.output / "new", args.seed, args.seq_len)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation=args.attn
    )

    batch = args.batch_size * (args.order[0] if args.order else training.world_size)
    train = samples(tokenizer, args.steps * args.accumulation * batch, args.seq_len, args.seed)
    if args.order:
        train = [train[i] for i in order(args, *args.order)]
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=train,
        eval_dataset=samples(tokenizer, 2 * batch, args.seq_len, args.seed + 1),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=callbacks,
    )
    start = {name: p.detach().clone() for name, p in model.named_parameters()} if args.one_process else {}
    trainer.train()
    result = {key: [log[key] for log in trainer.state.log_history if key in log] for key in ("loss", "grad_norm")}
    result["eval_loss"] = [trainer.evaluate()["eval_loss"]]
    if args.one_process:
        assert ("ds_mla_ulysses" in sys.modules) == (args.attn == "moba") and not trainer.is_deepspeed_enabled
        torch.save({"curves": result, "start": start, "trained": dict(model.named_parameters())}, args.one_process)
    elif args.verify:
        result = verify(args, trainer, result)
    else:
        trainer.save_model()
    if args.json and trainer.is_world_process_zero():
        args.json.write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0 if result.get("equal", True) else 1


def order(args: argparse.Namespace, processes: int, sp_size: int) -> list[int]:
    """The samples in the order in which one process has to read them, to train on the same ones in each step.

    Accelerate gives batch `i` to process `i % processes`; those of a group train on theirs one after the other.
    """
    indices: list[int] = []
    for micro_batch in range(args.steps * args.accumulation):  # of each group
        turn, member = divmod(micro_batch, sp_size)
        for group in range(processes // sp_size):
            first = (turn * processes + group * sp_size + member) * args.batch_size
            indices.extend(range(first, first + args.batch_size))
    return indices


def verify(args: argparse.Namespace, trainer: Any, ours: dict[str, list[float]]) -> dict[str, Any]:
    """Trains the same model again with a plain Trainer in one new process, and compares on rank 0."""
    start = trained = None
    if trainer.is_world_process_zero():
        processes, sp_size = trainer.args.world_size, trainer.get_sp_size()
        options = {
            "--one-process": args.output / "one_process.pt",
            "--output": args.output / "one_process",
            "--model": args.model,
            "--attn": args.attn,
            "--block": args.block,
            "--topk": args.topk,
            "--full-after": args.full_after,
            "--seq-len": args.seq_len,
            "--batch-size": args.batch_size,
            "--accumulation": args.accumulation,
            "--steps": args.steps,
            "--lr": args.lr,
            "--seed": args.seed,
        }
        command = [sys.executable, __file__, *(str(word) for option in options.items() for word in option)]
        command += ["--verify", "--order", str(processes), str(sp_size)]
        subprocess.run(command, env=common.environment_of_one(), stdout=subprocess.DEVNULL, check=True)
        one = torch.load(options["--one-process"])
        start, trained = one["start"], one["trained"]
    to_norm, to_change = common.largest_differences(trainer.model, start, trained)
    said: list[Any] = [None]
    if trainer.is_world_process_zero():
        if sp_size == 1:
            ours.pop("eval_loss")  # transformers weights it otherwise on several processes
        pairs = {key.replace("_", " "): (one["curves"][key], ours[key]) for key in ours}
        worst = {key: common.report_curve(key, *pair, processes) for key, pair in pairs.items()}
        common.report_parameters(to_norm, to_change)
        worst |= {"parameter to norm": to_norm[0], "parameter to change": to_change[0]}
        equal = common.report_verdict(worst)
        said = [{**ours, "of_one": one["curves"], "largest_difference": worst, "equal": equal}]
    torch.distributed.broadcast_object_list(said)
    return said[0]


if __name__ == "__main__":
    sys.exit(main())
