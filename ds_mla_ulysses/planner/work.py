"""What is planned and on what machine: the inputs of every estimate."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UlyssesValueError
from ..layout.widths import HeadWidths, MLAWidths


@dataclass(frozen=True)
class Machine:
    """How fast a rank sends and computes.

    Attributes:
        link_gbps: Gbit/s that a rank sends to other ranks while it receives as much.
        tflops: 10^12 floating-point operations per second in matrix products.
        latency_us: microseconds of a collective that sends nothing.
    """

    link_gbps: float = 400.0
    tflops: float = 400.0
    latency_us: float = 10.0


@dataclass(frozen=True)
class Work:
    """One attention layer and one micro-batch of whole sequences, shared by `ranks` ranks.

    Attributes:
        widths: the widths of the layer.
        ranks: the size of the sequence-parallel group.
        tokens: tokens of all sequences of the micro-batch together.
        sequence: tokens of one sequence, which determine how much attention computes; None: all tokens are one sequence.
        element_bytes: bytes of one element that is sent.
        split: which tokens of a sequence each rank holds.
        keys_per_query: the most keys that a query attends to, block size times top-k with MoBA; None: all keys before it.
        head_chunks: the number of chunks of local heads that attend one after the other.

    Raises:
        ValueError: a sequence that is longer than all tokens.
    """

    widths: MLAWidths | HeadWidths
    ranks: int
    tokens: int
    sequence: int | None = None
    element_bytes: int = 2
    split: str = "contiguous"
    keys_per_query: int | None = None
    head_chunks: int = 1

    def __post_init__(self) -> None:
        if self.sequence is not None and self.sequence > self.tokens > 0:
            raise UlyssesValueError(f"a sequence of {self.sequence} tokens is longer than all {self.tokens} of them.")
