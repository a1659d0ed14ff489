"""A trial of an attention kernel on a device: compares the kernel's results with plain attention,
and measures the kernel's time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from ...engine.packing import PackedSpans
from ..device_queue import on_device
from ..kv_cache import Kernel, KVCache, LayerShape
from ..loader import LoadedModel
from . import varlen
from .kernels import KERNELS, writing

TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Greatest allowed difference from plain attention, for standard normal inputs."""
WARM_UPS, RUNS = 3, 10


class Trial:
    """Attention of some chunks over scattered blocks of random keys.

    ``case``: the numbers of new tokens and of keys of each chunk.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        shape: LayerShape,
        kernel: Kernel,
        case: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        self._queries, self._lengths = case
        self._group = heads_per_key_head(loaded)
        self._attend = writing(KERNELS[kernel].attend_stored)
        size, device = KERNELS[kernel].BLOCK_SIZE, loaded.device
        self._table, slots = _scattered(self._queries, self._lengths, size)
        num_blocks = 1 + int(self._table.max())
        self._cache = KVCache({0: shape}, num_blocks, size, loaded.dtype, device)
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(device, loaded.dtype)

        kv_heads, dim, _ = shape
        heads = self._group * kv_heads
        # Queries, keys and values are views of one tensor, as after a joint product.
        rows = normal(sum(self._queries), heads + 2 * kv_heads, dim)
        self._query = rows[:, :heads]
        self._new = rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
        for tensor in self._cache.layers[0]:
            tensor.copy_(normal(*tensor.shape))
        spans = PackedSpans(
            np.array(self._queries),
            np.array(self._lengths),
            self._table.ravel(),
            self._table.shape[1],
        )
        self._batch = varlen.batch_of(spans, self._cache, on_device(slots, device))

    def run(self, window: int | None = None, cap: float | None = None) -> torch.Tensor:
        """The attention ``[num_tokens, heads, dim]``."""
        return self._attend(
            0,
            self._query,
            *self._new,
            self._batch,
            scaling=None,
            sliding_window=window,
            softcap=cap,
        )

    def check(self, window: int | None, cap: float | None) -> None:
        """Raises ValueError if the result differs from that of plain attention."""
        found, at = self.run(window, cap), 0
        for row, (count, length) in enumerate(zip(self._queries, self._lengths, strict=True)):
            wanted = self._plain(row, self._query[at : at + count], length, window, cap)
            distance = (found[at : at + count].float() - wanted).abs().max().item()
            if not distance <= TOLERANCES[found.dtype]:
                raise ValueError(f"the result differs by {distance:.3g} from plain attention")
            at += count

    def seconds(self) -> float:
        """The mean time of one run on the device, in seconds."""
        for _ in range(WARM_UPS):
            self.run()
        torch.cuda.synchronize(self._query.device)
        began = time.perf_counter()
        for _ in range(RUNS):
            self.run()
        torch.cuda.synchronize(self._query.device)
        return (time.perf_counter() - began) / RUNS

    def _plain(
        self, row: int, query: torch.Tensor, length: int, window: int | None, cap: float | None
    ) -> torch.Tensor:
        """The attention of one chunk in float32: ``[tokens, heads, dim]``."""
        device = query.device
        table = torch.from_numpy(self._table[row]).to(device)
        k, v = (
            paged.index_select(0, table).flatten(0, 1)[:length].float().transpose(0, 1)
            for paged in self._cache.layers[0]
        )
        k, v = k.repeat_interleave(self._group, 0), v.repeat_interleave(self._group, 0)
        scores = query.float().transpose(0, 1) @ k.transpose(1, 2) * query.shape[-1] ** -0.5
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        keys = torch.arange(length, device=device)
        positions = torch.arange(length - len(query), length, device=device).unsqueeze(-1)
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (weights @ v).transpose(0, 1)


def _scattered(
    queries: Sequence[int], lengths: Sequence[int], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The block tables ``[chunks, blocks]`` of chunks over blocks in random order, and the slots of
    their new tokens."""
    counts = [-(-length // size) for length in lengths]
    blocks = np.random.default_rng(0).permutation(sum(counts)) + 1
    table = np.zeros((len(counts), max(counts)), dtype=np.int64)
    slots = []
    for row, end in enumerate(np.cumsum(counts)):
        table[row, : counts[row]] = blocks[end - counts[row] : end]
        at = np.arange(lengths[row] - queries[row], lengths[row])
        slots.append(table[row, at // size] * size + at % size)
    return table, np.concatenate(slots)


def heads_per_key_head(loaded: LoadedModel) -> int:
    """Number of query heads that share a key head; 1 if the configuration does not say."""
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads // kv_heads if heads and kv_heads else 1
