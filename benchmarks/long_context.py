"""Bytes per local token that a training step holds, counted in the tensors of real models at their real widths.

    python benchmarks/long_context.py [--models llama-3-8b deepseek-v3] [--json] [--plot docs/images/long_context.png]

Nothing is computed and nothing is sent: the tensors are fake, and the process group is a fake one of --ranks ranks. The
model is a transformers model with one layer of a kind, made from the planner's preset and parallelized as users do it. A
mode sums the storages of all tensors that exist, wire buffers included. Each row has the slope between --tokens and twice
as many, in bytes per local token, the constant, and what the planner says (`ds-mla-ulysses plan --memory`).

| component            | what is counted                                                                                |
|----------------------|------------------------------------------------------------------------------------------------|
| dense layer          | peak of forward and backward of one layer with gradient checkpointing, beside weights, their    |
| layer with experts   | gradients and the layer's input                                                                |
| kept by a layer      | what each layer keeps on the GPU from forward to backward                                       |
| head and loss        | peak of the last norm with its input, head and loss, beside weights and their gradients         |

The local attention is a stand-in that holds what flash attention holds: queries, keys, values, output and fp32 row sums
are saved; backward makes three gradients and an fp32 sum of the queries' one. Host memory is what `save_on_cpu` moves,
which is then not counted.

Letters: B batch · M local heads · J local KV heads · S tokens of the whole sequence · K, V widths of keys and values.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pairs  # makes the package importable, and tells DeepSpeed that there is no GPU
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_mla_ulysses.planner.memory import (
    GB,
    MLP_TILE,
    Component,
    Machines,
    Setting,
    ladder,
    most_head_chunks,
    step_memory,
)
from ds_mla_ulysses.planner.models import PRESETS
from ds_mla_ulysses.planner.strategies import STRATEGIES
from ds_mla_ulysses.stored_bytes import StoredBytes

#: The model types of transformers to the planner's presets.
MODEL_TYPES = {
    "llama-3-8b": "llama",
    "qwen3-8b": "qwen3",
    "deepseek-v2-lite": "deepseek_v2",
    "glm-4.7-flash": "glm4_moe_lite",
    "deepseek-v3": "deepseek_v3",
}
#: The stand-in's name. The product passes documents to an attention whose name has "flash" in it as to flash attention.
ATTENTION = "flash_stand_in"


@dataclass(frozen=True)
class Peak:
    """What was counted.

    Attributes:
        tokens: local tokens.
        peak: the most bytes at a time.
        kept: bytes that exist between forward and backward.
        counted: the mode, for `at_peak`.
    """

    tokens: int
    peak: int
    kept: int
    counted: StoredBytes


class _Flash(torch.autograd.Function):
    """The tensors of flash attention: q_BMSK, k_BJSK, v_BJSV -> out_BSMV."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, M, S, _ = q.shape
        out, row_sums = q.new_empty(B, S, M, v.shape[-1]), q.new_empty(B, M, S, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, row_sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, *used = ctx.saved_tensors
        used.append(q.new_empty(q.shape, dtype=torch.float32))
        return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))


