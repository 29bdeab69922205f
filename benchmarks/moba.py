"""Compares MoBA with dense causal attention on a CPU: time and memory of forward and backward.

    python benchmarks/moba.py --tokens 4096 16384 65536 --block-size 512 --top-k 3 --threads 1 2

Both sides run in one process, alternating, and the fastest of several runs counts. Long dense steps are repeated less
often: see --seconds. Dense attention is torch's scaled_dot_product_attention, which calls torch's flash operator here.
Memory is the growth of the peak resident size of a fresh process, including inputs and gradients.

Letters: B batch · S tokens · D head width.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from ds_mla_ulysses.moba import moba_attention

SIDES = ("dense", "moba")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Step:
    """Forward and backward of one side. The inputs are [B, S, heads, D]."""

    def __init__(self, args: argparse.Namespace, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        shapes = [(1, tokens, heads, args.dim) for heads in (args.heads, args.kv_heads, args.kv_heads, args.heads)]
        *leaves, self.grad = (torch.randn(s, generator=generator).to(DTYPES[args.dtype]) for s in shapes)
        self.inputs = [x.requires_grad_() for x in leaves]
        self.block_size, self.top_k, self.grouped = args.block_size, args.top_k, args.heads != args.kv_heads

    def __call__(self, side: str) -> None:
        for x in self.inputs:
            x.grad = None
        if side == "moba":
            out = moba_attention(*self.inputs, self.block_size, self.top_k)
        else:
            q, k, v = (x.transpose(1, 2) for x in self.inputs)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped).transpose(1, 2)
        out.backward(self.grad)


def times(args: argparse.Namespace, tokens: int) -> dict[str, dict]:
    """Returns for each number of threads: milliseconds of both sides, their ratio, and the number of pairs."""
    step, found = Step(args, tokens), {}
    for threads in args.threads:
        torch.set_num_threads(threads)
        best, pairs, begin = dict.fromkeys(SIDES, float("inf")), 0, time.perf_counter()
        while pairs == 0 or (pairs < args.pairs and time.perf_counter() - begin < args.seconds):
            for side in SIDES:
                start = time.perf_counter()
                step(side)
                best[side] = min(best[side], 1e3 * (time.perf_counter() - start))
            pairs += 1
        found[str(threads)] = {side: round(ms, 1) for side, ms in best.items()} | {
            "ratio": round(best["dense"] / best["moba"], 2),
            "pairs": pairs,
        }
    return found


def memory(argv: list[str], tokens: int) -> dict[str, float]:
    """Returns the MiB of both sides, each measured in a fresh process."""
    found = {}
    for side in SIDES:
        command = [sys.executable, __file__, *argv, "--tokens", str(tokens), "--memory-of", side]
        found[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found | {"ratio": round(found["moba"] / found["dense"], 2)}


def peak() -> int:
    """Returns KiB. getrusage would not do: a process inherits its peak from its parent."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def print_memory(args: argparse.Namespace) -> None:
    torch.set_num_threads(max(args.threads))
    small = argparse.Namespace(**vars(args) | {"block_size": 64, "top_k": 3})
    Step(small, 512)(args.memory_of)  # libraries allocate their buffers in the first call
    before = peak()
    Step(args, args.tokens[0])(args.memory_of)
    print(round((peak() - before) / 1024, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--top-k", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="the number of heads by default")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=120, help="start no further pair after this time")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.kv_heads = args.kv_heads or args.heads
    if args.memory_of:
        return print_memory(args)
    argv = []
    for name in ("block_size", "top_k", "heads", "kv_heads", "dim", "dtype"):
        argv += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    rows = []
    for tokens in args.tokens:
        row = {"tokens": tokens, "ms": times(args, tokens)}
        if not args.no_memory:
            row["MiB"] = memory(argv, tokens)
        rows.append(row)
        if not args.json:
            for threads, ms in row["ms"].items():
                line = "dense {dense:9.1f} ms  moba {moba:9.1f} ms  {ratio:6.2f}x  ({pairs} pairs)".format(**ms)
                print(f"{tokens:7} tokens, {threads} threads: {line}", flush=True)
            if "MiB" in row:
                line = "dense {dense:7.1f} MiB  moba {moba:7.1f} MiB  {ratio:5.2f}x".format(**row["MiB"])
                print(f"{tokens:7} tokens, memory:    {line}", flush=True)
    if args.json:
        del args.memory_of
        print(json.dumps({"rows": rows, "torch": torch.__version__} | vars(args)))


if __name__ == "__main__":
    main()
