"""CUDA graphs of decode steps. A graph needs one launch in place of a launch for each kernel.

When the engine starts, a graph is captured for each of a few batch sizes. All graphs read and write
the same buffers and share one memory pool, because only one graph is replayed at a time. A step
fills the buffers, pads its batch to the next larger of these sizes, and replays the graph of this
size. Each graph is compared with the same forward without a graph. If a capture fails twice, steps
run without graphs, and ``why`` has the reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ...engine.packing import Packed
from ..device_queue import on_device, pinned
from ..kv_cache import KVCache
from ..loader import OnProgress
from .varlen import VarlenBatch

log = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes for which a graph is captured."""
TOLERANCE = 5e-2
"""Greatest allowed difference between the logits of a replay and the logits of the same step
without a graph, relative to their standard deviation."""
MAX_CAPTURE_S = 60.0
"""After this number of seconds, no further capture begins."""
WARM_UPS = 2
"""Number of forwards before a capture. The first runs of kernels do setup work that must not be
captured."""
MAX_ATTEMPTS = 2
"""Maximum number of attempts to capture one size; after that, steps run without graphs."""

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch], torch.Tensor]


class _Buffers:
    """The inputs of all graphs, for ``largest`` rows. A graph of n rows reads the first n rows.

    ``width``: number of blocks of the longest sequence.
    """

    def __init__(self, cache: KVCache, largest: int, width: int) -> None:
        keys, _ = next(iter(cache.layers.values()))
        self._device = device = keys.device
        self._cache = cache
        self._longest = width * keys.shape[1]
        self._largest = largest
        self.ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(largest, width, dtype=torch.int32, device=device)
        self._blocks, self._shape = np.zeros(0, dtype=np.int64), (0, 0)
        """The current content of ``block_table``: the block tables, their width in blocks, and the
        number of rows including padding."""
        self._rows = torch.arange(largest, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        # The inputs are views of one buffer, so one copy from the host fills all inputs.
        self._numbers = torch.zeros(3 * largest + 1, dtype=torch.int64, device=device)
        self._positions, self._slots = self._numbers[: 2 * largest].view(2, largest)
        narrow = self._numbers[2 * largest :].view(torch.int32)
        self._lengths, self._key_starts = narrow[:largest], narrow[largest : 2 * largest + 1]

    def of(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, VarlenBatch]:
        """The arguments of a forward of ``size`` rows."""
        batch = VarlenBatch(
            cache=self._cache,
            slot_mapping=self._slots[:size],
            starts=self._starts[: size + 1],
            key_starts=self._key_starts[: size + 1],
            lengths=self._lengths[:size],
            block_table=self.block_table[:size],
            max_chunk=1,
            longest=self._longest,
        )
        return self.ids[:size], self._positions[:size], self._rows[:size], batch

    def fill_numbers(self, positions: np.ndarray, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Writes the positions, slots and lengths of the first rows."""
        largest, count = self._largest, len(positions)
        numbers = np.zeros(3 * largest + 1, dtype=np.int64)
        numbers[:count] = positions
        numbers[largest : largest + count] = slots
        narrow = numbers[2 * largest :].view(np.int32)
        narrow[:count] = lengths
        np.cumsum(lengths, out=narrow[largest + 1 : largest + 1 + count])
        self._numbers.copy_(pinned(numbers, self._device), non_blocking=True)

    def fill_table(self, blocks: np.ndarray, width: int, size: int, spare: int) -> None:
        """Writes the block tables ``[rows * width]`` of the first rows. The remaining rows up to
        ``size`` get the block ``spare``. Does nothing if the tables have not changed since the last
        step."""
        if self._shape == (width, size) and np.array_equal(self._blocks, blocks):
            return
        self._blocks, self._shape = blocks, (width, size)
        count = len(blocks) // width
        table = on_device(blocks.astype(np.int32), self._device).view(count, width)
        self.block_table[:count, :width].copy_(table)
        if count < size:
            self.block_table[count:size, :1].fill_(spare)


class DecodeGraphs:
    """The CUDA graphs of one model; empty before ``capture``.

    ``spare_block``: the block to which padding rows write. ``width``: number of blocks of the
    longest sequence. ``max_batch``: number of sequences of the largest decode step.
    """

    def __init__(self, cache: KVCache, spare_block: int, width: int, max_batch: int) -> None:
        keys, _ = next(iter(cache.layers.values()))
        self._device = keys.device
        self._block_size = keys.shape[1]
        self._spare = spare_block
        self._spare_slot = spare_block * self._block_size
        largest = next((size for size in SIZES if size >= max_batch), SIZES[-1])
        self._sizes = [size for size in SIZES if size <= largest]
        self._buffers = _Buffers(cache, largest, width)
        self._logits: torch.Tensor | None = None
        """``[largest, vocab]``: the output of all graphs."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """The graphs by batch size. A step replays the smallest graph into which its batch fits."""
        self.why = "they have not been captured"
        """The reason why some of the batch sizes ``_sizes`` have no graph; empty if all have a
        graph."""

    def __len__(self) -> int:
        """The number of batch sizes that have a graph."""
        return len(self._graphs)

    @torch.inference_mode()
    def capture(
        self,
        forward: Forward,
        on_progress: OnProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Captures the graphs of ``forward``. The largest graph is captured first, so that smaller
        graphs reuse its memory.

        If a capture fails ``MAX_ATTEMPTS`` times, all graphs are dropped. If the captures take too
        long, the smaller sizes do not get graphs. In both cases, ``why`` has the reason. The
        weights and the cache must keep their addresses afterwards.
        """
        began, self.why = clock(), ""
        session = _Session(self._device)
        for done, size in enumerate(reversed(self._sizes)):
            if clock() - began > MAX_CAPTURE_S:
                self.why = f"{done} of {len(self._sizes)} were captured in {MAX_CAPTURE_S:.0f} s"
                log.warning("CUDA graphs: %s; smaller batches are padded more", self.why)
                return
            on_progress(done / len(self._sizes), "capturing CUDA graphs")
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    self._graphs[size] = self._capture(size, forward, session)
                    break
                except Exception as error:
                    what = "attempt %d to capture the graph of %d rows failed: %s"
                    log.warning(what, attempt, size, error)
                    self.why = f"capturing the graph of {size} rows failed: {error}"
                    # After a failed capture, the state of the stream and of the pool is undefined.
                    session = _Session(self._device)
            if size not in self._graphs:
                self._graphs.clear()
                self._logits = None
                return
            self.why = ""

    def fit(self, packed: Packed) -> bool:
        """Whether a graph can compute a step. The step must consist of decodes, and must not be too
        large."""
        spans, count = packed.spans, len(packed.ids)
        if not self._graphs or spans is None or spans.queries.max() > 1:
            return False
        # A chunk (the tokens that a step computes of one sequence) may be one token in the middle
        # of a prompt. Such a chunk does not have a row of logits.
        return len(packed.rows) == count <= self._sizes[-1]

    def run(self, packed: Packed, ids: torch.Tensor) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of a step that fits, with the tokens ``ids``. The next
        replay overwrites the logits."""
        count = len(packed.ids)
        size = min(size for size in self._graphs if size >= count)
        self._fill(size, packed, ids)
        self._graphs[size].replay()
        assert self._logits is not None
        return self._logits[:count]

    # --- capturing ------------------------------------------------------------------------------

    def _capture(self, size: int, forward: Forward, session: _Session) -> torch.cuda.CUDAGraph:
        """Captures one graph. Raises ValueError if the graph's logits differ from those of
        ``forward`` without a graph."""
        inputs = self._buffers.of(size)
        self._fill_trial(size)
        # If the capture fails, torch.cuda.graph leaves its own stream current. This block then
        # restores the previous stream.
        with session.stream_current():
            for _ in range(WARM_UPS):
                wanted = forward(*inputs)
            if self._logits is None:
                self._logits = torch.empty_like(wanted)
            graph = torch.cuda.CUDAGraph()
            # Another thread may load a model during the capture. In this mode, that thread's calls
            # of CUDA do not break the capture.
            with torch.cuda.graph(
                graph,
                pool=session.pool,
                stream=session.stream,
                capture_error_mode="thread_local",
            ):
                self._logits[:size].copy_(forward(*inputs))
        graph.replay()
        distance = (self._logits[:size].float() - wanted.float()).abs().max().item()
        if not distance <= TOLERANCE * wanted.float().std().item() + 1e-6:
            raise ValueError(
                f"the logits of a replayed step differ by {distance:.3g} from those of the step "
                "itself"
            )
        return graph

    def _fill_trial(self, size: int) -> None:
        """Writes ``size`` decodes to the buffers. The only block of each decode is the spare block.
        The decodes have different positions if the block has enough positions."""
        positions = np.arange(size) % self._block_size
        self._buffers.fill_numbers(positions, self._spare_slot + positions, positions + 1)
        self._buffers.fill_table(np.full(size, self._spare), 1, size, self._spare)
        ids, _, rows, _ = self._buffers.of(size)
        ids.copy_(rows)

    def _fill(self, size: int, packed: Packed, ids: torch.Tensor) -> None:
        """Writes a step into the buffers. Padding rows write to the spare block."""
        spans, count = packed.spans, len(packed.ids)
        assert spans is not None
        padding = size - count
        self._buffers.fill_numbers(
            _padded(packed.positions, padding, 0),
            _padded(packed.slot_mapping, padding, self._spare_slot),
            _padded(spans.keys, padding, 1),
        )
        self._buffers.fill_table(spans.blocks, spans.width, size, self._spare)
        self._buffers.ids[:count].copy_(ids)


class _Session:
    """The stream and the memory pool of consecutive captures."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self._device = device

    @contextmanager
    def stream_current(self) -> Iterator[None]:
        """A context in which the stream of the session is current. Work on this stream runs after
        the work that was queued on the previous stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream(self._device).wait_stream(self.stream)


def _padded(values: np.ndarray, padding: int, by: int) -> np.ndarray:
    return np.concatenate([values, np.full(padding, by, dtype=values.dtype)])
