"""What `check` found: one row for each strategy and batch, and a verdict."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The verdicts, the worst first, with the exit status of the command.
EXIT_STATUS = {"different": 1, "fails": 1, "not checked": 2, "equal": 0, "refused": 3}
_COLUMNS = ("strategy", "batch", "verdict", "loss", "logits", "gradients", "worst gradient")


@dataclass(frozen=True)
class Row:
    """One strategy with one batch.

    Attributes:
        strategy: the strategy.
        case: "plain", "packed", "left" or "right"; empty if the strategy was refused or failed before the first batch.
        verdict: "equal", "different", "fails" or "refused".
        loss, logits, gradient: relative errors; that of the parameter whose gradient is farthest off. None if nothing
            was compared.
        parameter: the name of that parameter.
        reason: why it was refused, or how it failed.
    """

    strategy: str
    case: str
    verdict: str
    loss: float | None = None
    logits: float | None = None
    gradient: float | None = None
    parameter: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The result of `check`. Printed, it is a table and a verdict.

    Attributes:
        model: the model type, the file or the folder that was given.
        model_class: the class of the model that was built; empty if none could be.
        config: the settings of the small config that a reader needs to know what was compared.
        ranks: the number of processes that were compared with one.
        dtype: "float64" or "float32".
        tolerance: relative errors up to here count as equal.
        rows: the results.
        problem: why nothing could be compared; empty if something was.
        seconds: how long it took.
        versions: the releases of torch, transformers and this package.
    """

    model: str
    model_class: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    dtype: str = "float64"
    tolerance: float = 0.0
    rows: tuple[Row, ...] = ()
    problem: str = ""
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The verdict over all rows.

        "different": a number differs. "fails": `parallelize` accepts the model, but a step raises, crashes or hangs.
        "not checked": no small model could be built or run in one process. "refused": `parallelize` refuses the model
        with every strategy. "equal": all numbers agree for every strategy that the model allows.
        """
        found = {row.verdict for row in self.rows}
        if self.problem:
            found.add("not checked")
        return next((verdict for verdict in EXIT_STATUS if verdict in found), "not checked")

    @property
    def exit_status(self) -> int:
        """The exit status of the command: 0 equal, 1 different or failing, 2 not checked, 3 refused."""
        return EXIT_STATUS[self.verdict]

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies for which every batch came out equal."""
        names = dict.fromkeys(row.strategy for row in self.rows)
        verdicts = {name: {row.verdict for row in self.rows if row.strategy == name} for name in names}
        return tuple(name for name in names if verdicts[name] == {"equal"})

    @property
    def reason(self) -> str:
        """Why the verdict is not "equal": the first sentence that belongs to it; empty otherwise."""
        if self.verdict in ("equal", "not checked"):
            return self.problem
        worst = next(row for row in self.rows if row.verdict == self.verdict)
        if worst.verdict != "different":
            return worst.reason
        off = f", the gradient of {worst.parameter} by {worst.gradient:.0e}" if worst.parameter else ""
        return f"{worst.strategy}, {worst.case}: the loss is off by {worst.loss:.0e}, the logits by {worst.logits:.0e}{off}"

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON types, the verdict included."""
        return dataclasses.asdict(self) | {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "verdict": self.verdict,
            "strategies": list(self.strategies),
            "reason": self.reason,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """Returns the report that `to_dict` was called on."""
        names = {f.name for f in dataclasses.fields(cls)}
        given = {name: value for name, value in values.items() if name in names}
        return cls(**given | {"rows": tuple(Row(**row) for row in given.get("rows", ()))})

    def to_json(self) -> str:
        """Returns `to_dict` as text."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.config.items())
        built = f"{self.model}: a small {self.model_class}" if self.model_class else self.model
        lines = [f"{built} on {self.ranks} processes and on one, {self.dtype}"]
        lines += [f"config: {settings}"] if settings else []
        if compared := [row for row in self.rows if row.loss is not None]:
            lines += ["", *_table([_COLUMNS, *map(_cells, compared)]), ""]
        for row in self.rows:
            if row.verdict in ("refused", "fails"):
                name = f"{row.strategy}, {row.case}" if row.case else row.strategy
                lines.append(f"{name} {'is refused' if row.verdict == 'refused' else 'fails'}: {row.reason}")
        return "\n".join([*lines, f"verdict: {self.verdict}{self._why()}"])

    def _why(self) -> str:
        if self.problem:
            return f": {self.problem}"
        if self.verdict == "equal":
            return f" within {self.tolerance:g} with {', '.join(self.strategies)}"
        if self.verdict == "different":
            return f": {self.reason}. Do not train this model with sequence parallelism"
        return ""


def _cells(row: Row) -> tuple[str, ...]:
    errors = ("" if error is None else f"{error:.1e}" for error in (row.loss, row.logits, row.gradient))
    return row.strategy, row.case, row.verdict, *errors, row.parameter


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
