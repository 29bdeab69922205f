"""The only state of this package that belongs to the process instead of an object that the user holds.

Everything else travels as an argument or lives on a `Handle`. A test checks that no other module of the package
keeps mutable state at module level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comm.traffic import TrafficMeter
    from .integrations.install import Installation


@dataclass
class ProcessState:
    """What has to be process-wide, with the reason for each.

    Attributes:
        open_meters: the `TrafficMeter`s that are open now. Collectives also run in autograd's threads and inside
            compiled graphs, where a context variable would not reach them.
        installation: what `install` replaced in DeepSpeed, Accelerate and transformers, or None. The replaced symbols
            belong to the process, so `uninstall` needs exactly one record of them.
    """

    open_meters: list[TrafficMeter] = field(default_factory=list)
    installation: Installation | None = None


#: The state of this process.
PROCESS = ProcessState()
