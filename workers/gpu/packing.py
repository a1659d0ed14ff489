"""From a step's chunks to the numbers that its forward needs. Pure: no torch.

The tokens of all chunks lie side by side in one row. For the attention, chunks of similar size are
padded to rectangles, so that a few calls serve all of them. What comes out can be sent to other
ranks as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from .block_manager import PADDING_PAGE
from .scheduler import Batch, Chunk

DECODE_WASTE = 64
"""Pages of padding at which decodes of different lengths are worth a call of their own."""
MIRROR_BYTES = 512 * 2**20
"""A group of decodes whose keys and values take more is gathered in each step."""


class PackedGroup(Struct, array_like=True):
    """Chunks of similar size: the packed tokens ``[start, end)`` as ``batch`` rows of ``width``."""

    start: int
    end: int
    batch: int
    width: int
    length: int
    """Tokens that the longest of them reaches."""
    pages: list[int]
    """``[batch * pages]``: the pages of each one's keys; padding points to page 0."""
    positions: list[int]
    """``[batch * width]``: the position of each token in its sequence."""
    rows: list[int] | None
    """``[batch * width]``: the packed token at each place of the rectangle; None at width 1."""
    places: list[int] | None
    """``[end - start]``: the place of each packed token in the flattened rectangle."""
    fresh: bool
    """All of them begin at position 0 and have the same length."""
    mirror: int = 0
    """Of decodes: the number of the mirror that holds their keys and values; 0: none."""
    goes_on: bool = False
    """The mirror holds all but the new tokens already."""
    room: int = 0
    """Tokens that each sequence has in the mirror."""


class PackedSpans(Struct, array_like=True):
    """What FlashAttention needs to know of the chunks, in their order: it wants no rectangles."""

    queries: list[int]
    """Tokens of each chunk."""
    keys: list[int]
    """Tokens that each may look at: up to its end."""
    pages: list[int]
    """``[chunks * width]``: the pages of each one's keys, padded with page 0."""
    width: int


class Packed(Struct, array_like=True):
    """One forward."""

    ids: list[int]
    positions: list[int]
    slots: list[int]
    """Where each token's key and value go."""
    rows: list[int]
    """The packed tokens whose logits are wanted."""
    groups: list[PackedGroup]
    copies: list[tuple[int, int]]
    """Pages to copy first, as (from, to)."""
    spans: PackedSpans | None = None
    """Instead of ``groups``, for FlashAttention."""


