"""parallelize: switches sequence parallelism on for one Hugging Face model, and its undo.

What is replaced, on this model only (every entry is put back by `Handle.restore`):

| where                       | what                                                                             |
|-----------------------------|----------------------------------------------------------------------------------|
| each attention module       | `config` is a copy that names our function; with MLA, `expand_kv` hands the latents through |
| its projections             | with the latent strategies: a forward that takes heads too                       |
| the attention module        | with "latent_qkv": a forward on the latents of all tokens (`latent_forward`)            |
| the text model              | `config` is that copy (so no local mask is built); a forward pre-hook            |
| its rotary embedding        | hooks, where its frequencies depend on the longest position                      |
| the given model             | a forward pre-hook that refuses what would be wrong on a part of the sequence    |

and one entry, under a name of our own, is added to transformers' attention functions. Whether a
forward is sequence-parallel is told by its `Documents`, a keyword argument that Hugging Face hands
down to the attention function, recomputation included: nothing about a forward is kept on the model.

Letters: B batch · T this rank's tokens · H heads · G key-value heads · K, V head widths.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..comm.group import SequenceGroup, gather_objects, raise_first, split_world
from ..layout.batch import SHARDED
from ..layout.documents import Documents, gather_documents
from ..planner.auto import Auto
from .arguments import NotCopied, by_name, is_given
from .families import TESTED, AttentionModel, find_attention, is_mla, is_patched
from .handle import Handle
from .kernel import LocalKernel, as_autocast
from .latent_forward import DOCUMENTS
from .moba import MoBAKernel, kernel_of
from .strategies import LayerStrategy, check_layer, check_strategy, decide_strategy, strategy_of

_logger = logging.getLogger("ds_mla_ulysses")

#: Our entry in transformers' attention functions. Without "flash" in it: transformers looks for that.
ATTENTION_NAME = "ds_mla_ulysses"
#: The keyword argument that tells the text model's hook what is wrong with the whole model's arguments.
PROBLEM = "ulysses_problem"

_NO_ATTENTIONS = "output_attentions is not supported under sequence parallelism."
_REFUSED_OF_MODEL = {
    ("labels",): (
        "labels cannot be given to a parallelized model, which would shift them within this rank's part: use "
        "shard_batch, and handle.loss(logits, shard['shift_labels'])."
    ),
    ("pixel_values", "pixel_values_videos"): (
        "pixel_values are not supported under sequence parallelism: text only. Run the model with images inside "
        "`with handle.paused():`."
    ),
    ("logits_to_keep",): ("logits_to_keep would keep tokens of every rank's part: leave it out and slice the result."),
}
_REFUSED_OF_TEXT_MODEL = {
    ("cache", "past_key_values"): (
        "cache and past_key_values are not supported under sequence parallelism: leave them out, or generate inside "
        "`with handle.paused():`."
    ),
    ("cu_seq_lens_q", "cu_seq_lens_k"): (
        "cu_seq_lens_q/k do not fit a part of a sequence: tell documents by position_ids instead."
    ),
    ("output_attentions",): _NO_ATTENTIONS,
}


def parallelize(
    model: nn.Module,
    *,
    sp_size: int | None = None,
    group: SequenceGroup | dist.ProcessGroup | None = None,
    strategy: str | Auto = "packed",
    split: str = "contiguous",
    head_chunks: int = 1,
    by_batch: bool = False,
) -> Handle:
    """Makes a Hugging Face decoder attend over sequences that ranks share.

    The model is patched in place; parameters, state-dict keys and every other model in the process are
    untouched. Its attention backend stays the one that it was loaded with. Every process of the job
    has to make this call. torch.distributed is initialised if nobody has (gloo on a CPU).

    Args:
        model: a transformers >= 5.15 model with MLA, multi-head, grouped or multi-query attention.
        sp_size: ranks that share a sequence, consecutive ones; all ranks of the job by default.
        group: the process group to use instead; the groups of all ranks must divide the world evenly.
        strategy: what travels.
            "packed": what the heads need, in one all-to-all; the shared key of MLA is gathered.
            "latent_kv", for MLA: queries by heads; the KV latent and the shared key are gathered, and each rank expands
            its own heads of all tokens.
            "latent_qkv", for MLA with a query latent: that is gathered too, and queries do not travel.
            "gather_kv": keys and values of all heads are gathered, with MLA its latent and shared key, of which each
            rank expands all heads; queries stay, and there can be fewer heads than ranks.
            "auto": the fastest of these for the model's widths, the ranks, the length, the link and the rate of products,
            which are measured; or an `Auto` that gives them. Decided here, once, and the same on all ranks.
        split: which tokens of a sequence a rank holds. "contiguous": the same number of consecutive ones. "head_tail",
            for gather_kv: one chunk from the front and one from the back, which makes causal attention the same work
            on all ranks.
        head_chunks: of MLA, parts of the own heads that are exchanged, expanded and attend one after the other, and once
            more in backward: keys and values of a part only exist at once, for more time and more collectives.
        by_batch: only forwards that are given `ulysses_sharded=True`, as the batches of
            `ShardedDataLoader` have it, are sequence-parallel, and all others those of the plain model. By
            default all are, but for those inside `handle.paused()`.

    Returns:
        the Handle. Forwards now take this rank's part of a batch (see `shard_batch`).

    Raises:
        UnsupportedModelError: the model would be silently wrong; says what to do instead.
        ValueError: fewer heads than ranks, bad groups, an unknown strategy, a split that it does not have, settings
            that differ between ranks.
        RuntimeError: the model is parallelized already.
    """
    auto = check_strategy(strategy, split, head_chunks)
    if sp_size is not None and (not isinstance(sp_size, int) or sp_size < 1):
        raise ValueError(f"sp_size must be a positive number of ranks, got {sp_size!r}.")
    if sp_size is not None and group is not None:
        raise ValueError("give sp_size or group, not both.")
    if is_patched(model):
        raise RuntimeError("the model is parallelized already: call restore() of its handle first.")
    found = find_attention(model)
    if found.model_type not in TESTED and getattr(model.config, "model_type", None) not in TESTED:
        warnings.warn(
            f"{found.model_type} has attention layers like those of the models that this package is tested with "
            f"({', '.join(TESTED)}), but was not tested itself: compare one step with one process before you trust it.",
            stacklevel=2,
        )
    kernels = [kernel_of(layer, layer.config) for layer in found.layers]
    _init_distributed()
    _check_alike(
        {
            "strategy": auto or strategy,
            "split": split,
            "head_chunks": head_chunks,
            "by_batch": by_batch,
            "sp_size": sp_size,
            "a group was given": group is not None,
        }
    )
    sequence_group, data_rank, data_size = _groups(sp_size, group)
    sequence_group = sequence_group.with_split(split)
    why = "asked for"
    if auto is not None:
        strategy, why = decide_strategy(auto, model, kernels, sequence_group, head_chunks)
        if dist.get_rank() == 0:
            _logger.warning("strategy='auto' chose %s", why)
    for layer in found.layers:
        check_layer(layer, strategy, sequence_group.size, head_chunks)
    patch = _Patch(model, found, sequence_group, kernels, strategy, head_chunks, by_batch)
    handle = Handle(
        model,
        sequence_group,
        data_rank,
        data_size,
        strategy,
        patch.pause,
        patch.undo,
        why=why,
        head_chunks=head_chunks,
    )
    patch.attach(handle)
    return handle


def handle_of(model: nn.Module) -> Handle | None:
    """The Handle of a parallelized model, of one that contains it or of its engine; None if there is none."""
    return next((vars(m)["_ulysses_handle"] for m in model.modules() if "_ulysses_handle" in vars(m)), None)


@dataclass(frozen=True)
class _Layer(NotCopied):
    """What the attention function needs of one patched module."""

    kernel: LocalKernel | MoBAKernel
    strategy: LayerStrategy
    expand_kv: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None  # of MLA


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any):
    """The attention function of patched modules. query [B,H,T,K]; key, value [B,G,T,.], or the latents of expand_kv."""
    layer: _Layer = vars(module)["_ulysses"]
    documents: Documents | None = kwargs.pop(DOCUMENTS, None)
    if documents is None:  # a forward of the plain model, or a layer called by itself
        if layer.expand_kv is not None:
            key, value = layer.expand_kv(key, value)
        return layer.kernel.plain(query, key, value, attention_mask, **kwargs)
    settings = layer.kernel.settings(documents, **kwargs)
    query, key, value = as_autocast(query, key, value)
    return layer.strategy.attend(query.transpose(1, 2), key, value, settings), None


def _latents_as_they_are(kv_nope_B1TL: Tensor, k_rot_B1TR: Tensor) -> tuple[Tensor, Tensor]:
    """Takes the place of `expand_kv`: the attention function decides what travels and what is expanded."""
    return kv_nope_B1TL, k_rot_B1TR


class _Patch(NotCopied):
    """Applies every replacement of the table above; `undo` takes all of them back."""

    def __init__(
        self,
        model: nn.Module,
        found: AttentionModel,
        group: SequenceGroup,
        kernels: list[LocalKernel | MoBAKernel],
        strategy: str,
        head_chunks: int,
        by_batch: bool,
    ) -> None:
        from transformers import AttentionInterface

        self.group, self.by_batch = group, by_batch
        self.paused = False
        self.text_model = found.text_model
        self.own_config = found.text_model.config
        self.implementation = self.own_config._attn_implementation
        self.moba_layers = [kernel for kernel in kernels if isinstance(kernel, MoBAKernel)]
        self.signature = inspect.signature(found.text_model.forward)
        self.model_signature = inspect.signature(model.forward)
        self._undo: list[Callable[[], None]] = []
        AttentionInterface.register(ATTENTION_NAME, _attention)

        # A shallow copy: whatever else is changed in the original's tables later is seen by both.
        self.config = copy.copy(self.own_config)
        self.config._attn_implementation_internal = ATTENTION_NAME
        self._replace(self.text_model, "config", self.config)
        for layer, kernel in zip(found.layers, kernels, strict=True):
            layer_config = copy.copy(layer.config)
            layer_config._attn_implementation_internal = ATTENTION_NAME
            way = strategy_of(layer, kernel, group, strategy, head_chunks)
            # Straight into the instance's dict: an assigned module would appear among its submodules.
            self._replace(layer, "_ulysses", _Layer(kernel, way, layer.expand_kv if is_mla(layer) else None))
            if is_mla(layer):
                self._replace(layer, "expand_kv", _latents_as_they_are)
            for replaced in way.replaced:
                self._replace(*replaced)
            self._replace(layer, "config", layer_config)
        hooks = [
            self.text_model.register_forward_pre_hook(self._before_text_model, with_kwargs=True),
            self.text_model.register_forward_hook(self._after_text_model, always_call=True),
            model.register_forward_pre_hook(self._before_model, with_kwargs=True, prepend=True),
        ]
        for rotary in self.text_model.modules():
            if _depends_on_longest(rotary):
                hooks.append(rotary.register_forward_pre_hook(self._before_rotary, with_kwargs=True))
                hooks.append(rotary.register_forward_hook(self._after_rotary, with_kwargs=True))
        self._undo.extend(hook.remove for hook in hooks)

    def attach(self, handle: Handle) -> None:
        """Makes the handle known to `handle_of`."""
        self._replace(self.text_model, "_ulysses_handle", handle)

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        had, old = name in vars(module), vars(module).get(name)
        vars(module)[name] = value

        def put_back() -> None:
            if had:
                vars(module)[name] = old
            else:
                del vars(module)[name]

        self._undo.append(put_back)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def pause(self, paused: bool) -> bool:
        """Switches to the plain model or back; what it was before."""
        before, self.paused = self.paused, paused
        return before

    def _is_plain(self, sharded: Any) -> bool:
        return self.paused or (self.by_batch and not sharded)

    @property
    def _in_plain_forward(self) -> bool:
        return self.config._attn_implementation_internal != ATTENTION_NAME

    # What is wrong with the arguments of one rank has to be raised on all, or the others would wait for it:
    # it goes along to the text model's hook, which exchanges it with the shapes.
    def _before_model(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Finds inputs of the whole model that would be wrong on a part of the sequence."""
        given = by_name(self.model_signature, args, kwargs)
        if self._is_plain(given.get(SHARDED)):
            return None
        # With shift_labels a model's own loss is at least that of its tokens, of which the Trainer makes the whole.
        labels_fit = self.by_batch and given.get("shift_labels") is not None
        for names, problem in _REFUSED_OF_MODEL.items():
            if any(is_given(given.get(name)) for name in names) and not (labels_fit and "labels" in names):
                given |= dict.fromkeys(set(names) & set(given))
                return (), given | {PROBLEM: problem}
        return None

    @torch.compiler.disable  # its collectives of Python objects cannot be traced
    def _before_text_model(self, text_model: nn.Module, args: tuple, kwargs: dict[str, Any]):
        """Gathers positions and padding once and sends the documents along with this forward."""
        trains = text_model.training and torch.is_grad_enabled()
        if self._is_plain(kwargs.pop(SHARDED, None)):
            if trains and not self.paused:
                raise RuntimeError(
                    "a training forward was not told that its batch is one rank's part: hand on what the loader gives, "
                    "model(**batch) with ulysses_sharded in it. A forward of whole sequences, which this rank trains on "
                    "alone, goes inside `with ds_mla_ulysses.handle_of(model).paused():`."
                )
            # The plain model needs the masks of its own implementation.
            self.config._attn_implementation_internal = self.implementation
            return args, kwargs
        named = (self.own_config._attn_implementation, text_model.config._attn_implementation)
        if named != (self.implementation, ATTENTION_NAME):
            raise RuntimeError(
                "the attention implementation of a parallelized model was changed: call handle.restore() first, then "
                "set_attn_implementation, then parallelize."
            )
        given = by_name(self.signature, args, kwargs)
        problem = given.pop(PROBLEM, None)
        for names, text in _REFUSED_OF_TEXT_MODEL.items():
            if any(is_given(given.get(name)) for name in names):
                problem = problem or text
        if getattr(text_model.config, "output_attentions", False):
            problem = problem or _NO_ATTENTIONS
        ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
        problem = problem or _problem_of_inputs(text_model, ids, embeds)
        inputs = ids if ids is not None else embeds
        has_rows = isinstance(inputs, Tensor) and inputs.ndim >= 2
        documents, positions = gather_documents(
            given.get("position_ids"),
            given.get("attention_mask"),
            tuple(inputs.shape[:2]) if has_rows else (0, 0),
            inputs.device if has_rows else torch.device("cpu"),
            self.group,
            problem,
            {
                "inputs require gradients": has_rows and torch.is_grad_enabled() and inputs.requires_grad,
                "set_moba was called": tuple(layer.is_full for layer in self.moba_layers),
            },
        )
        if self.by_batch and trains:
            vars(text_model)["_ulysses_handle"].owes_loss = True
        given |= {"position_ids": positions, "attention_mask": None, "use_cache": False, DOCUMENTS: documents}
        return (), given

    def _after_text_model(self, text_model: nn.Module, args: tuple, out: Any) -> None:
        self.config._attn_implementation_internal = ATTENTION_NAME

    # Dynamic and long rope choose their frequencies by the longest position in the batch, of which a
    # rank may not have it: it is appended as one more token, and its embedding cut off again.
    def _before_rotary(self, rotary: nn.Module, args: tuple, kwargs: dict):
        if self._in_plain_forward or self.group.size == 1:
            return None
        arguments = by_name(inspect.signature(rotary.forward), args, kwargs)
        positions = arguments["position_ids"]
        longest = positions.max().reshape(1).clone()
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group.process_group)
        arguments["position_ids"] = torch.cat([positions, longest.expand(*positions.shape[:-1], 1)], dim=-1)
        return (), arguments

    def _after_rotary(self, rotary: nn.Module, args: tuple, kwargs: dict, out: Any):
        if self._in_plain_forward or self.group.size == 1:
            return None
        return tuple(x[:, :-1] for x in out) if isinstance(out, tuple) else out[:, :-1]


