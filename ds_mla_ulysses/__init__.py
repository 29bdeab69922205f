"""DeepSpeed Ulysses for MLA, grouped-query and MoBA models: train them on sequences that ranks share.

```python
import ds_mla_ulysses as dmu

handle = dmu.parallelize(model, sp_size=8)
engine, optimizer, *_ = dmu.initialize(model=model, config="configs/zero3.json", handle=handle)
```
Names are imported when they are first used: importing the package loads neither DeepSpeed nor
transformers and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

_WHERE = {
    "Auto": "planner.auto",
    "FullAttentionCallback": "integrations.callbacks",
    "GatherKVAttention": "attention.gather",
    "GatherKVMLAAttention": "attention.gather",
    "Handle": "hf.handle",
    "LatentKVMLAAttention": "attention.latent_kv",
    "MoBAConfig": "moba.config",
    "Report": "checking.report",
    "SequenceGroup": "comm.group",
    "Shard": "layout.shard",
    "ShardLayout": "layout.shard",
    "ShardedDataLoader": "integrations.dataloader",
    "TrafficMeter": "comm.traffic",
    "UlyssesAttention": "attention.ulysses",
    "UlyssesMLAAttention": "attention.mla",
    "UlyssesMoBAAttention": "attention.moba",
    "UlyssesError": "errors",
    "UnsupportedModelError": "hf.families",
    "check": "checking.run",
    "handle_of": "hf.handle",
    "initialize": "integrations.deepspeed",
    "keep_attention": "comm.kept",
    "keep_output": "comm.kept",
    "install": "integrations.install",
    "parallelize": "hf.parallelize",
    "register_moba": "hf.moba",
    "set_moba": "hf.moba",
    "shard_batch": "layout.batch",
    "uninstall": "integrations.install",
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from .attention.gather import GatherKVAttention, GatherKVMLAAttention
    from .attention.latent_kv import LatentKVMLAAttention
    from .attention.mla import UlyssesMLAAttention
    from .attention.moba import UlyssesMoBAAttention
    from .attention.ulysses import UlyssesAttention
    from .checking.report import Report
    from .checking.run import check
    from .comm.group import SequenceGroup
    from .comm.kept import keep_attention, keep_output
    from .comm.traffic import TrafficMeter
    from .errors import UlyssesError
    from .hf.families import UnsupportedModelError
    from .hf.handle import Handle, handle_of
    from .hf.moba import register_moba, set_moba
    from .hf.parallelize import parallelize
    from .integrations.callbacks import FullAttentionCallback
    from .integrations.dataloader import ShardedDataLoader
    from .integrations.deepspeed import initialize
    from .integrations.install import install, uninstall
    from .layout.batch import shard_batch
    from .layout.shard import Shard, ShardLayout
    from .moba.config import MoBAConfig
    from .planner.auto import Auto


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
