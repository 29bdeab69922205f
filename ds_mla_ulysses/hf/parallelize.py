"""parallelize: switches sequence parallelism on for one Hugging Face model."""

from __future__ import annotations

import logging
import os
import warnings
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.agreement import gather_objects, raise_first, report_of
from ..comm.group import SequenceGroup, split_world
from ..errors import UlyssesRuntimeError, UlyssesTypeError, UlyssesValueError
from ..layout.tiled_loss import check_loss_tile
from ..planner.auto import Auto
from .checks import Checks
from .families import AttentionModel, find_attention, is_patched
from .handle import HANDLE, Handle
from .moba import kernel_of
from .patch import ModelPatch
from .recompute import check_recompute
from .strategies import check_layer, check_strategy, decide_strategy
from .tested import TESTED
from .tiled_layers import check_mlp_tile

_logger = logging.getLogger("ds_mla_ulysses")


def parallelize(
    model: nn.Module,
    *,
    sp_size: int | None = None,
    group: SequenceGroup | dist.ProcessGroup | None = None,
    strategy: str | Auto = "packed",
    split: str = "contiguous",
    head_chunks: int = 1,
    loss_tile: int | str | None = "auto",
    mlp_tile: int | None = None,
    recompute: str | None = None,
    checks: str = "always",
) -> Handle:
    """Makes a Hugging Face decoder attend over sequences that the ranks of a group share.

    The model is patched in place, wholly or not at all. Parameters, state-dict keys and every other model in the
    process are untouched. The model keeps the attention backend that it was loaded with. Every process of the job has
    to make this call, and a problem on one rank is raised on all of them. If torch.distributed is not initialised yet,
    it is initialised (with gloo on a CPU).

    Args:
        model: a transformers >= 5.15 model with MLA, multi-head, grouped or multi-query attention.
        sp_size: the number of consecutive ranks that share a sequence; all ranks of the job by default.
        group: the process group to use instead; the groups of all ranks must divide the world evenly.
        strategy: how attention exchanges data.
            "packed": queries, keys and values travel in one all-to-all; the shared RoPE key of MLA is gathered.
            "latent_kv", for MLA: queries travel by heads; the KV latent and the RoPE key are gathered, and each rank
            expands its local heads of all tokens.
            "latent_qkv", for MLA with a query latent: that is gathered too, and queries do not travel.
            "gather_kv": keys and values of all heads are gathered (for MLA the latent and the RoPE key, from which each
            rank expands all heads). Queries stay, and there can be fewer heads than ranks.
            "auto": the fastest of these for the model's widths, the number of ranks, the length, the link and the rate of
            matrix products, which are measured; or an `Auto` that gives them. It is decided here, once, and is the
            same on all ranks.
        split: which tokens of a sequence a rank holds. "contiguous": the same number of consecutive ones. "head_tail",
            for gather_kv: one piece from the front and one from the back, which makes causal attention the same work on
            all ranks.
        head_chunks: the number of chunks in which the local heads are exchanged and attend one after the other, and once
            more in backward. Only one chunk's tensors exist at a time, at the price of more time and more collectives. MLA
            expands keys and values chunk by chunk; other models exchange them once, before the first chunk.
        loss_tile: how many tokens' logits exist at a time in the loss. "auto" chooses by the size of the vocabulary; an int
            is a number of local tokens; None makes the logits whole, as the plain model does. Unless it is None, a
            sequence-parallel forward that records gradients returns logits that are made when they are used, by
            `handle.loss` (and the Trainer) a tile at a time, and by anything else whole.
        mlp_tile: how many tokens norms, MLPs, routers and experts compute at a time, again in backward; None for all local
            tokens. Most memory of a long sequence is theirs. A tile of a few thousand tokens takes about as much time.
        recompute: what gradient checkpointing keeps of attention. It needs checkpointing that is not reentrant, and has no
            effect without checkpointing.
            None: nothing; a layer's recomputation repeats attention and its forward exchanges.
            "keep_attention": the output of attention and of all exchanges, so that neither is repeated.
            "keep_output": the output of attention on both sides of its exchange. The exchange in front of attention is
            repeated, and its results are not kept.
        checks: "always", "first" or "never": when to run the checks that cost a collective or a wait for the device
            (are the batches of a group equal, are labels in the vocabulary, is the loss the same on all ranks).
            `ds_mla_ulysses/hf/checks.py` says what each costs. "first" runs each of them once.

    Returns:
        the Handle. A forward is sequence-parallel if it gets a shard (`handle.shard`). The `aux_loss` of its outputs, if
        the model makes one, is that of the group.

    Raises:
        UnsupportedModelError: the model would be silently wrong; the message says what to do instead.
        ValueError: there are fewer heads than ranks, or fewer on a rank than head_chunks, bad groups, an unknown strategy or
            split, or settings that differ between ranks.
        TypeError: sp_size or head_chunks is not an int, loss_tile is neither an int nor "auto" nor None, or mlp_tile is
            neither an int nor None.
        RuntimeError: the model is parallelized already.
    """
    settings: dict[str, Any] = {
        "strategy": strategy,
        "split": split,
        "head_chunks": head_chunks,
        "loss_tile": loss_tile,
        "mlp_tile": mlp_tile,
        "recompute": recompute,
        "checks": checks,
        "sp_size": sp_size,
        "a group was given": group is not None,
    }
    problem: Exception | None = None
    try:
        auto, policy = _check_settings(model, **settings)
        found = find_attention(model)
        kernels = [kernel_of(layer, layer.config) for layer in found.layers]
        settings |= {"strategy": auto or strategy} | _facts_of(model, found)
    except Exception as error:  # whatever it is, the other ranks wait for this one
        problem = error
        if not dist.is_initialized() and not _has_launcher():
            raise
    _init_distributed()
    _check_alike(problem, settings)
    _warn_if_untested(model, found)
    sequence_group, data_rank, data_size = _groups(sp_size, group)
    sequence_group = sequence_group.with_split(split)
    why = "asked for"
    if auto is None:
        assert isinstance(strategy, str)
        name = strategy
    else:
        name, why = decide_strategy(auto, model, kernels, sequence_group, head_chunks)
        if dist.get_rank() == 0:
            _logger.warning("strategy='auto' chose %s", why)
    for layer in found.layers:
        check_layer(layer, name, sequence_group.size, head_chunks)
    patch = ModelPatch(model, found, sequence_group, kernels, name, head_chunks, loss_tile, mlp_tile, recompute)
    handle = Handle(patch, data_rank=data_rank, data_size=data_size, why=why, checks=policy)
    patch.apply(**{HANDLE: handle})
    return handle