def _problem_of_inputs(text_model: nn.Module, ids: Any, embeds: Any) -> str | None:
    """What would stop this rank in the embedding, where the others would not hear of it."""
    if (ids is None) == (embeds is None):
        return "give exactly one of input_ids and inputs_embeds."
    for name, x, wanted in (("input_ids", ids, 2), ("inputs_embeds", embeds, 3)):
        if x is not None and (not isinstance(x, Tensor) or x.ndim != wanted or 0 in x.shape):
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            return f"{name} must be this rank's [B, T{', D' if wanted == 3 else ''}] tokens, got {found}."
    table = text_model.get_input_embeddings()
    if ids is not None and isinstance(table, nn.Embedding):
        lowest, highest = torch.stack(ids.aminmax()).tolist()  # the host waits once
        if lowest < 0 or highest >= table.num_embeddings:
            wrong = lowest if lowest < 0 else highest
            return f"input_ids has {wrong}, which is none of the {table.num_embeddings} tokens of the vocabulary."
    return None


def _depends_on_longest(module: nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _init_distributed() -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:  # started without a launcher: a world of one
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _check_alike(settings: dict[str, Any]) -> None:
    """Refuses settings that differ between ranks: their collectives would wait for each other forever."""
    said = gather_objects(SequenceGroup.of(dist.group.WORLD), tuple(settings.values()))
    for name, values in zip(settings, zip(*said, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ValueError(f"parallelize has to be called alike on all ranks; {name}, rank by rank: {list(values)}.")


def _groups(sp_size: int | None, group: SequenceGroup | dist.ProcessGroup | None) -> tuple[SequenceGroup, int, int]:
    world = SequenceGroup.of(dist.group.WORLD)
    if group is None:
        own = split_world(world.size if sp_size is None else sp_size)
        return own, world.rank // own.size, world.size // own.size
    problem, own, members = None, None, ()
    try:
        own = SequenceGroup.of(group)
        members = (world.rank,) if own.process_group is None else tuple(dist.get_process_group_ranks(own.process_group))
    except ValueError as error:
        problem = str(error)
    said = gather_objects(world, (problem, members))
    raise_first([text for text, _ in said])
    groups = sorted({ranks for _, ranks in said})
    if len({len(g) for g in groups}) > 1 or sorted(r for g in groups for r in g) != list(range(world.size)):
        raise ValueError(
            f"the sequence groups of all ranks must divide the world of {world.size} into parts of one size, got {groups}."
        )
    return own, groups.index(members), len(groups)
