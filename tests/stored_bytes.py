"""Counts memory over fake tensors, whose operators compute nothing."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoredBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators make and that are alive; `peak` is the most at a time."""

    def __init__(self, given):
        super().__init__()
        self.now = self.peak = 0
        self.given = given  # kept, so that their addresses are not used again
        self.alive = {x.untyped_storage()._cdata for x in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.alive:
            return
        self.alive.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key, size):
        self.alive.remove(key)
        self.now -= size
