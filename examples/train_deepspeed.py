"""Trains a DeepSeek-V3 on text, with DeepSpeed, over processes that share each sequence.

    deepspeed --num_gpus 2 examples/train_deepspeed.py                       # GPUs, or processes on a CPU
    deepspeed --num_gpus 2 examples/train_deepspeed.py --verify              # against one process
    deepspeed --num_gpus 4 examples/train_deepspeed.py --sp-size 2 --zero-stage 3
    torchrun --nproc-per-node 2 examples/train_deepspeed.py --steps 20 --save checkpoints
    torchrun --nproc-per-node 2 examples/train_deepspeed.py --steps 40 --resume checkpoints

The model is small and its tokens are bytes, so nothing is downloaded; --model takes a real one. Whatever the
number of processes and their groups, the same options train on the same text.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # runs from a clone too

import common  # noqa: E402  (first: it chooses DeepSpeed's accelerator)
import torch.distributed as dist  # noqa: E402
from tqdm import tqdm  # noqa: E402

import ds_mla_ulysses as dmu  # noqa: E402
from ds_mla_ulysses.integrations.deepspeed import load_config  # noqa: E402

Batch = dict[str, torch.Tensor]


def options(description: str | None) -> argparse.ArgumentParser:
    """Without --model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--local_rank", type=int, help="given by the deepspeed launcher")
    add("--text", type=Path, help="a text file; default: the Python documentation in the standard library")
    add("--sp-size", type=int, help="processes that share each sequence; default: all")
    common.add_strategy_options(parser)
    add("--seq-len", type=int, default=512)
    add("--batch-size", type=int, default=2, help="sequences of a micro-batch, over all groups (default 2)")
    add("--accumulation", type=int, default=1, help="micro-batches of an optimizer step (default 1)")
    add("--steps", type=int, help="optimizer steps, those before --resume included; default 50, with --verify 5")
    add("--lr", type=float, help="learning rate; default 2e-3 (AdamW), with --verify 0.02 (SGD)")
    add("--zero-stage", type=int, choices=range(4), default=2)
    add("--config", nargs="+", metavar="FILE", help="DeepSpeed configs in place of --zero-stage; later ones override")
    add("--dtype", choices=("float32", "bfloat16"), help="default: what the config says; float32 on a CPU")
    add("--seed", type=int, default=0)
    add("--save", type=Path, metavar="DIR", help="write a checkpoint after the last step")
    add("--resume", type=Path, metavar="DIR", help="continue from a checkpoint")
    add(
        "--universal",
        action="store_true",
        help="--resume was written by ds_to_universal",
    )
    add(
        "--verify",
        action="store_true",
        help="compare with one process (SGD, fp32, unclipped): exit code 1 if apart",
    )
    add("--json", type=Path, metavar="FILE", help="write losses and what --verify measured")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Defaults that depend on each other are filled in."""
    args = parser.parse_args()
    if args.verify and (args.resume or args.dtype == "bfloat16"):
        parser.error("--verify starts anew and in float32")
    args.steps = args.steps or (5 if args.verify else 50)
    args.lr = args.lr or (0.02 if args.verify else 2e-3)
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config; what it leaves "auto" is given to initialize."""
    configs = ROOT / "configs"
    files: list[Any] = args.config or [configs / f"zero{max(1, args.zero_stage)}.json"]
    if not args.config and args.zero_stage == 0:
        files.append({"zero_optimization": {"stage": 0}})
    if not torch.cuda.is_available():
        files.append(configs / "cpu.json")
    settings = load_config(files)
    if args.verify or args.dtype:
        settings["bf16"] = {"enabled": args.dtype == "bfloat16"}
    if args.verify:
        settings["optimizer"] = {"type": "SGD", "params": {"lr": "auto"}}
        settings["zero_allow_untested_optimizer"] = True
        settings["gradient_clipping"] = 0.0  # it would hide a gradient of the wrong scale
    if args.universal:
        settings["checkpoint"] = {"load_universal": True}
    return settings


