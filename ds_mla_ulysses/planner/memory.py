"""What a training step holds on each GPU, and the longest sequence that fits: numbers only, nothing runs.

A step is planned for bf16 with gradient checkpointing of each layer and an attention that never holds scores. Its peak is

    fixed + layer inputs + the largest phase

where `fixed` does not depend on the length (parameters, gradients, optimizer), the layer inputs are what checkpointing
keeps of every layer, and a phase is a moment of the backward of one layer, or of head and loss, with everything that
exists then. Every phase is a number of bytes per local token and a constant. `benchmarks/long_context.py` counts the same
bytes in the tensors of a real step.

Letters, of widths: D hidden · F intermediate of the MLP · f of an expert · k experts of a token · V vocabulary · H query
heads · G KV heads · K query and key width · L, Q latent widths · R width of the RoPE key. n is the number of ranks that
share a sequence.

An RMSNorm of transformers saves its input in fp32 and once more normalised in bf16, 6D bytes, beside its output, 2D. Its
backward works on five tensors in fp32, 20D bytes, beside the saved 4D. In tiles, it saves its input in bf16, and its
backward makes the input's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import UlyssesValueError
from ..layout.tiled_loss import tokens_of_tile
from ..layout.widths import HeadWidths, MLAWidths
from .models import Model
from .strategies import STRATEGIES
from .strategies.base import BF16, FP32
from .work import Work

GB = 1e9
#: DeepSpeed's reduce_bucket_size and stage3_prefetch_bucket_size in configs/zero3_long.json, in elements. A bucket of
#: gradients is held twice, as sent and as reduced. No bucket is larger than the model.
_BUCKET, _PREFETCHED = 50_000_000, 50_000_000
#: Tokens of a tile of norms, MLPs and experts (`mlp_tile`) in the ladder.
MLP_TILE = 8192
#: Adam and the master weights in fp32.
_OPTIMIZER = 3 * FP32


@dataclass(frozen=True)
class Setting:
    """One rung of the ladder: what a step does to hold less.

    Attributes:
        name: for the table.
        tiles_loss: whether logits are made a tile of tokens at a time (`loss_tile`).
        offloads_inputs: whether layer inputs are kept on the host.
        offloads_optimizer: whether the optimizer is kept on the host.
        tiles_layers: whether norms, MLPs and experts run a tile of tokens at a time (`mlp_tile`).
        head_chunks: see `parallelize`.
        keeps_attention: whether attention and its exchanges are kept instead of recomputed (`recompute`).
    """

    name: str
    tiles_loss: bool = False
    offloads_inputs: bool = False
    offloads_optimizer: bool = False
    tiles_layers: bool = False
    head_chunks: int = 1
    keeps_attention: bool = False


@dataclass(frozen=True)
class Phase:
    """A moment at which memory may be at its peak.

    Attributes:
        name: for tables.
        per_token: bytes per local token.
        constant: bytes that do not depend on the length.
        per_tile_token: bytes for each token of a tile.
        tile: tokens of a tile.
    """

    name: str
    per_token: float
    constant: float = 0.0
    per_tile_token: float = 0.0
    tile: int = 0

    def at(self, tokens: float) -> float:
        """Bytes with so many local tokens."""
        return self.per_token * tokens + self.constant + self.per_tile_token * min(tokens, self.tile)

    def tokens_in(self, free: float, beside: float) -> float:
        """The local tokens with which the phase takes `free` bytes, and `beside` bytes for each of them."""
        with_whole_tile = (free - self.constant - self.per_tile_token * self.tile) / (beside + self.per_token)
        if with_whole_tile >= self.tile:
            return with_whole_tile
        return (free - self.constant) / (beside + self.per_token + self.per_tile_token)


@dataclass(frozen=True)
class Machines:
    """The GPUs of a job and how DeepSpeed shares the model among them.

    Attributes:
        gpus: of the whole job; all of them share parameters, gradients and optimizer, as far as the stage says.
        ranks: GPUs that share a sequence.
        stage: of ZeRO, 0 to 3.
        memory: bytes of a GPU.
        reserve: bytes of a GPU for everything that is not counted: CUDA's context, NCCL's buffers, fragmentation.
        host_memory: bytes of all hosts together; None if it is no limit.
    """

    gpus: int
    ranks: int
    stage: int
    memory: float
    reserve: float = 5 * GB
    host_memory: float | None = None


@dataclass(frozen=True)
class Component:
    """A part of the model with its phases, of which one at a time exists."""

    name: str
    phases: Sequence[Phase]

    def largest(self, tokens: float) -> Phase:
        """The phase that holds the most with so many local tokens."""
        return max(self.phases, key=lambda phase: phase.at(tokens))


@dataclass(frozen=True)
class StepMemory:
    """What a training step holds under one setting.

    Attributes:
        setting: the rung of the ladder.
        fixed: bytes on each GPU that do not depend on the length.
        kept_by_layer: bytes per local token that each layer keeps on the GPU for backward.
        layers: the number of layers.
        returned: bytes per local token that come back from the host for the layer that runs.
        components: the layers and the head; the largest phase of all of them is part of the peak.
        host_fixed: bytes on all hosts together that do not depend on the length.
        host_kept: bytes on all hosts together for each local token.
    """

    setting: Setting
    fixed: float
    kept_by_layer: float
    layers: int
    returned: float
    components: Sequence[Component]
    host_fixed: float
    host_kept: float

    @property
    def kept(self) -> float:
        """Bytes per local token of what layers keep and of what came back from the host."""
        return self.layers * self.kept_by_layer + self.returned

    def largest(self, tokens: float) -> tuple[Component, Phase]:
        """The component and its phase at the peak."""
        found = [(component, component.largest(tokens)) for component in self.components]
        return max(found, key=lambda pair: pair[1].at(tokens))

    def peak(self, tokens: float) -> float:
        """Bytes on a GPU with so many local tokens."""
        return self.fixed + self.kept * tokens + self.largest(tokens)[1].at(tokens)

    def host(self, tokens: float) -> float:
        """Bytes on all hosts together with so many local tokens."""
        return self.host_fixed + self.host_kept * tokens

    def longest(self, machines: Machines) -> tuple[int, str]:
        """Returns the most local tokens that fit, 0 if not even one does, and what limits them."""
        free = machines.memory - machines.reserve - self.fixed
        phases = [phase for component in self.components for phase in component.phases]
        limits = [(phase.tokens_in(free, self.kept), "GPU memory") for phase in phases]
        if machines.host_memory is not None:
            free_host = machines.host_memory - self.host_fixed
            if free_host < 0:
                limits.append((0.0, "host memory"))
            elif self.host_kept:
                limits.append((free_host / self.host_kept, "host memory"))
        tokens, limit = min(limits)
        return max(0, math.floor(tokens)), limit


def ladder(head_chunks: int, offload: Sequence[str] = ("optimizer", "inputs")) -> list[Setting]:
    """Returns the settings from the plain step on. Each does what the one before it does, and one thing more.

    The last one is an exception: attention cannot be kept in chunks, so it does what "tiled layers" does. It takes less
    time than the others, and more memory.

    Args:
        head_chunks: of the rung "head chunks", which is left out if this is 1.
        offload: what the rung "offload" moves to the host.
    """
    tiled = Setting("tiled loss", tiles_loss=True)
    moved = replace(
        tiled, name="offload", offloads_inputs="inputs" in offload, offloads_optimizer="optimizer" in offload
    )
    layers = replace(moved, name="tiled layers", tiles_layers=True)
    return [
        Setting("as it is"),
        tiled,
        *([moved] if offload else []),
        layers,
        *([replace(layers, name="head chunks", head_chunks=head_chunks)] if head_chunks > 1 else []),
        replace(layers, name="keep_attention", keeps_attention=True),
    ]


def most_head_chunks(model: Model, strategy: str, ranks: int) -> int:
    """Returns the most head chunks that a strategy can have: one for each head that every rank attends with."""
    heads = model.widths.heads
    return heads // ranks if STRATEGIES[strategy].exchanges_heads else heads


def step_memory(model: Model, strategy: str, machines: Machines, setting: Setting) -> StepMemory:
    """Returns what a step holds.

    ZeRO shares the optimizer from stage 1 on, gradients from stage 2 on and parameters from stage 3 on. At stage 3, one
    layer is whole at a time, or the head, beside a bucket that is fetched ahead; from stage 2 on the gradients of one
    layer exist before they are shared. An optimizer on the host takes the shares of gradients along, in bf16 and for its
    step in fp32.

    Raises:
        ValueError: the strategy or the setting is impossible.
    """
    refused = STRATEGIES[strategy].refused(Work(model.widths, machines.ranks, 0))
    if refused is not None:
        raise UlyssesValueError(f"strategy {strategy!r} is impossible: {refused}.")
    most = most_head_chunks(model, strategy, machines.ranks)
    if setting.head_chunks > most:
        raise UlyssesValueError(
            f"--head-chunks {setting.head_chunks} must be at most {most}, the fewest heads that a rank attends with."
        )
    if setting.offloads_optimizer and machines.stage == 0:
        raise UlyssesValueError("ZeRO 0 cannot keep the optimizer on the host: choose a stage from 1 to 3.")
    P, stage, moved = model.parameters, machines.stage, setting.offloads_optimizer
    share = P / machines.gpus
    bucket, prefetched = min(_BUCKET, P), min(_PREFETCHED, P)
    fixed = BF16 * (P if stage < 3 else share) + 2 * BF16 * bucket
    fixed += BF16 * P if stage < 2 else 0 if moved else BF16 * share
    fixed += 0 if moved else _OPTIMIZER * (P if stage < 1 else share)

    components = []
    for name, has_experts, layers, of_mlp in (
        ("dense layer", False, model.dense_layers, model.mlp_parameters),
        ("layer with experts", True, model.layers - model.dense_layers, model.expert_parameters),
    ):
        if layers:
            of_layer = BF16 * (model.attention_parameters + of_mlp)
            whole = of_layer + BF16 * prefetched if stage == 3 else 0
            phases = layer_phases(model, has_experts, strategy, machines.ranks, setting)
            # In tiles, the gradients of the weights are part of the phases.
            gradients = [0 if stage < 2 else of_layer - (BF16 * of_mlp if p.tile else 0) for p in phases]
            components.append(
                Component(
                    name, [replace(p, constant=p.constant + whole + g) for p, g in zip(phases, gradients, strict=True)]
                )
            )
    of_head = BF16 * model.head_parameters if stage == 3 else 0
    phases = [replace(p, constant=p.constant + of_head) for p in head_phases(model, setting)]
    components.append(Component("head and loss", phases))

    of_input = BF16 * model.hidden
    held = STRATEGIES[strategy].held(model.widths, machines.ranks, setting.head_chunks)
    return StepMemory(
        setting,
        fixed,
        (0.0 if setting.offloads_inputs else of_input) + (held.kept if setting.keeps_attention else 0.0),
        model.layers,
        of_input if setting.offloads_inputs else 0.0,
        components,
        (_OPTIMIZER + BF16 + FP32) * P if moved else 0.0,
        machines.gpus * model.layers * of_input if setting.offloads_inputs else 0.0,
    )


def layer_phases(model: Model, has_experts: bool, strategy: str, ranks: int, setting: Setting) -> list[Phase]:
    """Returns the phases of the backward of one layer, recomputation included; without the layer's input.

    In all of them exist the gradient of the layer's output, 2D, RoPE's cosines and sines, and where documents begin, 9n.
    Until the backward of the first norm there are also what that norm saved, its output, 2D, and what the projections
    saved.

    A tile of an MLP or of experts exists beside the second norm's input and output, 2D each, the gradient of the input
    of the MLP, 2D, and the gradients of its weights so far, in fp32. Beside experts there are also the router's input in
    fp32 and the gradient that the shared experts have made. When a tile is done, it leaves the gradients of its weights
    in bf16.

    What is kept of attention (`keep_attention`) counts as kept by all layers.
    """
    D, tiled = model.hidden, setting.tiles_layers
    held = STRATEGIES[strategy].held(model.widths, ranks, setting.head_chunks)
    kept = held.kept if setting.keeps_attention else 0
    common = BF16 * D + _rotary(model.widths) + 9 * ranks + 8
    norm = _saved_by_norm(D, tiled)
    before = common + norm + BF16 * D + _saved_by_projections(model, tiled)
    after = before + held.saved - kept
    norm_backward = common + _norm_backward(D, tiled)
    phases = [
        Phase("attention forward", before + held.forward - kept),
        Phase("attention backward", before + held.backward - kept),
        Phase("backward of the first norm", norm_backward),
    ]
    if tiled:
        if has_experts:
            assert model.experts is not None
            e, name, beside = model.experts, "experts", after + 4 * BF16 * D
            weights, of_tile = 3 * e.count * e.width * D, _experts(model) - FP32 * D + BF16 * (e.per_token + 1) * D
        else:
            weights, name, beside = model.mlp_parameters, "MLP", after + 3 * BF16 * D
            of_tile = 6 * BF16 * model.intermediate + BF16 * D
        return [
            *phases,
            Phase(f"{name} in tiles", beside, FP32 * weights, of_tile, MLP_TILE),
            Phase(f"gradients of {name}", beside, (FP32 + BF16) * weights, 0, MLP_TILE),
        ]
    name, of_mlp = ("experts", _experts(model)) if has_experts else ("MLP", 6 * BF16 * model.intermediate)
    return [
        *phases,
        Phase(name, after + norm + BF16 * D + of_mlp),
        Phase("backward of the second norm", after - common + norm_backward),
    ]


def head_phases(model: Model, setting: Setting) -> list[Phase]:
    """Returns the phases of the last norm, the head and the loss, forward and backward; with the norm's input.

    Whole logits take 12V: bf16, fp32, and their logarithms, in whose backward as much exists. In tiles they take 10V for
    each token of a tile. The gradient of the head's input, 2D, is kept until backward, which scales it, and so is the
    head's gradient in fp32, 4VD; when that is made, and when it is scaled, it exists once more, in bf16 and in fp32.
    """
    D, V, tiled = model.hidden, model.vocabulary, setting.tiles_layers
    saved = _saved_by_norm(D, tiled) + (BF16 * D if tiled else 0)
    norm_backward = Phase("backward of the last norm", (BF16 * D if tiled else 0) + _norm_backward(D, tiled))
    if not setting.tiles_loss:
        return [Phase("whole logits", saved + BF16 * D + (2 * BF16 + 2 * FP32) * V), norm_backward]
    logits, tile = (BF16 + 2 * FP32) * V, tokens_of_tile("auto", V)
    return [
        Phase("a tile of logits", saved + 2 * BF16 * D, FP32 * V * D, logits, tile),
        Phase("gradients of two tiles", saved + 2 * BF16 * D, (2 * BF16 + FP32) * V * D),
        Phase("scaled gradients of the head", saved + 2 * BF16 * D, (BF16 + FP32) * V * D),
        norm_backward,
    ]


def _saved_by_norm(width: int, tiled: bool) -> float:
    """Bytes that a norm saves beside its output; the bf16 input of one in tiles is its caller's."""
    return 0 if tiled else (FP32 + BF16) * width


