"""Runs the model over a step's batch: packs its chunks, makes the metadata, gives the logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from .attention import NAME, Group, PackedBatch
from .block_manager import PADDING_PAGE
from .head import packed_head
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
        self._head = packed_head(loaded.model) if self._keeps_logits else None
        self.cache = KVCache(loaded.layers, num_pages, loaded.dtype, loaded.device)

    @torch.inference_mode()
    def run(self, batch: Batch) -> tuple[list[Chunk], torch.Tensor]:
        """The forward of a step: the chunks in the order of their rows, and the logits
        ``[rows, vocab]`` (float32) of the tokens from each chunk's ``first_row`` to its end."""
        self.cache.copy_pages(batch.copies)
        chunks, packed = _pack(batch.chunks)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for chunk in chunks:
            sequence, start, end = chunk
            at = len(ids)
            if end - start == 1:
                page = sequence.table.pages[start // PAGE_SIZE]
                ids.append(sequence.tokens[start])
                slots.append(page * PAGE_SIZE + start % PAGE_SIZE)
                positions.append(start)
            else:
                ids += sequence.tokens[start:end]
                slots += _slots(sequence.table.pages, start, end)
                positions += range(start, end)
            rows += range(at + chunk.first_row - start, at + end - start)
        context = PackedBatch(self.cache, self._tensor(slots), [self._group(g) for g in packed])
        keep = {"logits_to_keep": self._tensor(rows)} if self._keeps_logits else {}
        with self._head.applied() if self._head is not None else nullcontext():
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
        width = max([c.end - c.start for c in chunks])
        # No further than the longest reaches: the last page is rarely full.
        length = max([c.end for c in chunks])
        count = -(-length // PAGE_SIZE)
        table: list[int] = []
        for c in chunks:
            held = _pages(c)
            table += held
            table += [PADDING_PAGE] * (count - len(held))
        positions = np.array([c.start for c in chunks])[:, None]
        if width > 1:
            sizes = np.array([c.end - c.start for c in chunks])[:, None]
            within = np.arange(width)
            positions = np.where(within < sizes, positions + within, 0)
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
            pages=self._tensor(table),
            length=length,
            positions=self._tensor(positions),
            rows=rows,
            places=places,
            fresh=all(c.start == 0 for c in chunks) and length == width,
        )

    def _tensor(self, values: np.ndarray | Sequence[int]) -> torch.Tensor:
        array = np.asarray(values, dtype=np.int64)
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
            grown = chunk.end // PAGE_SIZE - last.end // PAGE_SIZE
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


def _pages(chunk: Chunk) -> list[int]:
    """The pages that a chunk's tokens may look at."""
    return chunk.sequence.table.pages[: -(-chunk.end // PAGE_SIZE)]


def _slots(pages: Sequence[int], start: int, end: int) -> list[int]:
    """The slots of the tokens ``[start, end)``."""
    positions = np.arange(start, end)
    found = np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    slots: list[int] = found.tolist()
    return slots
