"""From a step's chunks to the inputs of its forward. Pure: no torch.

The tokens of all chunks lie side by side in one row. For the attention, chunks of similar size are
padded to rectangles, so that a few calls serve all of them. The result can be sent to other
ranks as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from .block_manager import PADDING_BLOCK
from .scheduler import Batch, Chunk

DECODE_WASTE = 64
"""Blocks of padding above which decodes of different lengths are split into two calls."""
MIRROR_BYTES = 512 * 2**20
"""A group of decodes whose keys and values take more is gathered in each step, without a mirror."""


class PackedGroup(Struct, array_like=True):
    """Chunks of similar size: the packed tokens ``[start, end)`` as ``batch`` rows of ``width``."""

    start: int
    end: int
    batch: int
    width: int
    length: int
    """The greatest end position among them, in tokens."""
    blocks: list[int]
    """``[batch * blocks]``: the blocks of each one's keys; padding points to block 0."""
    positions: list[int]
    """``[batch * width]``: the position of each token in its sequence."""
    rows: list[int] | None
    """``[batch * width]``: the packed token at each place of the rectangle; None at width 1."""
    places: list[int] | None
    """``[end - start]``: the place of each packed token in the flattened rectangle."""
    fresh: bool
    """All of them begin at position 0 and have the same length."""
    mirror: int = 0
    """Of decodes: the number of the mirror with their keys and values; 0: they have none."""
    continues: bool = False
    """The mirror contains all but the new tokens already."""
    room: int = 0
    """Capacity of the mirror for each sequence, in tokens."""


class PackedSpans(Struct, array_like=True):
    """The metadata of the chunks, in their order, for FlashAttention, which needs no rectangles."""

    queries: list[int]
    """Tokens of each chunk."""
    keys: list[int]
    """Tokens that each attends to: up to its end."""
    blocks: list[int]
    """``[chunks * width]``: the blocks of each one's keys, padded with block 0."""
    width: int


class Packed(Struct, array_like=True):
    """One forward."""

    ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    """The slot of the KV cache to which each token's key and value are written."""
    rows: list[int]
    """The packed tokens whose logits are wanted."""
    groups: list[PackedGroup]
    copies: list[tuple[int, int]]
    """Blocks to copy first, as (from, to)."""
    spans: PackedSpans | None = None
    """Instead of ``groups``, for FlashAttention."""
    fed: list[int] = []
    """The packed tokens whose ids are still on the device: those drawn in the step before."""
    drawn: list[int] = []
    """The row of that step in which each of them was drawn."""


