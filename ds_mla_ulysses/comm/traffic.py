"""Counts what the collectives of this package send to other ranks.

A test checks that only `comm` calls collectives, except for the files that `TrafficMeter` names.
"""

from __future__ import annotations

from collections import Counter

from ..process_state import PROCESS


class TrafficMeter:
    """Counts calls and bytes sent to *other* ranks while it is open, on this rank.

    ```python
    with TrafficMeter() as meter:
        loss = ...; loss.backward()
    meter.calls["all_to_all", "forward"], meter.bytes["all_to_all", "forward"]
    ```
    Data that a rank keeps for itself is not counted. Keys are (collective, direction).

    | collective          | bytes that are counted                                                   |
    |---------------------|--------------------------------------------------------------------------|
    | "all_to_all"        | what this rank sends to other ranks                                      |
    | "all_gather"        | the tensor, once for each other rank                                     |
    | "all_reduce"        | 2 (ranks-1)/ranks of the tensor, which is what a ring sends              |
    | "gather"            | the tensor; 0 on the rank that receives                                  |
    | "all_gather_object" | 0, because torch pickles the values: only the calls are counted          |

    | direction    | what is exchanged                                                                  |
    |--------------|------------------------------------------------------------------------------------|
    | "forward"    | tensors of attention layers                                                        |
    | "backward"   | their gradients                                                                    |
    | "setup"      | what is needed once: settings of `parallelize`, batches of a `ShardedDataLoader`, checksums of batches, numbers of supervised tokens, and before the first layers of a forward its positions, RoPE tables, padding and problems |
    | "loss"       | sums of the loss, and the check that the loss is that of the group                 |
    | "gradients"  | gradients of `Handle.sum_gradients`                                                |
    | "evaluation" | logits that a Trainer with `sp_in_eval` gathers                                    |

    These are not counted: collectives of DeepSpeed and Accelerate (gradients, parameters, metrics), the creation of process
    groups, the measurements of `strategy="auto"` with the broadcast of their result (in `planner/auto.py`), and the
    comparisons that `--verify` of the examples and `ds-mla-ulysses check` make (in `verify.py` and
    `checking/compare.py`).
    """

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> TrafficMeter:
        PROCESS.open_meters.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        PROCESS.open_meters.remove(self)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes sent to other ranks by all collectives in all directions."""
        return sum(self.bytes.values())

    def reset(self) -> None:
        """Starts counting from zero."""
        self.calls.clear()
        self.bytes.clear()


def record(collective: str, direction: str, sent_bytes: int) -> None:
    """Adds one call that sends `sent_bytes` to other ranks to every open meter."""
    for meter in PROCESS.open_meters:
        meter.calls[collective, direction] += 1
        meter.bytes[collective, direction] += sent_bytes