def pack(
    batch: Batch, page_size: int, *, spans: bool = False, mirrors: Mirrors | None = None
) -> tuple[list[Chunk], Packed]:
    """The chunks in the order of their rows, and the forward that computes them.

    ``spans``: for FlashAttention, which reads pages in place. ``mirrors``: for decodes on a CPU.
    """
    packed = Packed([], [], [], [], [], batch.copies)
    if spans:
        chunks = list(batch.chunks)
        packed.spans = _spans(chunks, page_size)
    else:
        chunks, parts = _arrange(batch.chunks, page_size)
        packed.groups = [_group(part, page_size) for part in parts]
        if mirrors is not None:
            mirrors.assign(parts, packed.groups)
    for chunk in chunks:
        sequence, start, end = chunk
        at = len(packed.ids)
        if end - start == 1:
            page = sequence.table.pages[start // page_size]
            packed.ids.append(sequence.tokens[start])
            packed.positions.append(start)
            packed.slots.append(page * page_size + start % page_size)
        else:
            packed.ids += sequence.tokens[start:end]
            packed.positions += range(start, end)
            packed.slots += _slots(sequence.table.pages, page_size, start, end)
        packed.rows += range(at + chunk.first_row - start, at + end - start)
    return chunks, packed


class Mirrors:
    """Which groups of decodes find their keys and values side by side from the step before.

    Gathering pages costs as much as attending over them. So where the same sequences decode step
    after step, what was gathered is kept, and only the new tokens are added. It is valid while
    every sequence goes on exactly where the step before ended: whatever else happens to one
    (splice, preemption, sitting out) makes it begin elsewhere.
    """

    def __init__(self, bytes_per_token: int, page_size: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._page_size = page_size
        self._last: dict[tuple[int, ...], tuple[list[Chunk], int, int]] = {}
        """By the sequences' identities: their last chunks, the mirror, and its room."""
        self._numbers = count(1)

    def assign(self, parts: Sequence[_Part], groups: Sequence[PackedGroup]) -> None:
        """Gives each group of decodes its mirror, one that goes on where there is one."""
        last, self._last = self._last, {}
        for part, group in zip(parts, groups, strict=True):
            if group.width > 1:
                continue
            key = tuple(id(c.sequence) for c in part.chunks)
            before, number, room = last.get(key, ([], 0, 0))
            group.goes_on = group.length <= room and all(
                old.end == new.start for old, new in zip(before, part.chunks, strict=False)
            )
            if not group.goes_on:
                number, room = next(self._numbers), self._room(group.length)
                if group.batch * room * self._bytes_per_token > MIRROR_BYTES:
                    continue
            group.mirror, group.room = number, room
            self._last[key] = (part.chunks, number, room)

    def _room(self, length: int) -> int:
        """Tokens for which a mirror is made: an eighth more, so that it is seldom made anew."""
        page = self._page_size
        return -(-(length + max(4 * page, length // 8)) // page) * page


class _Part:
    """Chunks that make a group, and the packed token at which they begin."""

    def __init__(self, start: int, page_size: int) -> None:
        self.start = start
        self._page_size = page_size
        self.chunks: list[Chunk] = []

    def takes(self, chunk: Chunk) -> bool:
        """Whether padding this chunk together with the others wastes little."""
        if not self.chunks:
            return True
        first, last = self.chunks[0], self.chunks[-1]
        width, first_width = chunk.end - chunk.start, first.end - first.start
        if width == 1:
            # In tokens, not pages: then groups stay the same while their members go on.
            return (chunk.end - last.end) * len(self.chunks) <= DECODE_WASTE * self._page_size
        if first_width == 1 or (first.start == 0) != (chunk.start == 0):
            return False
        return 4 * width <= 5 * first_width + 32 and 2 * chunk.end <= 3 * first.end + 64


def _arrange(chunks: Sequence[Chunk], page_size: int) -> tuple[list[Chunk], list[_Part]]:
    """Chunks ordered so that those of similar size lie side by side, and these groups."""
    ordered = sorted(
        chunks, key=lambda c: (c.end - c.start > 1, c.start != 0, c.end - c.start, c.end)
    )
    parts: list[_Part] = []
    at = 0
    for chunk in ordered:
        if not parts or not parts[-1].takes(chunk):
            parts.append(_Part(at, page_size))
        parts[-1].chunks.append(chunk)
        at += chunk.end - chunk.start
    return ordered, parts


def _group(part: _Part, page_size: int) -> PackedGroup:
    """The attention's metadata of some chunks of similar size."""
    chunks = part.chunks
    sizes = [c.end - c.start for c in chunks]
    width = max(sizes)
    # No further than the longest reaches: the last page is rarely full.
    length = max([c.end for c in chunks])
    pages, _ = _table(chunks, page_size)
    positions = [c.start for c in chunks]
    rows = places = None
    if width > 1:
        each = np.array(sizes)[:, None]
        within = np.arange(width)
        real = within < each
        starts = part.start + np.concatenate([[0], np.cumsum(sizes)[:-1]])[:, None]
        rows = np.where(real, starts + within, part.start).ravel().tolist()
        places = np.flatnonzero(real).tolist()
        positions = np.where(real, np.array(positions)[:, None] + within, 0).ravel().tolist()
    return PackedGroup(
        start=part.start,
        end=part.start + sum(sizes),
        batch=len(chunks),
        width=width,
        length=length,
        pages=pages,
        positions=positions,
        rows=rows,
        places=places,
        fresh=length == width and all(c.start == 0 for c in chunks),
    )


def _spans(chunks: Sequence[Chunk], page_size: int) -> PackedSpans:
    pages, width = _table(chunks, page_size)
    return PackedSpans([c.end - c.start for c in chunks], [c.end for c in chunks], pages, width)


def _table(chunks: Sequence[Chunk], page_size: int) -> tuple[list[int], int]:
    """The pages that each chunk may look at, padded to the same number, and this number."""
    width = -(-max([c.end for c in chunks]) // page_size)
    pages: list[int] = []
    for c in chunks:
        held = c.sequence.table.pages[: -(-c.end // page_size)]
        pages += held
        pages += [PADDING_PAGE] * (width - len(held))
    return pages, width


def _slots(pages: Sequence[int], page_size: int, start: int, end: int) -> list[int]:
    """The slots of the tokens ``[start, end)``."""
    positions = np.arange(start, end)
    found = np.array(pages)[positions // page_size] * page_size + positions % page_size
    slots: list[int] = found.tolist()
    return slots
