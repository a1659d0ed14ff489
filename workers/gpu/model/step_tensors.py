"""The inputs of a step's forward on the device: ids, positions, and the attention's metadata."""

from __future__ import annotations

import numpy as np
import torch

from ..engine.packing import Packed, PackedGroup
from .cuda import varlen
from .device_queue import on_device
from .kv_cache import KVCache, Mirror
from .transformers.attention import Group, PackedBatch

Context = PackedBatch | varlen.VarlenBatch
"""The metadata of a step for the attention function."""


class StepTensors:
    """Copies the inputs of each step to the device of a KV cache."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self._device = device
        self._mirror: dict[int, Mirror] = {}

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """An array on the device."""
        return on_device(values, self._device)

    def ids(self, packed: Packed, drawn: torch.Tensor | None) -> torch.Tensor:
        """The ids of a forward, with the tokens that the device has just drawn."""
        if drawn is None or packed.fed is None:
            return self.tensor(packed.ids)
        tokens = drawn if packed.drawn is None else drawn[self.tensor(packed.drawn)]
        if len(packed.fed) == len(packed.ids):
            return tokens
        ids = self.tensor(packed.ids)
        ids[self.tensor(packed.fed)] = tokens
        return ids

    def context(self, packed: Packed) -> Context:
        """The metadata of a forward for the attention function."""
        slot_mapping = self.tensor(packed.slot_mapping)
        if packed.spans is not None:
            return varlen.batch_of(packed.spans, self.cache, slot_mapping)
        kept = {g.mirror for g in packed.groups}
        self._mirror = {n: mirror for n, mirror in self._mirror.items() if n in kept}
        return PackedBatch(self.cache, slot_mapping, [self._group(g) for g in packed.groups])

    def _group(self, group: PackedGroup) -> Group:
        shape = (group.batch, group.width)
        mirror = None
        if group.mirror:
            mirror = self._mirror.setdefault(group.mirror, Mirror(group.batch, group.room))
        return Group(
            start=group.start,
            end=group.end,
            width=group.width,
            blocks=self.tensor(group.blocks),
            length=group.length,
            positions=self.tensor(group.positions).view(shape),
            rows=None if group.rows is None else self.tensor(group.rows).view(shape),
            places=None if group.places is None else self.tensor(group.places),
            fresh=group.fresh,
            level=group.width == 1 and bool((group.positions == group.positions[0]).all()),
            mirror=mirror,
            continues=group.continues,
        )
