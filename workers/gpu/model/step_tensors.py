"""The inputs of a step's forward on the device: ids, positions, and the attention's metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..engine.packing import Packed, PackedGroup
from .cuda import varlen
from .device_queue import on_device, together_on_device
from .kv_cache import KVCache, Mirror
from .transformers.attention import Group, PackedBatch

Context = PackedBatch | varlen.VarlenBatch
"""The metadata of a step for the attention function."""


class StepTensors:
    """Copies the inputs of each step to the device of a KV cache."""

    def __init__(self, cache: KVCache, device: torch.device) -> None:
        self.cache = cache
        self.device = device
        self._mirror: dict[int, Mirror] = {}

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """A host array as a tensor on the device."""
        return on_device(values, self.device)

    def ids(self, packed: Packed, drawn: torch.Tensor | None) -> torch.Tensor:
        """The ids of a forward, on the device. ``drawn``: the tokens that the device has just
        drawn; they replace the ids at the indices ``packed.fed``."""
        if drawn is None or packed.fed is None:
            return self.tensor(packed.ids)
        if len(packed.fed) == len(packed.ids):
            return _drawn(packed, drawn, self.tensor)
        # The ids are copied, because drawn tokens are written to the tensor, and on a CPU the
        # tensor shares the memory of the array.
        return self._fed(packed, drawn, *self._together([packed.ids.copy(), packed.fed]))

    def inputs(
        self, packed: Packed, drawn: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Context]:
        """The ids, the positions, the rows with logits and the metadata of a forward, on the
        device. If a kernel reads blocks in place, one transfer copies them from the host."""
        spans = packed.spans
        fed = packed.fed if drawn is not None and packed.fed is not None else packed.ids[:0]
        arrays = [packed.ids.copy(), fed, packed.positions, packed.rows, packed.slot_mapping]
        if spans is not None:
            arrays += varlen.arrays_of(spans)
        ids, at, positions, rows, slot_mapping, *rest = self._together(arrays)
        if drawn is not None and len(fed):
            ids = self._fed(packed, drawn, ids, at)
        if spans is not None:
            return ids, positions, rows, varlen.batch_from(spans, self.cache, slot_mapping, rest)
        return ids, positions, rows, self._gathered(packed, slot_mapping)

    def context(self, packed: Packed) -> Context:
        """The metadata of a forward for the attention function."""
        slot_mapping = self.tensor(packed.slot_mapping)
        if packed.spans is not None:
            return varlen.batch_of(packed.spans, self.cache, slot_mapping)
        return self._gathered(packed, slot_mapping)

    def _together(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        return together_on_device(arrays, self.device)

    def _fed(
        self, packed: Packed, drawn: torch.Tensor, ids: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """``ids`` with the drawn tokens at the indices ``at``. ``ids`` may be overwritten."""
        tokens = _drawn(packed, drawn, self.tensor)
        if len(tokens) == len(ids):
            return tokens
        return ids.index_copy_(0, at, tokens)

    def _gathered(self, packed: Packed, slot_mapping: torch.Tensor) -> PackedBatch:
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


def _drawn(
    packed: Packed, drawn: torch.Tensor, tensor: Callable[[np.ndarray], torch.Tensor]
) -> torch.Tensor:
    """The drawn tokens of a forward in the order of ``packed.fed``."""
    order = packed.drawn
    if order is None:
        return drawn
    if order[0] == 0 and order[-1] == len(order) - 1 and (np.diff(order) == 1).all():
        return drawn[: len(order)]
    return drawn[tensor(order)]
