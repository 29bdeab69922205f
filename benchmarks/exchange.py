"""Time and bytes of one attention layer's exchange: three all-to-alls of materialised K against the packed one.

    python benchmarks/exchange.py --ranks 2 --preset deepseek-v2-lite --tokens 4096 --dtype bf16

Forward and backward of both sides run in one process group, alternating; medians of the pairs. The
core between the exchanges is a stand-in that reads q, k and v as they come and writes fresh gradients,
so what differs is what is sent and what is copied. Starts its own ranks (gloo, one thread each).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

#: heads, nope, rope and value widths
PRESETS = {
    "deepseek-v2-lite": (16, 128, 64, 128),
    "deepseek-v3": (128, 128, 64, 128),
    "kimi-k2": (64, 128, 64, 128),
    "glm-4.7-flash": (20, 192, 64, 256),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Core(torch.autograd.Function):
    """Reads q, k, v through their strides, as an attention kernel does; its gradients are new tensors."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        rows = q.flatten(2).sum(-1) + k.flatten(2).sum(-1)  # views: the heads of a token are adjacent on both sides
        return (v.flatten(2) + rows.unsqueeze(-1)).view(v.shape)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format).fill_(1e-3) for x in ctx.saved_tensors)


def run(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.integrations.deepspeed import _without_cpu_extension

    with _without_cpu_extension():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    H, N, R, V = PRESETS[args.preset]
    T, dtype = args.tokens // args.ranks, DTYPES[args.dtype]
    q, kv, shared = (torch.randn(1, T, *tail).to(dtype).requires_grad_() for tail in ((H, N + R), (H, N + V), (R,)))
    grad = torch.randn(1, T, H, V).to(dtype)
    stock = DistributedAttention(Core.apply, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    packed = dmu.UlyssesMLAAttention(Core.apply, dist.group.WORLD, nope_dim=N, rope_dim=R, value_dim=V)

    def three_all_to_alls():
        k = torch.cat([kv[..., :N], shared.unsqueeze(2).expand(-1, -1, H, -1)], dim=-1)
        return stock(q, k, kv[..., N:].contiguous(), 0)

    sides = {"three all-to-alls": three_all_to_alls, "packed": lambda: packed(q, kv, shared)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(args.pairs + 3):
        for name, side in sides.items():
            q.grad = kv.grad = shared.grad = None
            dist.barrier()
            begin = time.perf_counter()
            side().backward(grad)
            dist.barrier()
            if pair >= 3:
                times[name].append(1e3 * (time.perf_counter() - begin))
    with dmu.TrafficMeter() as meter:
        sides["packed"]().backward(grad)
    others = (args.ranks - 1) / args.ranks
    sent = {
        "three all-to-alls": 2 * T * H * (2 * (N + R) + 2 * V) * others * dtype.itemsize,
        "packed": meter.total_bytes,
    }
    if rank == 0:
        base = times["three all-to-alls"]
        rows = [
            {
                "side": name,
                "MB": round(sent[name] / 1e6, 2),
                "ms": round(statistics.median(ms), 2),
                "ratio": round(statistics.median(b / m for b, m in zip(base, ms, strict=True)), 3),
            }
            for name, ms in times.items()
        ]
        if args.json:
            print(
                json.dumps({"rows": rows, "torch": torch.__version__, "deepspeed": deepspeed.__version__} | vars(args))
            )
        else:
            for row in rows:
                print("{side:18} {MB:8.2f} MB sent {ms:9.2f} ms  {ratio:6.3f}x".format(**row))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--preset", choices=PRESETS, default="deepseek-v2-lite")
    parser.add_argument("--tokens", type=int, default=4096, help="of the whole sequence")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    mp.spawn(run, args=(arguments, tempfile.mktemp()), nprocs=arguments.ranks)