def _check_settings(model: nn.Module, **settings: Any) -> tuple[Auto | None, Checks]:
    """Refuses arguments of `parallelize` that are wrong for every model, and a model that is parallelized already."""
    auto = check_strategy(settings["strategy"], settings["split"], settings["head_chunks"])
    policy, sp_size = Checks(settings["checks"]), settings["sp_size"]
    check_loss_tile(settings["loss_tile"])
    check_mlp_tile(settings["mlp_tile"])
    check_recompute(settings["recompute"], settings["head_chunks"])
    if sp_size is not None and type(sp_size) is not int:
        raise UlyssesTypeError(f"sp_size must be an int, got {sp_size!r}.")
    if sp_size is not None and sp_size < 1:
        raise UlyssesValueError(f"sp_size must be a positive number of ranks, got {sp_size!r}.")
    if sp_size is not None and settings["a group was given"]:
        raise UlyssesValueError("give sp_size or group, not both.")
    if is_patched(model):
        raise UlyssesRuntimeError("the model is parallelized already: call restore() of its handle first.")
    return auto, policy


def _facts_of(model: nn.Module, found: AttentionModel) -> dict[str, Any]:
    """What has to be alike on all ranks of a model."""
    return {
        "the attention layers": ", ".join(sorted({type(layer).__name__ for layer in found.layers})),
        "the number of attention layers": len(found.layers),
        "the names, widths or kinds of parameters (by a checksum)": _checksum_of_parameters(model),
    }


def _warn_if_untested(model: nn.Module, found: AttentionModel) -> None:
    if found.model_type not in TESTED and getattr(model.config, "model_type", None) not in TESTED:
        warnings.warn(
            f"{found.model_type} has attention layers like those of the {len(TESTED)} model types that this package is tested "
            "with, but was not tested itself: compare one step with one process before you trust it. The command "
            "`ds-mla-ulysses check --model config.json` does so with a small model of the same architecture.",
            stacklevel=3,
        )


def _checksum_of_parameters(model: nn.Module) -> int:
    """Of what has to be alike on all ranks, or their gradients could not be summed. Not of values: engines share those."""
    of_parameters = [
        (name, tuple(getattr(p, "ds_shape", p.shape)), str(p.dtype), p.requires_grad)
        for name, p in model.named_parameters()
    ]
    return zlib.crc32(repr(of_parameters).encode())


def _has_launcher() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _init_distributed() -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if _has_launcher():
        dist.init_process_group(backend)
    else:  # started without a launcher: a world of one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _check_alike(problem: Exception | None, settings: dict[str, Any]) -> None:
    """Refuses settings that differ between ranks: their collectives would wait for each other forever.

    Args:
        problem: why this rank cannot parallelize its model; it is raised on all ranks.
    """
    mine = None if problem is not None else tuple(settings.values())
    answers = gather_objects(SequenceGroup.of(dist.group.WORLD), (report_of(problem), mine))
    if problem is not None:
        raise problem
    raise_first([report for report, _ in answers])
    of_ranks = zip(*(values for _, values in answers), strict=True)
    for name, values in zip(settings, of_ranks, strict=True):
        if len(set(values)) > 1:
            raise UlyssesValueError(
                f"parallelize needs the same arguments and model on all ranks; {name}, rank by rank: {list(values)}."
            )


def _groups(sp_size: int | None, group: SequenceGroup | dist.ProcessGroup | None) -> tuple[SequenceGroup, int, int]:
    """The local sequence-parallel group, its number among those of the world, and how many there are."""
    world = SequenceGroup.of(dist.group.WORLD)
    if group is None:
        local = split_world(world.size if sp_size is None else sp_size)
        return local, world.rank // local.size, world.size // local.size
    problem: str | None = None
    members: tuple[int, ...] = ()
    try:
        local = SequenceGroup.of(group)
        members = local.members or (world.rank,)
    except ValueError as error:
        problem = str(error)
    answers = gather_objects(world, (problem, members))
    raise_first([text for text, _ in answers])
    groups = sorted({ranks for _, ranks in answers})
    if len({len(g) for g in groups}) > 1 or sorted(r for g in groups for r in g) != list(range(world.size)):
        raise UlyssesValueError(
            f"the sequence-parallel groups of all ranks must divide the world of {world.size} into groups of one size, "
            f"got {groups}."
        )
    return local, groups.index(members), len(groups)