def flash_stand_in(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """An attention function as transformers calls it."""
    return _Flash.apply(query, key, value), None


class _End(nn.Module):
    """Takes the place of the last norm: a loss that holds nothing, whose gradient is as large as its input."""

    class _Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.shape = x.shape
            return x.new_empty(())

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.new_empty(ctx.shape)

    def forward(self, x: Tensor) -> Tensor:
        return self._Loss.apply(x)


class _Input(nn.Module):
    """Takes the place of layers: its result is counted, as the last layer's is."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x.clone()


class _OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Takes the place of torch's `save_on_cpu`: what it moves to the host is not counted."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"),
            lambda host: torch.empty(host.shape, dtype=host.dtype, device="cpu"),
        )


@contextlib.contextmanager
def fake_ranks(size: int, rank: int) -> Iterator[None]:
    """Inside the block, this process is one rank of a fake process group, and models can be measured.

    Functions of the product that compare values are replaced; the documents are then one sequence.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    import ds_mla_ulysses.comm.kept
    import ds_mla_ulysses.hf.parallelize
    import ds_mla_ulysses.hf.patch
    from ds_mla_ulysses.layout.documents import Documents

    def no_comparison(problem: Exception | None, settings: Any) -> None:
        if problem is not None:
            raise problem

    def one_document(positions: Any, mask: Any, shape: tuple[int, int], device: Any, group: Any, *_: Any) -> Any:
        B, T = shape
        starts = torch.zeros(B, T * group.size, dtype=torch.bool, device=device)
        positions_BS = torch.zeros(B, T * group.size, dtype=torch.long, device=device)
        return Documents(starts, None, positions_BS, [0]), torch.zeros(B, T, dtype=torch.long, device=device)

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, flash_stand_in)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    parallelizing = sys.modules["ds_mla_ulysses.hf.parallelize"]  # the package has a function of this name
    try:
        with (
            mock.patch.object(parallelizing, "_check_alike", no_comparison),
            mock.patch.object(ds_mla_ulysses.hf.patch, "gather_documents", one_document),
            mock.patch("transformers.modeling_utils.save_on_cpu", _OnHost),
            mock.patch.object(ds_mla_ulysses.comm.kept, "_random_states", lambda given: []),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def config_of(name: str, kinds: Sequence[str]) -> Any:
    """The transformers config of a preset with layers of the given kinds, "dense" before "sparse"."""
    from transformers import AutoConfig

    model, config = PRESETS[name], AutoConfig.for_model(MODEL_TYPES[name])
    w = model.widths
    values: dict[str, Any] = {
        "hidden_size": model.hidden,
        "num_hidden_layers": max(1, len(kinds)),
        "vocab_size": model.vocabulary,
        "intermediate_size": model.intermediate,
        "num_attention_heads": w.heads,
        "num_key_value_heads": getattr(w, "kv_heads", w.heads),
        "tie_word_embeddings": model.is_tied,
        "max_position_embeddings": 2**24,
    }
    if hasattr(w, "latent"):
        values |= {"kv_lora_rank": w.latent, "q_lora_rank": w.query_latent, "qk_nope_head_dim": w.nope}
        values |= {"qk_rope_head_dim": w.rope, "v_head_dim": w.value}
    else:
        values["head_dim"] = w.key
    if model.experts is not None:
        e = model.experts
        values |= {"n_routed_experts": e.count, "num_experts_per_tok": e.per_token, "moe_intermediate_size": e.width}
        values |= {"n_shared_experts": e.shared_width // e.width, "mlp_layer_types": list(kinds) or ["dense"]}
        values["first_k_dense_replace"] = kinds.count("dense")
    for key, value in values.items():
        setattr(config, key, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


def measure(
    name: str,
    kinds: Sequence[str],
    setting: Setting,
    tokens: int,
    *,
    has_head: bool = False,
    strategy: str = "packed",
    explains: bool = False,
) -> Peak:
    """Counts forward and backward of layers, or with `has_head` of a whole model, on this rank of `fake_ranks`.

    Args:
        kinds: "dense" or "sparse" for each layer; none for the head alone.
        setting: of the planner's ladder.
        tokens: of the whole sequence.
    """
    from transformers import AutoModelForCausalLM

    import ds_mla_ulysses as dmu
    from ds_mla_ulysses.layout.shard import LAYOUT, Shard, ShardLayout

    config, ranks = config_of(name, kinds), dist.get_world_size()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.config._attn_implementation_internal = ATTENTION
    model.config._experts_implementation_internal = "grouped_mm"
    handle = dmu.parallelize(
        model,
        strategy=strategy,
        head_chunks=setting.head_chunks,
        loss_tile="auto" if setting.tiles_loss else None,
        mlp_tile=MLP_TILE if setting.tiles_layers else None,
        recompute="keep_attention" if setting.keeps_attention else None,
        checks="never",
    )
    model.activation_checkpointing_enable({"use_reentrant": False}, offload=setting.offloads_inputs)
    if not has_head:
        model.model.norm = _End()
    if not kinds:
        model.model.layers = nn.ModuleList([_Input()])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        x = torch.empty(1, tokens // ranks, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.empty(x.shape[:2], dtype=torch.long)
        layout = ShardLayout("contiguous", ranks, dist.get_rank(), tokens)
        parameters = list(model.parameters())
        given = [x, labels, *parameters, *(p.grad for p in parameters if p.grad is not None)]
        with StoredBytes(given, opens=("ds_mla_ulysses",), explains=explains) as counted:
            if has_head:
                shard = Shard({}, labels, layout)
                loss = handle.loss(model(inputs_embeds=x, **{LAYOUT: layout}).logits, shard)
            else:
                loss = model.model(inputs_embeds=x, **{LAYOUT: layout}).last_hidden_state
            kept = counted.now
            loss.backward()
        return Peak(x.shape[1], counted.peak, kept, counted)


#: Bytes per local token, and bytes that do not depend on the length.
Line = tuple[float, float]


def line(tokens: Sequence[int], found: Sequence[float]) -> Line:
    """The line through the bytes at two numbers of local tokens."""
    slope = (found[1] - found[0]) / (tokens[1] - tokens[0])
    return slope, found[1] - slope * tokens[1]


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one model, for every setting of the ladder."""
    model, lengths = PRESETS[name], (args.tokens, 2 * args.tokens)
    kinds = {"dense layer": "dense"} | ({} if model.experts is None else {"layer with experts": "sparse"})
    rows = []
    chunks = min(args.head_chunks, most_head_chunks(model, args.strategy, args.ranks))
    for setting in ladder(chunks, ("inputs",)):
        print(f"counting {name}, {setting.name}", file=sys.stderr)
        planned = step_memory(model, args.strategy, Machines(args.ranks, args.ranks, 0, 80 * GB), setting)
        on_gpu = replace(setting, offloads_inputs=False)  # a layer's input is then given, and not counted

        def count(kinds: Sequence[str], of: str, setting: Setting, has_head: bool = False) -> Line:
            peaks = [measure(name, kinds, setting, n, has_head=has_head, strategy=args.strategy) for n in lengths]
            return line([peak.tokens for peak in peaks], [getattr(peak, of) for peak in peaks])

        def plan(component: Component, kept: float) -> Line:
            local = [n // args.ranks for n in lengths]
            return line(local, [component.largest(n).at(n) + kept * n for n in local])

        # The planner counts what is kept of attention for all layers together, but a layer that is counted alone has it.
        kept = planned.kept_by_layer if setting.keeps_attention else 0.0
        plans = {c.name: plan(c, kept if c.name in kinds else 0.0) for c in planned.components}
        found = {component: count([kind], "peak", on_gpu) for component, kind in kinds.items()}
        found["head and loss"] = count([], "peak", on_gpu, has_head=True)
        one, three = (count([*kinds.values()][-1:] * n, "kept", setting)[0] for n in (1, 3))
        found["kept by a layer"], plans["kept by a layer"] = ((three - one) / 2, 0.0), (planned.kept_by_layer, 0.0)
        rows += [
            {"model": name, "component": component, "setting": setting.name}
            | {"bytes_per_token": round(slope), "constant": round(constant)}
            | {"planned_per_token": round(plans[component][0]), "planned_constant": round(plans[component][1])}
            for component, (slope, constant) in found.items()
        ]
    return rows


def plot(path: str, rows: Sequence[dict[str, Any]], ranks: int) -> None:
    """The largest component of each model, with a bar for each setting."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        of_model, KB = bars.setdefault(row["model"], {}), row["bytes_per_token"] / 1e3
        of_model[row["setting"]] = max(KB, of_model.get(row["setting"], 0))
    title = f"The largest moment of a step, {ranks} ranks, bf16"
    pairs.save_bars(path, title, "KB per local token, beside what all layers keep", bars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODEL_TYPES, default=list(MODEL_TYPES))
    add("--ranks", type=int, default=8, help="that share a sequence (default %(default)s)")
    add("--tokens", type=int, default=2**19, help="of the shorter of both sequences (default %(default)s)")
    add("--strategy", choices=STRATEGIES, default="packed", help="(default %(default)s)")
    add("--head-chunks", type=int, default=4, help="of the setting head chunks (default %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--plot", metavar="FILE.png", help="draw the largest component of each model (needs matplotlib)")
    args = parser.parse_args()
    # The rank with the most to hold: the first has the most heads, the last one's queries see all keys.
    rank = 0 if STRATEGIES[args.strategy].exchanges_heads else args.ranks - 1
    with fake_ranks(args.ranks, rank):
        rows = [row for name in args.models for row in rows_of(name, args)]
    if args.plot:
        plot(args.plot, rows, args.ranks)
    if args.json:
        options = {"ranks": args.ranks, "tokens": args.tokens, "strategy": args.strategy}
        print(json.dumps({"rows": rows} | options | {"versions": {"torch": torch.__version__}}))
    else:
        pairs.print_table(rows)


if __name__ == "__main__":
    main()