def _norm_backward(width: int, tiled: bool) -> float:
    """Bytes of a norm's backward: one in tiles has a gradient in and one out, another six tensors in fp32."""
    return 2 * BF16 * width if tiled else 6 * FP32 * width


def _rotary(widths: MLAWidths | HeadWidths) -> float:
    """Cosines and sines of one token."""
    return 2 * BF16 * (widths.rope if isinstance(widths, MLAWidths) else widths.key)


def _saved_by_projections(model: Model, tiled: bool) -> float:
    """Bytes that norms of latents or of heads save, with the outputs that the next projection saves."""
    w = model.widths
    if isinstance(w, HeadWidths):
        normalised = (w.heads + w.kv_heads) * w.key if model.normalizes_heads else 0
        return (BF16 if tiled else FP32 + BF16) * normalised
    latents = (w.query_latent or 0) + w.latent
    return BF16 * (latents + w.rope) + BF16 * latents if tiled else (FP32 + 2 * BF16) * latents


def _experts(model: Model) -> float:
    """Bytes of the experts' backward, when the weighted outputs' gradients return to the order of the experts.

    Three fp32 tensors of kD for the gradients, the inputs and outputs of the experts, 4kD, gate and up, 4kf, the
    activation and its product, 4kf, and the router's fp32 input, 4D.
    """
    assert model.experts is not None
    e, D = model.experts, model.hidden
    return e.per_token * ((3 * FP32 + 2 * BF16) * D + 4 * BF16 * e.width) + FP32 * D
