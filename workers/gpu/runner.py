"""Runs the model over a step's batch: packs its chunks, makes the metadata, gives the logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch

from .attention import NAME, Group, PackedBatch
from .kv_cache import PAGE_SIZE, KVCache
from .loader import LoadedModel
from .scheduler import Batch, Chunk

DECODE_WASTE = 64
"""Pages of padding at which decodes of different lengths are worth a call of their own."""


class Runner:
    """Owns the model and its KV cache."""

    def __init__(self, loaded: LoadedModel, num_pages: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._model.set_attn_implementation(NAME)
        self._keeps_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self.cache = KVCache(loaded.layers, num_pages, loaded.dtype, loaded.device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[list[Chunk], torch.Tensor]:
        """The forward of a step: the chunks in the order of their rows, and the logits
        ``[rows, vocab]`` (float32) of the tokens from each chunk's ``first_row`` to its end."""
        self.cache.copy_pages(batch.copies)
        chunks, packed = _pack(batch.chunks)
        ids = np.concatenate([np.array(c.sequence.tokens[c.start : c.end]) for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        slots = np.concatenate([_slots(c, c.start, c.end) for c in chunks])
        rows = np.concatenate([np.arange(c.first_row, c.end) + at for c, at in _offsets(chunks)])
        context = PackedBatch(self.cache, self._tensor(slots), [self._group(g) for g in packed])
        keep = {"logits_to_keep": self._tensor(rows)} if self._keeps_logits else {}
        logits = self._model(
            input_ids=self._tensor(ids).unsqueeze(0),
            position_ids=self._tensor(positions).unsqueeze(0),
            use_cache=False,
            packed_batch=context,
            **keep,
        ).logits[0]
        if not self._keeps_logits:
            logits = logits[self._tensor(rows)]
        return chunks, logits.float()

    def _group(self, part: _Part) -> Group:
        """The attention's metadata of some chunks of similar size."""
        chunks = part.chunks
        width = max(c.end - c.start for c in chunks)
        pages = max(len(_pages(c)) for c in chunks)
        table = np.zeros((len(chunks), pages), dtype=np.int64)
        positions = np.zeros((len(chunks), width), dtype=np.int64)
        for i, c in enumerate(chunks):
            table[i, : len(_pages(c))] = _pages(c)
            positions[i, : c.end - c.start] = np.arange(c.start, c.end)
        # No further than the longest reaches: the last page is rarely full.
        length = max(c.end for c in chunks)
        rows = places = None
        if width > 1:
            sizes = np.array([c.end - c.start for c in chunks])
            starts = part.start + np.concatenate([[0], np.cumsum(sizes)[:-1]])
            within = np.arange(width)
            real = within < sizes[:, None]
            rows = self._tensor(np.where(real, starts[:, None] + within, part.start))
            places = self._tensor(np.flatnonzero(real))
        return Group(
            start=part.start,
            end=part.start + sum(c.end - c.start for c in chunks),
            width=width,
            pages=self._tensor(table.ravel()),
            length=length,
            positions=self._tensor(positions),
            rows=rows,
            places=places,
            fresh=all(c.start == 0 for c in chunks) and length == width,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


class _Part:
    """Chunks that make a group, and the packed token at which they begin."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.chunks: list[Chunk] = []

    def takes(self, chunk: Chunk) -> bool:
        """Whether padding this chunk together with the others wastes little."""
        if not self.chunks:
            return True
        first, last = self.chunks[0], self.chunks[-1]
        width, first_width = chunk.end - chunk.start, first.end - first.start
        if width == 1:
            grown = len(_pages(chunk)) - len(_pages(last))
            return grown * len(self.chunks) <= DECODE_WASTE
        if first_width == 1 or (first.start == 0) != (chunk.start == 0):
            return False
        return 4 * width <= 5 * first_width + 32 and 2 * chunk.end <= 3 * first.end + 64


def _pack(chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[_Part]]:
    """Chunks ordered so that those of similar size lie side by side, and these groups."""
    ordered = sorted(
        chunks, key=lambda c: (c.end - c.start > 1, c.start != 0, c.end - c.start, c.end)
    )
    parts: list[_Part] = []
    at = 0
    for chunk in ordered:
        if not parts or not parts[-1].takes(chunk):
            parts.append(_Part(at))
        parts[-1].chunks.append(chunk)
        at += chunk.end - chunk.start
    return ordered, parts


def _offsets(chunks: Sequence[Chunk]) -> list[tuple[Chunk, int]]:
    """For each chunk, what to add to a position to get the packed token."""
    found = []
    at = 0
    for chunk in chunks:
        found.append((chunk, at - chunk.start))
        at += chunk.end - chunk.start
    return found


def _pages(chunk: Chunk) -> list[int]:
    """The pages that a chunk's tokens may look at."""
    return chunk.sequence.table.pages[: -(-chunk.end // PAGE_SIZE)]


def _slots(chunk: Chunk, start: int, end: int) -> np.ndarray:
    """The slots of the tokens ``[start, end)``."""
    positions = np.arange(start, end)
    pages = np.array(chunk.sequence.table.pages)
    return np.asarray(pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)
