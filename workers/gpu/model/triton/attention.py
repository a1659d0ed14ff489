"""Attention over the blocks of the KV cache by the Triton kernels: the tiles of a step, and the
launches.

A *chunk* is the tokens of one sequence in a step. A *tile* has some consecutive tokens of one
chunk. A program computes a tile for one key head and all query heads of this key head. A chunk of
at most ``MAX_SHORT`` tokens (a decode, a draft) is short: if its tiles have many keys, the keys are
split among several programs. One kernel computes short chunks, and another kernel computes long
chunks. So the result of a chunk does not depend on the other chunks of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..cuda.varlen import VarlenBatch
from ..device_queue import together_on_device
from ..kv_cache import TRITON_BLOCK_SIZE, KVCache
from ..loader import LoadedModel
from . import ops
from .ops import (
    MAX_SPLITS,
    MIN_SPLIT,
    PREFILL_ATTENTION,
    SPLIT_ATTENTION,
    tile_rows,
)

TITLE = "Triton"
BLOCK_SIZE = TRITON_BLOCK_SIZE
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_SHORT = 32
"""Maximum number of tokens of a short chunk: the longest draft and the token before the draft."""
TARGET_PROGRAMS = 528
"""Number of programs that a launch should have: four for each multiprocessor of an H100."""
MAX_PARTIAL_BYTES = 256 * 2**20
"""Maximum size of the partial results of one launch, in bytes; larger launches are divided."""
MAX_DECODES = 4096
COUNTERS = 1 << 16


@dataclass(slots=True)
class Launch:
    """One launch of the kernel for short chunks."""

    tiles: torch.Tensor
    """``[n, 3]``, int32: for each tile, its chunk, the index of its first token in the chunk, and
    its place among the partial results."""
    places: int
    """Number of tiles whose keys may be split; each has a place for its partial results."""
    part_rows: int
    """Number of rows for which a tile stores partial results. A row is one query head of one
    token."""


@dataclass(slots=True)
class Tiles:
    """The tiles of a step, for all layers with the same numbers of query heads and key heads."""

    short: list[Launch]
    long: torch.Tensor
    """The tiles of long chunks, ``[n, 3]``, int32, as in ``Launch.tiles``; empty if all chunks are
    short."""


class Workspace:
    """Memory that the kernels reuse from step to step. Only one CUDA stream at a time may use
    it."""

    def __init__(self, device: torch.device) -> None:
        self.done = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        """By tile and key head: number of programs that have finished their part of the tile's
        keys. The last program resets the number to 0."""
        rows = torch.arange(MAX_DECODES, dtype=torch.int32, device=device)
        self.decodes = torch.stack((rows, torch.zeros_like(rows), rows), 1)
        """The tiles of ``MAX_DECODES`` chunks of one token each."""
        self.none = rows[:0].view(0, 3)


_WORKSPACES: WeakKeyDictionary[KVCache, Workspace] = WeakKeyDictionary()


def workspace_of(cache: KVCache) -> Workspace:
    """The workspace of a KV cache. The first call makes the workspace, and must not happen while a
    CUDA graph is captured."""
    found = _WORKSPACES.get(cache)
    if found is None:
        keys, _ = next(iter(cache.layers.values()))
        found = _WORKSPACES[cache] = Workspace(keys.device)
    return found


def decode_tiles(count: int, group: int, workspace: Workspace) -> Tiles:
    """The tiles of ``count`` chunks of one token. Nothing is copied to the device."""
    assert count <= MAX_DECODES, count
    return Tiles([Launch(workspace.decodes[:count], count, group)], workspace.none)


def tiles_of(
    queries: np.ndarray, keys: np.ndarray, group: int, kv_heads: int, dim: int, device: torch.device
) -> Tiles:
    """The tiles of chunks. ``queries``: number of tokens of each chunk. ``keys``: number of keys up
    to the end of each chunk."""
    short = queries <= MAX_SHORT
    rows = _split(queries, short, tile_rows(group, long=False) // group)
    ends = np.minimum(
        (keys - queries)[rows[:, 0]] + rows[:, 1] + tile_rows(group, long=False) // group,
        keys[rows[:, 0]],
    )
    part_rows = group if queries.max(initial=1) == 1 else tile_rows(group, long=False)
    partial = MAX_SPLITS * part_rows * (dim + 2) * 4 * kv_heads
    most = max(1, min(MAX_PARTIAL_BYTES // partial, COUNTERS // kv_heads))
    parts, places = [], []
    for at in range(0, len(rows), most):
        part = rows[at : at + most].copy()
        is_split = ends[at : at + most] > MIN_SPLIT
        part[:, 2] = np.where(is_split, np.cumsum(is_split) - 1, 0)
        parts.append(part)
        places.append(int(is_split.sum()))
    long = _split(queries, ~short, tile_rows(group, long=True) // group)
    # The last tiles of a chunk have the most keys, and take the longest time. They begin first, so
    # that the launch does not end while a few long tiles still run.
    *moved, last = together_on_device([*parts, long[::-1].copy()], device)
    launches = [Launch(tiles, n, part_rows) for tiles, n in zip(moved, places, strict=True)]
    return Tiles(launches, last)


def paged_attention(
    query: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    chunks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    tiles: Tiles,
    workspace: Workspace,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    max_programs: int | None = None,
) -> torch.Tensor:
    """Attention of ``query`` ``[num_tokens, heads, dim]`` over the blocks of a layer's keys and
    values, including the keys and values of the new tokens. Returns ``[num_tokens, heads, dim]``.

    ``chunks``: three int32 tensors. The first, ``[N + 1]``, has the start of each chunk in
    ``query``, and the end of the last chunk. The second, ``[N]``, has the number of keys that each
    chunk attends to. The third, ``[N, blocks]``, is the block table.
    ``max_programs``: maximum number of programs that share the keys of a tile. By default, the
    programs fill a GPU. The result does not depend on this number.
    """
    num_tokens, heads, dim = query.shape
    kv_heads = cache[0].shape[2]
    if query.stride(1) != dim or query.stride(2) != 1:
        query = query.contiguous()
    out = torch.empty((num_tokens, heads, dim), dtype=query.dtype, device=query.device)
    scale = dim**-0.5 if scaling is None else scaling
    numbers = (scale, sliding_window or 0, softcap or 0.0)
    for launch in tiles.short:
        count = len(launch.tiles)
        programs = max_programs or min(MAX_SPLITS, -(-TARGET_PROGRAMS // (count * kv_heads)))
        shape = (launch.places, kv_heads, MAX_SPLITS, launch.part_rows)
        partials = [
            torch.empty((*shape, last), dtype=torch.float32, device=query.device)
            for last in (dim, 2)
        ]
        given = [*partials, workspace.done]
        SPLIT_ATTENTION(out, query, list(cache), [launch.tiles, *chunks], given, programs, *numbers)
    if len(tiles.long):
        PREFILL_ATTENTION(out, query, list(cache), [tiles.long, *chunks], *numbers)
    return out


def attend_stored(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    context: VarlenBatch,
    *,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of a layer whose cache contains ``key`` and ``value`` (``fused.Attend``)."""
    cache = context.cache.layers[layer]
    workspace = workspace_of(context.cache)
    return paged_attention(
        query,
        cache,
        (context.starts, context.lengths, context.block_table),
        _tiles(context, query.shape[1] // cache[0].shape[2], cache[0], workspace),
        workspace,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )


def why_not(loaded: LoadedModel) -> str:
    """The reason why the kernels cannot attend for a model; empty if they can."""
    if missing := ops.why_missing(loaded.device):
        return missing
    if loaded.dtype not in DTYPES:
        return f"the weights are {loaded.dtype}"
    shapes = set(loaded.layers.values())
    if any(s.key_dim != s.value_dim or not 16 <= s.key_dim <= 256 for s in shapes):
        return "its heads have a size that the kernels do not support"
    return ""


def _tiles(context: VarlenBatch, group: int, keys: torch.Tensor, workspace: Workspace) -> Tiles:
    """The tiles of a step for a layer whose keys are ``keys``, with ``group`` query heads per key
    head."""
    _, _, kv_heads, dim = keys.shape
    found: Tiles | None = context.tiles.get((group, kv_heads))
    if found is None:
        spans = context.spans
        if spans is None:
            found = decode_tiles(len(context.lengths), group, workspace)
        else:
            found = tiles_of(spans.queries, spans.keys, group, kv_heads, dim, keys.device)
        context.tiles[group, kv_heads] = found
    return found


def _split(queries: np.ndarray, chosen: np.ndarray, tokens: int) -> np.ndarray:
    """The tiles ``[n, 3]``, int32, of the chosen chunks, as in ``Launch.tiles``. A tile has up to
    ``tokens`` tokens. The column of places is 0."""
    (chunks,) = np.nonzero(chosen)
    counts = -(-queries[chunks] // tokens)
    rows = np.zeros((int(counts.sum()), 3), dtype=np.int32)
    rows[:, 0] = np.repeat(chunks, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rows[:, 1] = (np.arange(len(rows)) - first) * tokens
    return rows
