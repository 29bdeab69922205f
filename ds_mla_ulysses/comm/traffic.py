"""Counts what the collectives of this package send to other ranks."""

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
    Keys are (collective, direction): collectives are "all_to_all" and "all_gather"; directions are
    "forward" and "backward", and "setup" for what a forward gathers once before its first layer
    (positions, padding). What a rank keeps for itself is not counted. Collectives of DeepSpeed
    (gradients, parameters) are not this package's and not counted.
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
        """Bytes sent to other ranks, all collectives and directions."""
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
