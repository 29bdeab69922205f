"""Time of head and loss, or of norm and MLP with gradient checkpointing, in tiles of tokens against the same as a whole.

    python benchmarks/tiles.py --part loss [--tokens 2048] [--json]
    python benchmarks/tiles.py --part layer [--tile 512] [--json]

Tiles are local to a rank, so nothing is sent. Each side is forward and backward, the weights' gradients included.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import pairs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def compare(args: argparse.Namespace) -> pairs.Comparison:
    torch.manual_seed(0)
    x = torch.randn(1, args.tokens, args.width, dtype=pairs.DTYPES[args.dtype], requires_grad=True)
    return loss(args, x) if args.part == "loss" else layer(args, x)


def loss(args: argparse.Namespace, x: Tensor) -> pairs.Comparison:
    from ds_mla_ulysses.hf.lazy_logits import DeferredHead
    from ds_mla_ulysses.layout.tiled_loss import sum_of_cross_entropies

    head = nn.Linear(args.width, args.vocabulary, bias=False, dtype=x.dtype)
    labels = torch.randint(args.vocabulary, (args.tokens,))
    deferred = DeferredHead(copy.deepcopy(head), args.tile or "auto")

    def tiled() -> Tensor:
        deferred.begin(defers=True)
        logits = deferred(x)
        deferred.end()
        return sum_of_cross_entropies(logits, labels)

    sides = {"whole logits": lambda: sum_of_cross_entropies(head(x), labels), "tiled": tiled}
    return pairs.Comparison(sides, [x, *head.parameters(), *deferred.module.parameters()], torch.ones(()))


def layer(args: argparse.Namespace, x: Tensor) -> pairs.Comparison:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    from ds_mla_ulysses.hf.tiled_layers import tiled_forwards

    config = AutoConfig.for_model("llama", hidden_size=args.width, intermediate_size=7 * args.width // 2)
    whole: Any = nn.Sequential(LlamaRMSNorm(args.width), LlamaMLP(config)).to(x.dtype)
    whole.config = config
    tiled = copy.deepcopy(whole)
    for module, forward in tiled_forwards(tiled, args.tile or 512):
        module.forward = forward
    sides = {
        name: lambda model=model: checkpoint(model, x, use_reentrant=False)
        for name, model in (("whole", whole), ("tiled", tiled))
    }
    return pairs.Comparison(sides, [x, *whole.parameters(), *tiled.parameters()], torch.randn_like(x))


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.set_defaults(ranks=1, tokens=2048, pairs=7, dtype="fp32")
    parser.add_argument("--part", choices=("loss", "layer"), default="loss")
    parser.add_argument("--width", type=int, default=1024, help="the hidden width")
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument(
        "--tile", type=int, help="tokens of a tile (default: automatic for the loss, 512 for the layer)"
    )
    pairs.start(compare, parser.parse_args())


if __name__ == "__main__":
    main()
