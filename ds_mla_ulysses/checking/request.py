"""What is asked of the worker, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: The batches of whole sequences that are compared.
CASES = ("plain", "packed", "left", "right")
#: Relative errors up to here count as equal: in float64 with fp32 islands widened, and in float32.
TOLERANCES = {"float64": 1e-10, "float32": 5e-3}


@dataclass(frozen=True)
class Request:
    """A model and how to compare it.

    Attributes:
        model: what the report calls the model.
        config: the config as a dict with a `model_type`, or only that.
        is_type: whether only a model type was given, so that the config is the default of its class.
        variant: settings that take the place of the recipe's, by dotted name.
        with_images: whether the model of images and text is meant, if its type also has a language model alone.
        model_code: "FILE.py:Class", the model's class if it is not one of transformers.
        ranks, strategies, cases, dtype, head_chunks: see `run.check`.
    """

    model: str
    config: Mapping[str, Any]
    is_type: bool = False
    variant: Mapping[str, Any] = field(default_factory=dict)
    with_images: bool = False
    model_code: str | None = None
    ranks: int = 2
    strategies: tuple[str, ...] = ()
    cases: tuple[str, ...] = CASES
    dtype: str = "float64"
    head_chunks: int = 1

    @property
    def tolerance(self) -> float:
        """The relative error up to which numbers count as equal."""
        return TOLERANCES[self.dtype]

    def to_json(self) -> str:
        """Returns the request as one line."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Request:
        """Returns the request that `to_json` was called on."""
        values = json.loads(line)
        return cls(**values | {name: tuple(values[name]) for name in ("strategies", "cases")})
