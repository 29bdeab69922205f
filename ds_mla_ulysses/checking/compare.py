"""What one rank does: it builds the models, runs each batch, and the first rank compares with one process.

Letters: B batch · T local tokens · S tokens of the whole sequence · V vocabulary.
"""

from __future__ import annotations

import datetime
import logging
import math
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..hf.parallelize import parallelize
from .cases import Case, Numbers, make_case, more_inputs, reference
from .recipe import NoRecipe, build, shown_settings, small_config
from .report import Row
from .request import Request

_PACKAGE = str(Path(__file__).parents[1])
#: A collective that waits longer has lost a rank.
_TIMEOUT = datetime.timedelta(seconds=40)
#: Parameters whose gradients are smaller than this share of all gradients are compared with that share: the gradient of
#: a bias that softmax cancels is rounding noise.
_FLOOR = 1e-4

#: Sends an event to the process that watches the ranks.
Send = Callable[[Mapping[str, Any]], None]


def run_rank(request: Request, todo: Sequence[tuple[str, str]], rank: int, store: str, send: Send) -> None:
    """Compares strategies and batches, and sends what it finds.

    The events have a `kind`: "stage" before each step, "model", "row" (from rank 0), "problem" if nothing can be
    compared, "failed" with the error, and "done".

    Args:
        todo: pairs of a strategy and a batch, those of a strategy together.
        rank: the number of this process.
        store: a file by which the ranks find each other.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    stage = {"strategy": "", "case": ""}

    def enter(strategy: str, case: str = "") -> None:
        stage.update(strategy=strategy, case=case)
        send({"kind": "stage", **stage})

    try:
        if request.dtype == "float64":
            _widen_fp32_islands()
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=request.ranks, timeout=_TIMEOUT
        )
        config = small_config(request)
        plain: nn.Module | None = None
        references: dict[str, Numbers] = {}
        for strategy, pairs in groupby(todo, key=lambda pair: pair[0]):
            enter(strategy)
            model = build(request, config)
            send({"kind": "model", "class": type(model).__name__, "config": shown_settings(config)})
            try:
                handle = parallelize(model, sp_size=request.ranks, strategy=strategy, head_chunks=request.head_chunks)
            except (ValueError, NotImplementedError) as error:
                if not _is_of_package(error):
                    raise
                send({"kind": "row", **asdict(Row(strategy, "", "refused", reason=str(error)))})
                continue
            for _, name in pairs:
                enter(strategy, name)
                case = make_case(name)
                if rank == 0 and name not in references:
                    plain = build(request, config) if plain is None else plain
                    references[name] = _reference(plain, case)
                loss, logits_BSV, gradients = _step(model, handle, case)
                losses = torch.empty(request.ranks, dtype=torch.float64)
                dist.all_gather_into_tensor(losses, loss.double().reshape(1))
                if rank == 0:
                    want = references[name]
                    logits = [logits_BSV[row, first:last] for row, first, last in case.documents]
                    errors = errors_of(want, losses, logits, gradients)
                    row = _row(request, strategy, name, errors)
                    send({"kind": "row", **asdict(row)})
            handle.restore()
        send({"kind": "done"})
    except NoRecipe as error:
        send({"kind": "problem", "text": str(error)})
    except BaseException as error:  # whatever it is, the report says it
        send({"kind": "failed", "text": describe(error), "is_lost_peer": _is_lost_peer(error), **stage})


@dataclass(frozen=True)
class Errors:
    """Relative errors of the loss, the logits and the worst gradient, and the name of that parameter."""

    loss: float
    logits: float
    gradient: float
    parameter: str

    @property
    def largest(self) -> float:
        """The largest of them."""
        return max(self.loss, self.logits, self.gradient)


def errors_of(want: Numbers, losses: Tensor, logits: Sequence[Tensor], gradients: Mapping[str, Tensor]) -> Errors:
    """Compares numbers with those of one process.

    Args:
        losses: float64, the loss of each rank.
        logits: those of each document.
        gradients: of each parameter; over ranks, their sum.
    """
    off_loss = _largest(((losses - want.loss.double()) / want.loss.double().abs().clamp(min=1e-3)).abs())
    pairs = zip(logits, want.logits, strict=True)
    off_logits = max(_largest((found - wanted).abs() / wanted.abs().max()) for found, wanted in pairs)
    every = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in want.gradients.values()))
    off_gradient, worst = 0.0, ""
    for parameter, gradient in gradients.items():
        wanted = want.gradients.get(parameter, torch.zeros_like(gradient)).double()
        floor = max(float(wanted.norm()), _FLOOR * every, 1e-300)
        off = float((gradient.double() - wanted).norm()) / floor
        off = off if math.isfinite(off) else math.inf
        if off > off_gradient:
            off_gradient, worst = off, parameter
    return Errors(off_loss, off_logits, off_gradient, worst)


def _row(request: Request, strategy: str, name: str, errors: Errors) -> Row:
    """The row of one comparison."""
    verdict = "equal" if errors.largest <= request.tolerance else "different"
    return Row(strategy, name, verdict, errors.loss, errors.logits, errors.gradient, errors.parameter)


def describe(error: BaseException) -> str:
    """Returns the error's type, its message in one line, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message[:400]}{where}"


def _reference(model: nn.Module, case: Case) -> Numbers:
    """Raises NoRecipe if one process has no numbers to compare with."""
    try:
        want = reference(model, case)
    except Exception as error:  # a model may raise anything
        raise NoRecipe(f"the model does not run in one process: {describe(error)}") from error
    finite = [want.loss, *want.logits, *want.gradients.values()]
    if not all(bool(x.isfinite().all()) for x in finite):
        raise NoRecipe("the model's numbers in one process are not finite.")
    return want


def _step(model: Any, handle: Any, case: Case) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One sequence-parallel step: the loss, the logits [B, S, V] of all ranks, and the summed gradients."""
    model.zero_grad(set_to_none=True)
    shard = handle.shard(case.batch | more_inputs(model, case))
    logits_BTV = model(**shard.inputs).logits
    loss = handle.loss(logits_BTV, shard)
    loss.backward()
    parts = [torch.empty_like(logits_BTV) for _ in range(handle.group.size)]
    dist.all_gather(parts, logits_BTV.detach().contiguous())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Parameters without a gradient count as zeros, so that a rank that has none does not make the others wait.
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).double().flatten() for p in trained.values()])
    dist.all_reduce(flat)
    sizes = [p.numel() for p in trained.values()]
    gradients = {n: x.view_as(p) for (n, p), x in zip(trained.items(), flat.split(sizes), strict=True)}
    return loss.detach(), torch.cat(parts, dim=1), gradients


def _largest(errors: Tensor) -> float:
    largest = float(errors.max())
    return largest if math.isfinite(largest) else math.inf


def _widen_fp32_islands() -> None:
    """What modelling code computes in fp32 whatever its dtype, this process computes in float64.

    The rounding of such islands would hide errors up to 1e-6. The rank process does nothing else and ends soon.
    """
    for name in ("float32", "float"):
        setattr(torch, name, torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]


def _is_of_package(error: BaseException) -> bool:
    """Whether this package raised the error, rather than something that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)


def _is_lost_peer(error: BaseException) -> bool:
    """Whether the error only says that another rank is gone."""
    words = ("Connection closed", "Timed out", "Connection reset", "Broken pipe", "recvBytes", "sendBytes")
    return any(word in str(error) for word in words)
