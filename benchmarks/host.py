"""Time that the host spends on one attention layer: Python and the dispatch of operators, without communication.

    python benchmarks/host.py --ranks 8 --json

This process is one rank of a fake group, whose collectives move nothing, and the tensors are tiny, so that the time of
a layer is the time in which the host prepares it. `calls` counts the calls of Python functions whose code is in the
package. Times are medians over the repetitions, in microseconds.

Shape letters: T tokens of this rank · H query heads · G KV heads · N, R, K = N + R key widths · V value width · P = N + V
· L latent width.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pairs
import torch
import torch.distributed as dist
from torch import Tensor

T, H, G, N, R, V, L = 4, 16, 8, 4, 2, 4, 6
K, P = N + R, N + V


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--ranks", type=int, default=8)
    found.add_argument("--repetitions", type=int, default=300)
    found.add_argument("--json", action="store_true")
    return found


def fake_group(ranks: int) -> dist.ProcessGroup:
    """Returns a group of which this process is the middle rank, and whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=ranks // 2, world_size=ranks)
    return dist.group.WORLD


def layers(group: dist.ProcessGroup) -> dict[str, Callable[[], Tensor]]:
    """Returns the forward of one layer of each class, by name."""
    import ds_mla_ulysses as dmu

    def leaf(*shape: int) -> Tensor:
        return torch.randn(1, T, *shape, requires_grad=True)

    def core(q: Tensor, k: Tensor, v: Tensor, first_query: int = 0) -> Tensor:
        return Core.apply(q, k, v)

    def expand(latent: Tensor, heads: slice) -> Tensor:
        return latent[..., :1].unsqueeze(-1).expand(-1, -1, heads.stop - heads.start, P)

    widths = {"nope_dim": N, "rope_dim": R, "value_dim": V}
    packed = dmu.UlyssesMLAAttention(core, group, **widths)
    latent_kv = dmu.LatentKVMLAAttention(core, group, **widths)
    gather_kv = dmu.GatherKVMLAAttention(core, group, **widths)
    dense = dmu.UlyssesAttention(core, group)
    q, kv, latent, shared, k, v = leaf(H, K), leaf(H, P), leaf(L), leaf(R), leaf(G, K), leaf(G, V)
    return {
        "UlyssesMLAAttention": lambda: packed(q, kv, shared),
        "LatentKVMLAAttention": lambda: latent_kv(q, latent, shared, expand=expand),
        "GatherKVMLAAttention": lambda: gather_kv(q, latent, shared, expand=expand),
        "UlyssesAttention": lambda: dense(q, k, v),
    }


class Core(pairs.Core):
    """A stand-in for attention that costs the host little."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_zeros(*q.shape[:3], v.shape[3])


def package_calls(function: Callable[[], Any]) -> int:
    """Counts the calls of Python functions of the package that a function makes in this thread."""
    import ds_mla_ulysses

    folder, calls = str(Path(ds_mla_ulysses.__file__).parent), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def microseconds(function: Callable[[], Any], repetitions: int) -> float:
    found = []
    for _ in range(repetitions):
        begin = time.perf_counter_ns()
        function()
        found.append((time.perf_counter_ns() - begin) / 1000)
    return round(statistics.median(found), 1)


def measure(name: str, forward: Callable[[], Tensor], repetitions: int) -> dict[str, Any]:
    grad = torch.ones_like(forward())

    def both() -> None:
        forward().backward(grad)

    for _ in range(20):
        both()
    return {
        "class": name,
        "forward_us": microseconds(forward, repetitions),
        "both_us": microseconds(both, repetitions),
        "forward_calls": package_calls(forward),
        "both_calls": package_calls(both),
    }


def main() -> None:
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    found = layers(fake_group(arguments.ranks))
    rows = [measure(name, forward, arguments.repetitions) for name, forward in found.items()]
    if arguments.json:
        print(json.dumps({"rows": rows, "torch": torch.__version__} | vars(arguments)))
    else:
        pairs.print_table(rows)
    pairs.leave(0)


if __name__ == "__main__":
    main()
