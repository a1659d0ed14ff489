"""Sequences in scattered blocks, chunks of queries at their ends, and plain attention in
float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenbus.workers.gpu.model.kv_cache import KVCache, LayerShape
from tokenbus.workers.gpu.model.triton.attention import (
    Tiles,
    paged_attention,
    tiles_of,
    workspace_of,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """The heads and the block size of a layer, and the options of its attention."""

    group: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None = None
    cap: float | None = None
    dtype: torch.dtype = torch.float32


class Paged:
    """Keys and values of sequences in blocks, and queries of a chunk at the end of each sequence.

    ``chunks``: for each sequence, the number of new tokens and the number of keys. ``shared``: the
    number of first tokens for which all sequences use the same blocks, as after a fork or a prefix
    hit. Memory that belongs to no sequence is NaN.
    """

    def __init__(
        self, shape: Shape, chunks: Sequence[tuple[int, int]], seed: int = 0, shared: int = 0
    ) -> None:
        self.shape = shape
        self.chunks = list(chunks)
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        size = shape.block_size
        counts = [-(-keys // size) for _, keys in chunks]
        same = min(shared // size, *(keys // size for _, keys in chunks))
        blocks = iter((rng.permutation(sum(counts)) + 1).tolist())
        prefix = [next(blocks) for _ in range(same)]
        self.table = np.zeros((len(counts), max(counts)), dtype=np.int32)
        for row, count in enumerate(counts):
            own = [next(blocks) for _ in range(count - same)]
            self.table[row, :count] = prefix + own

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(shape.dtype)

        self.cache = KVCache(
            {0: LayerShape(shape.kv_heads, shape.dim, shape.dim)},
            sum(counts) + 1,
            size,
            shape.dtype,
            CPU,
        )
        for paged in self.cache.layers[0]:
            paged.copy_(normal(*paged.shape))
            for row, (_, keys) in enumerate(chunks):
                if keys % size:
                    paged[self.table[row, keys // size], keys % size :] = float("nan")
        heads = shape.group * shape.kv_heads
        # Queries are a part of larger rows, as after a product that also computes keys and values.
        self.rows = [normal(tokens, heads + 2 * shape.kv_heads, shape.dim) for tokens, _ in chunks]

    def attend(
        self, chosen: Sequence[int] | None = None, max_programs: int | None = None
    ) -> list[torch.Tensor]:
        """The attention of the chosen chunks in one batch, each ``[tokens, heads, dim]``; by
        default of all chunks."""
        rows = list(range(len(self.chunks))) if chosen is None else list(chosen)
        queries = np.array([self.chunks[row][0] for row in rows])
        keys = np.array([self.chunks[row][1] for row in rows])
        starts = np.concatenate([[0], np.cumsum(queries)])
        shape, workspace = self.shape, workspace_of(self.cache)
        tiles: Tiles = tiles_of(queries, keys, shape.group, shape.kv_heads, shape.dim, CPU)
        packed = torch.cat([self.rows[row] for row in rows])
        found = paged_attention(
            packed[:, : shape.group * shape.kv_heads],
            self.cache.layers[0],
            (_ints(starts), _ints(keys), _ints(self.table[rows])),
            tiles,
            workspace,
            scaling=None,
            sliding_window=shape.window,
            softcap=shape.cap,
            max_programs=max_programs,
        )
        assert not workspace.done.any()
        return list(found.split(queries.tolist()))

    def plain(self, row: int) -> torch.Tensor:
        """The attention of one chunk by plain operations in float32."""
        shape, (tokens, length) = self.shape, self.chunks[row]
        blocks = torch.from_numpy(self.table[row, : -(-length // shape.block_size)]).long()
        k, v = (
            paged[blocks].flatten(0, 1)[:length].float().transpose(0, 1)
            for paged in self.cache.layers[0]
        )
        k, v = (t.repeat_interleave(shape.group, 0) for t in (k, v))
        query = self.rows[row][:, : shape.group * shape.kv_heads].float().transpose(0, 1)
        scores = query @ k.transpose(1, 2) * shape.dim**-0.5
        if shape.cap is not None:
            scores = torch.tanh(scores / shape.cap) * shape.cap
        at, keys = torch.arange(length - tokens, length).unsqueeze(-1), torch.arange(length)
        hidden = keys > at
        if shape.window is not None:
            hidden |= keys <= at - shape.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        return (weights @ v).transpose(0, 1)


def _ints(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
