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
backward works on five tensors in fp32, 20D bytes, beside the saved 4D. A fused one saves its input in bf16 and makes
nothing else.
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
from .strategies.base import BF16, FP32, Held
from .work import Work

GB = 1e9
#: DeepSpeed's reduce_bucket_size in configs/, in elements; a bucket is held twice, as sent and as reduced.
_BUCKET = 200_000_000
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
        tiles_layers: whether norm and MLP, or experts, run a tile of tokens at a time, and norms are fused.
        head_chunks: see `parallelize`.
        keeps_attention: whether attention's output is kept instead of recomputed.
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
    """A moment at which memory may be at its peak: bytes per local token, and bytes that do not depend on the length."""

    name: str
    per_token: float
    constant: float = 0.0

    def at(self, tokens: float) -> float:
        """Bytes with so many local tokens."""
        return self.per_token * tokens + self.constant


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
class Fit:
    """What a step holds under one setting.

    Attributes:
        setting: the rung.
        per_token: bytes per local token of each component, at the longest sequence.
        fixed: bytes on each GPU that do not depend on the length.
        phase: the phase that is the largest at the longest sequence.
        longest: tokens of the longest sequence; 0 if none fits.
        peak: bytes on a GPU at that length.
        host: bytes on all hosts together at that length.
        limit: what the length is limited by, "GPU memory" or "host memory".
        refused: why the setting is impossible; the numbers then mean nothing.
    """

    setting: Setting
    per_token: dict[str, float]
    fixed: float
    phase: str
    longest: int
    peak: float
    host: float
    limit: str
    refused: str | None = None


def layer_phases(model: Model, has_experts: bool, strategy: str, ranks: int, setting: Setting) -> list[Phase]:
    """Returns the phases of the backward of one layer, recomputation included; without the layer's input.

    In all of them exist the gradient of the layer's output, 2D, RoPE's cosines and sines, and where documents begin, 9n.
    Until the backward of the first norm there are also what that norm saved, its output, 2D, and what the projections
    saved.
    """
    D, fused = model.hidden, setting.tiles_layers
    held = STRATEGIES[strategy].held(model.widths, ranks)
    common = BF16 * D + _rotary(model.widths) + 9 * ranks + 8
    norm = _saved_by_norm(D, fused)
    before = common + norm + BF16 * D + _saved_by_projections(model, fused)
    after = before + held.saved
    norm_backward = common + _norm_backward(D, fused)
    phases = [
        Phase("attention forward", before + held.forward),
        Phase("attention backward", before + held.backward),
        Phase("backward of the first norm", norm_backward),
    ]
    second = norm + BF16 * D + (BF16 * D if fused else 0)  # a fused norm saves its bf16 input, which exists for it alone
    name, of_mlp = ("experts", _experts(model)) if has_experts else ("MLP", 6 * BF16 * model.intermediate)
    phases.append(Phase(name, after + second + of_mlp))
    phases.append(Phase("backward of the second norm", after - common + norm_backward))
    return phases


def head_phases(model: Model, setting: Setting) -> list[Phase]:
    """Returns the phases of the last norm, the head and the loss, forward and backward.

    Whole logits take 12V: bf16, fp32, their logarithms or gradients. In tiles they take 10V for each token of a tile, and
    the fp32 sum of the head's gradient; the gradient of the head's input, 2D, is kept until backward, which scales it.
    """
    D, V, fused = model.hidden, model.vocabulary, setting.tiles_layers
    norm = _saved_by_norm(D, fused) + (BF16 * D if fused else 0)
    if not setting.tiles_loss:
        phases = [Phase("whole logits", norm + BF16 * D + (BF16 + 2 * FP32 + BF16) * V)]
    else:
        tile = (BF16 + 2 * FP32) * V * tokens_of_tile("auto", V)
        phases = [
            Phase("a tile of logits", norm + 2 * BF16 * D, FP32 * V * D + tile),
            Phase("scaled gradients of the head", norm + 2 * BF16 * D, (FP32 + BF16) * V * D),
        ]
    phases.append(Phase("backward of the last norm", BF16 * D + _norm_backward(D, fused), BF16 * V * D))
    return phases


def _saved_by_norm(width: int, fused: bool) -> float:
    """Bytes that a norm saves beside its output; the bf16 input of a fused one is its caller's."""
    return 0 if fused else (FP32 + BF16) * width


def _norm_backward(width: int, fused: bool) -> float:
    """Bytes of a norm's backward: a fused one has a gradient in and one out, the other six tensors in fp32."""
    return 2 * BF16 * width if fused else 6 * FP32 * width


def _rotary(widths: MLAWidths | HeadWidths) -> float:
    """Cosines and sines of one token."""
    return 2 * BF16 * (widths.rope if isinstance(widths, MLAWidths) else widths.key)


def _saved_by_projections(model: Model, fused: bool) -> float:
    """Bytes that norms of latents or of heads save, with the outputs that the next projection saves."""
    w = model.widths
    if isinstance(w, HeadWidths):
        normalised = (w.heads + w.kv_heads) * w.key if model.normalizes_heads else 0
        return (BF16 if fused else FP32 + BF16) * normalised
    latents = (w.query_latent or 0) + w.latent
    return BF16 * (latents + w.rope) + BF16 * latents if fused else (FP32 + 2 * BF16) * latents


def _experts(model: Model) -> float:
    """Bytes of the experts' backward, when the weighted outputs' gradients return to the order of the experts.

    Three fp32 tensors of kD for the gradients, the inputs and outputs of the experts, 4kD, gate and up, 4kf, the
    activation and its product, 4kf, and the router's fp32 input, 4D.
    """
    assert model.experts is not None
    e, D = model.experts, model.hidden
    return e.per_token * ((3 * FP32 + 2 * BF16) * D + 4 * BF16 * e.width) + FP32 * D
