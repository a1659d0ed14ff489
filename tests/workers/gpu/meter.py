"""Measures the memory of a device by the tensors that torch makes and frees."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts the bytes of the storages that exist, instead of CUDA's allocator."""

    def __init__(
        self, total: int, counts: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        """``total``: bytes of the device's memory. ``counts``: whether a tensor is on the
        device."""
        super().__init__()
        self.total = total
        self.used = 0
        """Bytes that other processes use. A test sets this number."""
        self._counts = counts
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        outputs = function(*args, **(kwargs or {}))
        inputs = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if _counts(t)}
        for tensor in tree_leaves(outputs):
            if not _counts(tensor) or not self._counts(tensor):
                continue
            if id(tensor.untyped_storage()) not in inputs:
                self._add(tensor.untyped_storage())
        return outputs

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the memory statistics of ``torch.cuda``."""
        for name, stand_in in {
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": self._reset,
            "memory_allocated": lambda device=None: self.live,
            "memory_reserved": lambda device=None: self.live,
            "max_memory_allocated": lambda device=None: self.peak,
            "mem_get_info": lambda device=None: (self.total - self.used - self.live, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def _reset(self, device: Any = None) -> None:
        self.peak = self.live


def _counts(tensor: Any) -> bool:
    return torch.is_tensor(tensor) and tensor.layout == torch.strided
