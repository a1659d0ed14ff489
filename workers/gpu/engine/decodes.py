"""A batch of decodes as arrays. A decode computes one token of a sequence. The next steps update
these arrays and do not build new arrays.

Most steps compute the next token of each sequence of the previous step. In such a step, sequences
are not scheduled and packed one by one. Each position increases by one. If a sequence's last block
is full, the sequence gets another block.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import numpy as np

from .block_manager import PADDING_BLOCK, BlockManager
from .packing import Mirrors, Packed, PackedGroup, PackedSpans, ints
from .scheduler import Chunk

SPARE_COLUMNS = 8
"""Number of unused columns of a new ``Decodes._table``. If all columns are used, the table is
enlarged by the same number of columns."""


class Decodes:
    """The sequences of a batch of decodes, and the inputs of its next forward.

    ``chunks``: a chunk of one token for each sequence, in the order of the rows of ``packed``.
    ``changes``: the value of ``Scheduler.changes`` when the batch was scheduled. If the value has
    changed since, the next step must be scheduled again.
    """

    def __init__(
        self, chunks: Sequences[Chunk], packed: Packed, blocks: BlockManager, changes: int
    ) -> None:
        self.changes = changes
        self.sequences = [chunk.sequence for chunk in chunks]
        self.positions = packed.positions
        """``[num_seqs]``: the position of the token that the last launched forward computes."""
        self._groups = packed.groups
        self._spans = packed.spans is not None
        self._blocks = blocks
        self._last = ints(s.max_length - 1 for s in self.sequences)
        self._rows = np.arange(len(self.sequences))
        width = max(len(s.block_table.blocks) for s in self.sequences) + SPARE_COLUMNS
        self._table = np.full((len(self.sequences), width), PADDING_BLOCK, dtype=np.int64)
        for row, sequence in zip(self._table, self.sequences, strict=True):
            own = sequence.block_table.blocks
            row[: len(own)] = own

    def advance(self, on_device: bool) -> bool:
        """Advances each sequence by one token. ``on_device``: whether the next step computes tokens
        whose ids are still only on the device. Does not advance and returns False if the next step
        must be scheduled again. This is the case if too few blocks are available, or if a token on
        the device is the last of its sequence."""
        positions = self.positions + 1
        if on_device and (positions >= self._last).any():
            return False
        size = self._blocks.block_size
        for row in np.flatnonzero(positions % size == 0).tolist():
            if not self._add_block(row, int(positions[row])):
                return False
        self.positions = positions
        for sequence in self.sequences:
            sequence.num_computed_tokens += 1
        return True

    def pack(self, on_device: bool, mirrors: Mirrors | None) -> Packed:
        """The packed inputs of the forward that computes the tokens at ``positions``.
        ``on_device``: as in ``advance``."""
        size, positions = self._blocks.block_size, self.positions
        if on_device:
            ids = np.zeros(len(positions), dtype=np.int64)
        else:
            ids = ints(s.tokens[-1] for s in self.sequences)
        slot_mapping = self._table[self._rows, positions // size] * size + positions % size
        packed = Packed(ids, positions, slot_mapping, self._rows, [], [])
        if on_device:
            packed.fed = self._rows
        if self._spans:
            width = int(positions.max()) // size + 1
            queries = np.ones(len(positions), dtype=np.int64)
            table = self._table[:, :width].flatten()
            packed.spans = PackedSpans(queries, positions + 1, table, width)
        else:
            packed.groups = self._groups = [self._next(group, mirrors) for group in self._groups]
        return packed

    def _next(self, group: PackedGroup, mirrors: Mirrors | None) -> PackedGroup:
        """The inputs of a group for the next token of each of its sequences."""
        length = group.length + 1
        width = -(-length // self._blocks.block_size)
        found = PackedGroup(
            start=group.start,
            end=group.end,
            batch=group.batch,
            width=1,
            length=length,
            blocks=self._table[group.start : group.end, :width].flatten(),
            positions=self.positions[group.start : group.end],
            rows=None,
            places=None,
            fresh=False,
            mirror=group.mirror,
            continues=True,
            room=group.room,
        )
        if mirrors is not None and (not group.mirror or length > group.room):
            mirrors.renew(found)
        return found

    def _add_block(self, row: int, position: int) -> bool:
        """Registers the full last block of a sequence, and adds another block. Returns False if no
        block is available."""
        sequence = self.sequences[row]
        table = sequence.block_table
        self._blocks.commit(table, sequence.tokens, position)
        if self._blocks.reserve(table, position, position + 1) is None:
            return False
        column = position // self._blocks.block_size
        if column >= self._table.shape[1]:
            more = np.full((len(self._table), SPARE_COLUMNS), PADDING_BLOCK, dtype=np.int64)
            self._table = np.concatenate([self._table, more], axis=1)
        self._table[row, column] = table.blocks[column]
        return True