def build_model(
    args: argparse.Namespace, dtype: torch.dtype, device: torch.device, attn_implementation: str | None = None
) -> torch.nn.Module:
    """The same weights in every process: those of --model, or new ones for `args.small`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(args.seed)
    given = {"dtype": dtype, "attn_implementation": attn_implementation}
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, **given)
    else:
        model = AutoModelForCausalLM.from_config(common.small_config(256, args.seq_len, args.small), **given)
    return model.to(device).train()


@dataclass(frozen=True)
class Recipe:
    """What is trained.

    Attributes:
        build: makes the model, with the same weights in every process.
        before_step: is called with the model and the number of each optimizer step before it.
    """

    build: Callable[[argparse.Namespace, torch.dtype, torch.device], torch.nn.Module]
    before_step: Callable[[torch.nn.Module, int], None] = lambda model, step: None


class Text:
    """Tokens of a text, and the windows of it that an optimizer step reads: a function of seed and step alone."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        if args.text:
            text = args.text.read_text(encoding="utf-8", errors="replace")
        else:
            text = "\n".join(common.documentation())
        if args.model:
            from transformers import AutoTokenizer

            tokens = AutoTokenizer.from_pretrained(args.model)(text)["input_ids"]
        else:
            tokens = list(text.encode())
        if len(tokens) < args.seq_len:
            raise SystemExit(f"the text has {len(tokens)} tokens, fewer than --seq-len {args.seq_len}.")
        self.tokens, self.device = torch.tensor(tokens), device
        self.seed, self.seq_len = args.seed, args.seq_len
        self.rows, self.accumulation = args.batch_size, args.accumulation
        checksum = zlib.crc32(self.tokens.numpy().tobytes())
        self.position = {"seed": args.seed, "seq_len": args.seq_len, "rows": self.rows, "tokens": checksum}
        self.position["accumulation"] = self.accumulation

    def step(self, step: int, data_rank: int = 0, data_size: int = 1) -> list[Batch]:
        """Micro-batches [B, S] of one step for one of `data_size` groups; together the groups read what one would."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last = len(self.tokens) - self.seq_len
        starts = torch.randint(last + 1, (self.accumulation, self.rows), generator=generator)
        mine = starts.chunk(data_size, dim=1)[data_rank]
        batches = []
        for row in mine.tolist():
            input_ids = torch.stack([self.tokens[start : start + self.seq_len] for start in row]).to(self.device)
            batches.append({"input_ids": input_ids, "labels": input_ids})
        return batches


def train(
    args: argparse.Namespace,
    model: torch.nn.Module,
    settings: dict[str, Any],
    text: Text,
    before_step: Callable[[torch.nn.Module, int], None],
) -> dict[str, Any]:
    """Trains over the processes of the job; returns losses and traffic."""
    handle = dmu.parallelize(model, sp_size=args.sp_size, **common.strategy_of(args))
    if args.batch_size % handle.data_size:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of the {handle.data_size} groups.")
    engine, *_ = dmu.initialize(
        model=model,
        config=settings,
        handle=handle,
        lr=args.lr,
        train_micro_batch_size_per_gpu=args.batch_size // handle.data_size,
        gradient_accumulation_steps=args.accumulation,
    )
    first = 0
    if args.resume:
        where, state = engine.load_checkpoint(str(args.resume))
        if where is None:
            raise SystemExit(f"there is no checkpoint in {args.resume}.")
        if state["text"] != text.position:
            raise SystemExit(f"the checkpoint was trained on other data: {state['text']}, here {text.position}.")
        first = state["step"]

    losses = []
    tokens = args.batch_size * args.seq_len * args.accumulation
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, unit="step", disable=dist.get_rank() != 0)
    with dmu.TrafficMeter() as meter:
        for step in bar:
            began, sent = time.perf_counter(), meter.total_bytes
            before_step(model, step)
            batches = text.step(step, handle.data_rank, handle.data_size)
            shards = [dmu.shard_batch(batch, handle.group) for batch in batches]
            num_items = handle.num_items(shards)
            total = torch.zeros((), device=text.device)
            for shard in shards:
                logits = engine(input_ids=shard["input_ids"], position_ids=shard["position_ids"]).logits
                loss = handle.loss(logits, shard["shift_labels"], num_items=num_items)
                total += loss.detach()
                engine.backward(loss)
                engine.step()
            # Each rank of a group has the group's loss; the losses of the groups sum to that of the step.
            dist.all_reduce(total)
            losses.append(total.item() / handle.group.size)
            per_token = (meter.total_bytes - sent) * dist.get_world_size() / tokens
            speed = tokens / (time.perf_counter() - began)
            bar.set_postfix_str(f"loss {losses[-1]:.4f}, {speed:,.0f} tokens/s, {per_token:,.0f} bytes sent/token")
        bar.close()
    if args.save:
        engine.save_checkpoint(str(args.save), client_state={"step": args.steps, "text": text.position})
    bytes_of = dict.fromkeys(("forward", "backward", "setup"), 0)
    for (_, direction), count in meter.bytes.items():
        bytes_of[direction] += count
    trained_tokens = max(1, args.steps - first) * tokens
    return {
        "losses": losses,
        "ranks": handle.group.size,
        "bytes_per_token": {name: n * dist.get_world_size() / trained_tokens for name, n in bytes_of.items()},
    }


def train_one(
    args: argparse.Namespace, model: torch.nn.Module, text: Text, before_step: Callable[[torch.nn.Module, int], None]
) -> list[float]:
    """The same steps by plain transformers and torch, in this process alone, without DeepSpeed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for step in tqdm(range(args.steps), unit="step", desc="one process"):
        losses.append(0.0)
        before_step(model, step)
        for batch in text.step(step):
            loss = model(**batch, use_cache=False).loss / args.accumulation
            losses[-1] += loss.item()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def verify(
    args: argparse.Namespace, settings: dict[str, Any], text: Text, dtype: torch.dtype, recipe: Recipe
) -> dict[str, Any]:
    """Trains over all processes and in one, compares on rank 0, prints the comparison there."""
    model = recipe.build(args, dtype, text.device)
    result = train(args, model, settings, text, recipe.before_step)
    is_first = dist.get_rank() == 0
    start = trained = None
    if is_first:
        plain = recipe.build(args, dtype, text.device)
        start = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
        result["losses_of_one"] = train_one(args, plain, text, recipe.before_step)
        trained = dict(plain.named_parameters())
    to_norm, to_change = common.largest_differences(model, start, trained)
    verdict = [True]
    if is_first:
        verdict = [report(result, model.config, dtype, to_norm, to_change)]
    dist.broadcast_object_list(verdict)
    return {**result, "equal": verdict[0]}


