"""Packs the chunks of a step into the inputs of its forward, without torch. A *chunk* is the tokens
of one sequence in a step.

The tokens of all chunks are concatenated. Some attention kernels read blocks in place. For other
kernels, chunks of similar size are padded to rectangles, so that a few calls compute all chunks.
The packed inputs can be sent to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
from msgspec import Struct

from .block_manager import PADDING_BLOCK
from .scheduler import Batch, Chunk

DECODE_WASTE = 64
"""Maximum number of blocks of padding that a further decode may add to a group. If a decode would
add more, it begins a new group. The attention is called once for each group."""
MIRROR_BYTES = 512 * 2**20
"""Maximum size of a *mirror* in bytes. A mirror is a contiguous copy of the keys and values of a
group of decodes (``Mirrors``). If the mirror of a group would be larger, the group has no mirror,
and each step gathers the keys and values from the blocks."""


class PackedGroup(Struct, array_like=True):
    """Chunks of similar size. They are the packed tokens ``[start, end)``, padded to a rectangle of
    ``batch`` rows of ``width`` tokens."""

    start: int
    end: int
    batch: int
    width: int
    length: int
    """The greatest end position of the chunks, in tokens."""
    blocks: np.ndarray
    """``[batch * max_blocks]``: the blocks of each chunk's keys, padded with block 0."""
    positions: np.ndarray
    """``[batch * width]``: the position of each token in its sequence; 0 for padding."""
    rows: np.ndarray | None
    """``[batch * width]``: the index of the packed token at each place of the rectangle, or
    ``start`` for padding; None if ``width`` is 1."""
    places: np.ndarray | None
    """``[end - start]``: the place of each packed token in the flattened rectangle; None if
    ``width`` is 1."""
    fresh: bool
    """Whether all chunks begin at position 0, so that the new tokens attend only to each other."""
    mirror: int = 0
    """The number of the mirror with the keys and values of a group of decodes; 0 if the group has
    no mirror."""
    continues: bool = False
    """Whether the mirror already contains all tokens except the new ones."""
    room: int = 0
    """Capacity of the mirror for each sequence, in tokens; 0 if mirrors are not used."""


class PackedSpans(Struct, array_like=True):
    """The metadata of the chunks for kernels that read blocks in place. These kernels do not need
    rectangles."""

    queries: np.ndarray
    """``[num_chunks]``: number of tokens of each chunk."""
    keys: np.ndarray
    """``[num_chunks]``: number of tokens to which each chunk attends. These are all tokens of its
    sequence up to the end of the chunk."""
    blocks: np.ndarray
    """``[num_chunks * width]``: the blocks of each chunk's keys, padded with block 0."""
    width: int


class Packed(Struct, array_like=True):
    """The inputs of one forward. All arrays are int64."""

    ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    """The slot of the KV cache to which each token's key and value are written."""
    rows: np.ndarray
    """The indices of the packed tokens whose logits are needed."""
    groups: list[PackedGroup]
    copies: list[tuple[int, int]]
    """Blocks to copy before the forward, as (from, to)."""
    spans: PackedSpans | None = None
    """The metadata for kernels that read blocks in place; ``groups`` is then empty."""
    fed: np.ndarray | None = None
    """The previous step may have sampled tokens whose ids are still only on the device. ``fed`` has
    the indices of such tokens among the packed tokens. None if the host has all ids."""
    drawn: np.ndarray | None = None
    """For each entry of ``fed``: the row of its token in the previous step's sampled tokens. None
    if the row of each entry i is i."""
    adapters: np.ndarray | None = None
    """The number of each packed token's LoRA adapter; None if the tokens do not have adapters. A
    forward does not mix tokens with and without adapters."""
    further: Packed | None = None
    """The step's second forward. A step has a second forward, for the tokens with adapters, if it
    has tokens both with and without adapters. The rows of logits of the second forward follow those
    of the first."""

    @property
    def num_rows(self) -> int:
        """Number of rows of logits of the step."""
        return len(self.rows) + (self.further.num_rows if self.further is not None else 0)

    @property
    def awaits_drawn(self) -> bool:
        """Whether the ids of some tokens are only on the device."""
        return self.fed is not None or (self.further is not None and self.further.awaits_drawn)


