"""Which checks run that cost a collective or a wait of the host for the device.

| check    | where                 | what it finds                                        | cost                                          |
|----------|-----------------------|------------------------------------------------------|-----------------------------------------------|
| "batch"  | Handle.shard          | ranks of a group that hold different or bad batches  | two small all-gathers, a copy to the host     |
| "labels" | Handle.loss           | labels outside the vocabulary, differing num_items   | a wait for the device                         |
| "loss"   | the engine's backward | a loss that is not the same number on all ranks      | an all-reduce of two numbers, a wait          |

If ZeRO-3 shards the head, all ranks of the job also agree before they gather it, by a small all-gather: with "labels" before
the tiles of a loss, with "loss" before backward, and, unless the policy is "never", before logits are made whole.

Once, at the first loss without an engine, ranks also compare a checksum of their weights, unless the policy is "never".
"""

from __future__ import annotations

from ..errors import UlyssesValueError

POLICIES = ("always", "first", "never")


class Checks:
    """Says for each check whether it is due, the same on all ranks that call it equally often.

    Args:
        policy: "always"; "first": each check runs once; "never".

    Raises:
        ValueError: the policy is unknown.
    """

    def __init__(self, policy: str = "always") -> None:
        if policy not in POLICIES:
            raise UlyssesValueError(f"checks must be one of {list(POLICIES)}, got {policy!r}.")
        self.policy = policy
        self._done: set[str] = set()

    def due(self, name: str) -> bool:
        """Whether the check runs now."""
        is_due = self.policy == "always" or (self.policy == "first" and name not in self._done)
        self._done.add(name)
        return is_due