def report(
    result: dict[str, Any], config: Any, dtype: torch.dtype, to_norm: common.Worst, to_change: common.Worst
) -> bool:
    """Prints the comparison; whether nothing differs by more than the tolerance."""
    of_losses = common.report_curve("loss", result["losses_of_one"], result["losses"], dist.get_world_size())
    common.report_parameters(to_norm, to_change)

    ranks, layers, size = result["ranks"], config.num_hidden_layers, torch.finfo(dtype).bits // 8
    sent = sum(result["bytes_per_token"][name] for name in ("forward", "backward")) / layers
    three = 2 * size * common.attention_width(config) * (ranks - 1) / ranks  # forward and backward
    print(f"\nsent per token and layer, forward and backward: {sent:,.0f} bytes (measured)")
    if three > sent:
        print(
            f"materialised Q, K, V by three all-to-alls:      {three:,.0f} bytes ({1 - sent / three:.1%} of it saved)"
        )
    worst = {"loss": of_losses, "parameter_to_norm": to_norm[0], "parameter_to_change": to_change[0]}
    result.update(largest_difference=worst, sent=sent, sent_by_three_all_to_alls=three)
    return common.report_verdict(worst)


def run(args: argparse.Namespace, recipe: Recipe) -> int:
    """Trains, or verifies; the exit code."""
    local_rank = int(os.environ.setdefault("LOCAL_RANK", str(args.local_rank or 0)))  # DeepSpeed wants it set
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    import deepspeed  # noqa: F401  (so that its logger exists)

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    settings = settings_of(args)
    dtype = torch.bfloat16 if settings.get("bf16", {}).get("enabled") else torch.float32
    text = Text(args, device)
    if args.verify:
        result = verify(args, settings, text, dtype, recipe)
    else:
        result = train(args, recipe.build(args, dtype, device), settings, text, recipe.before_step)
    if dist.get_rank() == 0:
        if args.json:
            args.json.write_text(json.dumps(result))
        if not args.verify and result["losses"]:
            print(f"loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}")
    dist.barrier()
    dist.destroy_process_group()
    return 0 if result.get("equal", True) else 1


def main() -> int:
    parser = options(__doc__)
    parser.add_argument(
        "--model", help="name or folder of a Hugging Face model; default: a small new DeepSeek-V3 on bytes"
    )
    args = parse(parser)
    args.small = "deepseek_v3"
    return run(args, Recipe(build_model))


if __name__ == "__main__":
    sys.exit(main())