def pack(
    batch: Batch, block_size: int, *, spans: bool = False, mirrors: Mirrors | None = None
) -> tuple[list[Chunk], Packed]:
    """Returns the chunks of a step in the order of their rows, and the inputs of the step's
    forward.

    ``spans``: whether a kernel will read blocks in place. ``mirrors``: assigns mirrors to decodes
    on a CPU.
    """
    if spans:
        chunks = list(batch.chunks)
        parts: list[_Part] = []
    else:
        chunks, parts = _arrange(batch.chunks, block_size)
    ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    rows: list[int] = []
    fed: list[int] = []
    drawn: list[int] = []
    for chunk in chunks:
        sequence, start, end, _ = chunk
        at = len(ids)
        if end - start == 1:
            block = sequence.block_table.blocks[start // block_size]
            if start < len(sequence.tokens):
                ids.append(sequence.tokens[start])
            else:
                ids.append(0)
                fed.append(at)
                drawn.append(sequence.drawn)
            positions.append(start)
            slot_mapping.append(block * block_size + start % block_size)
        else:
            ids += chunk.tokens
            positions += range(start, end)
            slot_mapping += _slot_mapping(sequence.block_table.blocks, block_size, start, end)
        rows += range(at + chunk.first_row - start, at + end - start)
    packed = Packed(ints(ids), ints(positions), ints(slot_mapping), ints(rows), [], batch.copies)
    if fed:
        packed.fed, packed.drawn = ints(fed), ints(drawn)
    if spans:
        packed.spans = _spans(chunks, block_size)
    else:
        packed.groups = [_group(part, block_size) for part in parts]
        if mirrors is not None:
            mirrors.assign(parts, packed.groups)
    return chunks, packed


def ints(values: Iterable[int]) -> np.ndarray:
    """Converts integers to an array of int64."""
    return np.fromiter(values, dtype=np.int64)


def encode_array(array: np.ndarray) -> bytes:
    """Encodes an array of a ``Packed`` as bytes: msgspec's ``enc_hook``."""
    return array.astype("<i8").tobytes()


def decode_array(_: type, encoded: bytes) -> np.ndarray:
    """Decodes an array of a ``Packed``: msgspec's ``dec_hook``."""
    return np.frombuffer(encoded, dtype="<i8").astype(np.int64)


class Mirrors:
    """Assigns mirrors to groups of decodes. A mirror is a contiguous copy of the keys and values of
    a group.

    Gathering blocks takes as long as attending over them. If the same sequences decode in several
    steps, the gathered copy is kept and only the new tokens are added. A mirror is valid if it has
    room for the new tokens, and if it has all earlier tokens of each sequence. The new tokens
    overwrite rejected drafts and dropped tokens in the mirror. A mirror that a step does not use
    becomes invalid.
    """

    def __init__(self, bytes_per_token: int, block_size: int) -> None:
        self._bytes_per_token = bytes_per_token
        self._block_size = block_size
        self._last: dict[tuple[int, ...], tuple[list[Chunk], int, int]] = {}
        """The mirrors of the previous step. A key has the ``id()`` of each sequence of a group. A
        value has the group's chunks in the previous step, the number of the group's mirror, and the
        mirror's ``room``."""
        self._numbers = count(1)

    def forget(self) -> None:
        """Makes all mirrors invalid, for example because a forward that should have added tokens to
        them was not computed."""
        self._last.clear()

    def assign(self, parts: Sequence[_Part], groups: Sequence[PackedGroup]) -> None:
        """Assigns mirrors to groups of decodes. A group gets its mirror of the previous step if
        this mirror is valid. If not, it gets a new mirror, unless the new mirror would exceed
        ``MIRROR_BYTES``. If the chunks of a group have several tokens, the group gets a mirror only
        if each chunk has a draft."""
        last, self._last = self._last, {}
        for part, group in zip(parts, groups, strict=True):
            if group.width > 1 and not all(c.draft for c in part.chunks):
                continue
            key = tuple(id(c.sequence) for c in part.chunks)
            before, number, room = last.get(key, ([], 0, 0))
            group.continues = group.length <= room and all(
                new.start <= old.end for old, new in zip(before, part.chunks, strict=False)
            )
            if group.continues:
                group.mirror, group.room = number, room
            elif not self.renew(group):
                continue
            number, room = group.mirror, group.room
            self._last[key] = (part.chunks, number, room)

    def renew(self, group: PackedGroup) -> bool:
        """Assigns a group of decodes a new mirror, which is filled from blocks. Returns False if
        the mirror would exceed ``MIRROR_BYTES``."""
        group.continues, group.mirror, group.room = False, 0, self._room(group.length)
        if group.batch * group.room * self._bytes_per_token > MIRROR_BYTES:
            return False
        group.mirror = next(self._numbers)
        return True

    def _room(self, length: int) -> int:
        """Capacity of a new mirror for each sequence, in tokens. The capacity exceeds ``length`` by
        at least an eighth and by at least 4 blocks, so that mirrors are rarely replaced."""
        block = self._block_size
        return -(-(length + max(4 * block, length // 8)) // block) * block


class _Part:
    """The chunks of one group. ``start``: index of the first packed token."""

    def __init__(self, start: int, block_size: int) -> None:
        self.start = start
        self._block_size = block_size
        self.chunks: list[Chunk] = []

    def takes(self, chunk: Chunk) -> bool:
        """Whether the chunk fits into the group with little padding."""
        if not self.chunks:
            return True
        first, last = self.chunks[0], self.chunks[-1]
        width, first_width = chunk.end - chunk.start, first.end - first.start
        if width == 1:
            # Padding is measured in tokens, not in whole blocks, so that groups rarely change
            # between steps.
            return (chunk.end - last.end) * len(self.chunks) <= DECODE_WASTE * self._block_size
        if first_width == 1 or (first.start == 0) != (chunk.start == 0):
            return False
        return 4 * width <= 5 * first_width + 32 and 2 * chunk.end <= 3 * first.end + 64


def _arrange(chunks: Sequence[Chunk], block_size: int) -> tuple[list[Chunk], list[_Part]]:
    """The chunks in the order of their rows, decodes first, and the groups of similar size."""
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
    """The attention metadata of a group."""
    chunks = part.chunks
    sizes = [c.end - c.start for c in chunks]
    width = max(sizes)
    # The length is not rounded up to whole blocks, because the attention would then also compute
    # the unused places of the last block.
    length = max([c.end for c in chunks])
    blocks, _ = _table(chunks, block_size)
    positions = ints([c.start for c in chunks])
    rows = places = None
    if width > 1 and len(chunks) == 1:
        within = np.arange(width)
        positions, rows, places = positions + within, part.start + within, within
    elif width > 1:
        each = np.array(sizes)[:, None]
        within = np.arange(width)
        real = within < each
        starts = part.start + np.concatenate([[0], np.cumsum(sizes)[:-1]])[:, None]
        rows = np.where(real, starts + within, part.start).ravel()
        places = np.flatnonzero(real)
        positions = np.where(real, positions[:, None] + within, 0).ravel()
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
    queries, keys = ints([c.end - c.start for c in chunks]), ints([c.end for c in chunks])
    return PackedSpans(queries, keys, blocks, width)


def _table(chunks: Sequence[Chunk], block_size: int) -> tuple[np.ndarray, int]:
    """Returns the block tables of the chunks, padded to the same width and flattened, and this
    width."""
    width = -(-max([c.end for c in chunks]) // block_size)
    blocks: list[int] = []
    for c in chunks:
        own = c.sequence.block_table.blocks[: -(-c.end // block_size)]
        blocks += own
        blocks += [PADDING_BLOCK] * (width - len(own))
    return ints(blocks), width


def _slot_mapping(blocks: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """The slots of the tokens ``[start, end)``."""
    slots: list[int] = []
    at = start
    while at < end:
        first = blocks[at // block_size] * block_size
        until = min(end, at - at % block_size + block_size)
        slots += range(first + at % block_size, first + (until - 1) % block_size + 1)
        at = until
    return slots