def pack(
    batch: Batch, block_size: int, *, spans: bool = False, mirrors: Mirrors | None = None
) -> tuple[list[Chunk], Packed]:
    """The chunks in the order of their rows, and the forward that computes them.

    ``spans``: for FlashAttention, which reads blocks in place. ``mirrors``: for decodes on a CPU.
    """
    packed = Packed([], [], [], [], [], batch.copies)
    if spans:
        chunks = list(batch.chunks)
        packed.spans = _spans(chunks, block_size)
    else:
        chunks, parts = _arrange(batch.chunks, block_size)
        packed.groups = [_group(part, block_size) for part in parts]
        if mirrors is not None:
            mirrors.assign(parts, packed.groups)
    for chunk in chunks:
        sequence, start, end, _ = chunk
        at = len(packed.ids)
        if end - start == 1:
            block = sequence.block_table.blocks[start // block_size]
            if start < len(sequence.tokens):
                packed.ids.append(sequence.tokens[start])
            else:
                packed.ids.append(0)
                packed.fed.append(at)
                packed.drawn.append(sequence.drawn)
            packed.positions.append(start)
            packed.slot_mapping.append(block * block_size + start % block_size)
        else:
            packed.ids += chunk.tokens
            packed.positions += range(start, end)
            packed.slot_mapping += _slot_mapping(
                sequence.block_table.blocks, block_size, start, end
            )
        packed.rows += range(at + chunk.first_row - start, at + end - start)
    return chunks, packed


class Mirrors:
    """Which groups of decodes find a contiguous copy of their keys and values from the step before.

    Gathering blocks costs as much as attending over them. So where the same sequences decode step
    after step, the gathered copy (a mirror) is kept, and only the new tokens are added. It is
    valid while every sequence continues where the step before ended, or before that: what it
    computes now replaces refused drafts and dropped tokens. After a step without it, it is not.
    """

    def __init__(self, bytes_per_token: int, block_size: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._block_size = block_size
        self._last: dict[tuple[int, ...], tuple[list[Chunk], int, int]] = {}
        """By the sequences' identities: their last chunks, the mirror, and its capacity."""
        self._numbers = count(1)

    def forget(self) -> None:
        """What was to be added to the mirrors was not computed: none of them is valid."""
        self._last.clear()

    def assign(self, parts: Sequence[_Part], groups: Sequence[PackedGroup]) -> None:
        """Assigns each group of decodes its mirror: that of the step before, where it is valid."""
        last, self._last = self._last, {}
        for part, group in zip(parts, groups, strict=True):
            if group.width > 1 and not all(c.draft for c in part.chunks):
                continue
            key = tuple(id(c.sequence) for c in part.chunks)
            before, number, room = last.get(key, ([], 0, 0))
            group.continues = group.length <= room and all(
                new.start <= old.end for old, new in zip(before, part.chunks, strict=False)
            )
            if not group.continues:
                number, room = next(self._numbers), self._room(group.length)
                if group.batch * room * self._bytes_per_token > MIRROR_BYTES:
                    continue
            group.mirror, group.room = number, room
            self._last[key] = (part.chunks, number, room)

    def _room(self, length: int) -> int:
        """Capacity of a new mirror, in tokens: an eighth more, so that it is seldom replaced."""
        block = self._block_size
        return -(-(length + max(4 * block, length // 8)) // block) * block


class _Part:
    """Chunks that form a group, and the packed token at which they begin."""

    def __init__(self, start: int, block_size: int) -> None:
        self.start = start
        self._block_size = block_size
        self.chunks: list[Chunk] = []

    def takes(self, chunk: Chunk) -> bool:
        """Whether padding this chunk together with the others wastes little."""
        if not self.chunks:
            return True
        first, last = self.chunks[0], self.chunks[-1]
        width, first_width = chunk.end - chunk.start, first.end - first.start
        if width == 1:
            # In tokens, not blocks, so that groups stay the same from step to step.
            return (chunk.end - last.end) * len(self.chunks) <= DECODE_WASTE * self._block_size
        if first_width == 1 or (first.start == 0) != (chunk.start == 0):
            return False
        return 4 * width <= 5 * first_width + 32 and 2 * chunk.end <= 3 * first.end + 64


def _arrange(chunks: Sequence[Chunk], block_size: int) -> tuple[list[Chunk], list[_Part]]:
    """Chunks ordered so that those of similar size lie side by side, and these groups."""
    ordered = sorted(
        chunks, key=lambda c: (c.end - c.start > 1, c.start != 0, c.end - c.start, c.end)
    )
    parts: list[_Part] = []
    at = 0
    for chunk in ordered:
        if not parts or not parts[-1].takes(chunk):
            parts.append(_Part(at, block_size))
        parts[-1].chunks.append(chunk)
        at += chunk.end - chunk.start
    return ordered, parts


def _group(part: _Part, block_size: int) -> PackedGroup:
    """The attention's metadata of some chunks of similar size."""
    chunks = part.chunks
    sizes = [c.end - c.start for c in chunks]
    width = max(sizes)
    # Not to the end of the last block, which is rarely full.
    length = max([c.end for c in chunks])
    blocks, _ = _table(chunks, block_size)
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
        blocks=blocks,
        positions=positions,
        rows=rows,
        places=places,
        fresh=length == width and all(c.start == 0 for c in chunks),
    )


def _spans(chunks: Sequence[Chunk], block_size: int) -> PackedSpans:
    blocks, width = _table(chunks, block_size)
    return PackedSpans([c.end - c.start for c in chunks], [c.end for c in chunks], blocks, width)


def _table(chunks: Sequence[Chunk], block_size: int) -> tuple[list[int], int]:
    """The blocks that each chunk attends to, padded to the same number, and this number."""
    width = -(-max([c.end for c in chunks]) // block_size)
    blocks: list[int] = []
    for c in chunks:
        own = c.sequence.block_table.blocks[: -(-c.end // block_size)]
        blocks += own
        blocks += [PADDING_BLOCK] * (width - len(own))
    return blocks, width


def _slot_mapping(blocks: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """The slots of the tokens ``[start, end)``."""
    positions = np.arange(start, end)
    found = np.array(blocks)[positions // block_size] * block_size + positions % block_size
    slot_mapping: list[int] = found.tolist()
    return slot_mapping
