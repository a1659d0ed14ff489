"""CUDA graphs of decode steps: one launch instead of one for each kernel.

A graph is recorded for each of a few batch sizes when a step first needs it, on buffers of its own;
a step fills them, pads to the next size, and replays. The first replay is compared with the same
step without a graph; where recording fails or the numbers differ, steps run without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from .device_queue import on_device
from .kv_cache import KVCache
from .packing import Packed
from .varlen import VarlenBatch

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes for which a graph is recorded."""
TOLERANCE = 5e-2
"""How far a replay's logits may be from those of the step without a graph, relative to their
standard deviation."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch], torch.Tensor]


@dataclass(slots=True)
class _Recorded:
    """A graph and the buffers that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    positions: torch.Tensor
    batch: VarlenBatch
    logits: torch.Tensor


class DecodeGraphs:
    """The graphs of one model.

    ``spare_block``: where rows that are padding write; ``width``: blocks of the longest sequence.
    """

    def __init__(self, forward: Forward, cache: KVCache, spare_block: int, width: int) -> None:
        self._forward = forward
        self._cache = cache
        keys, _ = next(iter(cache.layers.values()))
        self._device = keys.device
        self._block_size = keys.shape[1]
        self._spare = spare_block
        self._width = width
        self._recorded: dict[int, _Recorded] = {}
        self._off = False

    def run(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor | None:
        """The logits of a step that only decodes, of the tokens ``ids``; None where it must run
        without a graph."""
        spans = packed.spans
        if self._off or spans is None or spans.queries.max() > 1 or len(packed.ids) > SIZES[-1]:
            return None
        size = next(s for s in SIZES if s >= len(packed.ids))
        recorded = self._recorded.get(size)
        try:
            if recorded is None:
                recorded = self._record(size)
                self._fill(recorded, packed, ids)
                self._check(recorded, len(packed.ids))
                self._recorded[size] = recorded
            else:
                self._fill(recorded, packed, ids)
            recorded.graph.replay()
        except Exception as error:
            log.warning("steps run without CUDA graphs: %s", error)
            self._off = True
            self._recorded.clear()
            return None
        return recorded.logits[: len(packed.ids)]

    def _record(self, size: int) -> _Recorded:
        device = self._device

        def ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        ids, positions, rows = ints(size), ints(size), torch.arange(size, device=device)
        batch = VarlenBatch(
            cache=self._cache,
            slot_mapping=torch.full((size,), self._spare * self._block_size, device=device),
            starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            lengths=torch.ones(size, dtype=torch.int32, device=device),
            block_table=torch.full(
                (size, self._width), self._spare, dtype=torch.int32, device=device
            ),
            longest_chunk=1,
            longest=self._width * self._block_size,
        )
        # What kernels set up in their first runs must not be recorded.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(ids, positions, rows, batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward(ids, positions, rows, batch)
        return _Recorded(graph, ids, positions, batch, logits)

    def _fill(self, recorded: _Recorded, packed: Packed, ids: torch.Tensor) -> None:
        """Writes a step into the buffers; what is beyond it writes to the spare block."""
        spans, count = packed.spans, len(packed.ids)
        assert spans is not None
        padding = len(recorded.ids) - count
        spare = self._spare * self._block_size
        batch = recorded.batch
        recorded.ids[:count].copy_(ids)
        self._write(recorded.positions, packed.positions, padding, 0)
        self._write(batch.slot_mapping, packed.slot_mapping, padding, spare)
        self._write(batch.lengths, spans.keys, padding, 1)
        table = on_device(spans.blocks, self._device).view(count, spans.width)
        batch.block_table[:count, : spans.width].copy_(table, non_blocking=True)
        batch.block_table[count:] = self._spare

    def _write(self, buffer: torch.Tensor, values: np.ndarray, padding: int, spare: int) -> None:
        padded = np.concatenate([values, np.full(padding, spare, dtype=np.int64)])
        buffer.copy_(on_device(padded, self._device), non_blocking=True)

    def _check(self, recorded: _Recorded, count: int) -> None:
        """Replays once and runs the same step without the graph; raises where they differ."""
        rows = torch.arange(len(recorded.ids), device=self._device)
        wanted = self._forward(recorded.ids, recorded.positions, rows, recorded.batch)[:count]
        recorded.graph.replay()
        found = recorded.logits[:count]
        away = (found.float() - wanted.float()).abs().max().item()
        if not away <= TOLERANCE * wanted.float().std().item() + 1e-6:
            raise ValueError(
                f"the logits of a replayed step differ by {away:.3g} from those of the step itself"
            )
