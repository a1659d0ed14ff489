"""A step between its forward and its sampling: rows of logits, and the sequences to sample.

A row of logits belongs to one token of a sequence. The row of a deferred sequence is *kept*: it is
copied, and the sequence is sampled from the copy in a later step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..model.runner import Forward
from .scheduler import Chunk
from .sequence import KeptRow, Sequence


class Part(NamedTuple):
    """A chunk, and its rows of the forward's logits: ``[row, row + rows)``."""

    chunk: Chunk
    row: int
    rows: int

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of a score are computed from the rows."""
        return self.chunk.sequence.scored and self.rows > 0


@dataclass(slots=True)
class PendingStep:
    """A step whose forward has been launched and whose rows have not been sampled.

    The step's rows of logits are numbered: first the rows of the forward, then the rows in
    ``kept``.
    """

    forward: Forward | None = None
    """The launched forward; None if all sequences of the step are sampled from kept rows, or if the
    step is empty."""
    kept: list[KeptRow] = field(default_factory=list)
    """The logits of rescheduled sequences, from which this step samples them."""
    rows: dict[Sequence, int] = field(default_factory=dict)
    """The sequences that will be sampled, each with its row number."""
    keeping: list[tuple[int, KeptRow]] = field(default_factory=list)
    """The rows of the forward whose sequences are deferred in this step. Each row comes with the
    object that receives a copy of the row."""
    decodes: tuple[list[Sequence], np.ndarray] | None = None
    """None if ``Decodes`` has not packed the forward. If it has, the forward computes one token of
    each sequence, and this field has the sequences and the positions of these tokens."""
    chunked: list[Part] = field(default_factory=list)
    """The parts of a forward that is not described by ``decodes``."""
    launched_at: float = field(default_factory=time.monotonic)

    @property
    def parts(self) -> list[Part]:
        """The chunks that the forward computes, in the order of its rows."""
        if self.decodes is None:
            return self.chunked
        rows = enumerate(zip(self.decodes[0], self.decodes[1].tolist(), strict=True))
        return [Part(Chunk(sequence, at, at + 1), row, 1) for row, (sequence, at) in rows]

    @property
    def scored(self) -> list[Part]:
        """The parts whose rows yield the log-probabilities of scores."""
        return [part for part in self.chunked if part.is_scored]

    @property
    def ready(self) -> list[tuple[int, int]]:
        """The sequences that will be sampled, as (request, seq)."""
        return [(s.request, s.seq) for s in self.rows]

    @property
    def drafted(self) -> list[Sequence]:
        """The sequences whose drafts the forward computes."""
        return [part.chunk.sequence for part in self.chunked if part.chunk.draft]

    @property
    def num_forward_rows(self) -> int:
        """Number of rows of logits of the forward."""
        return self.forward.num_rows if self.forward is not None else 0

    @property
    def computed(self) -> bool:
        """Whether the device has finished the forward."""
        return self.forward is None or self.forward.work.done

    @property
    def logits(self) -> torch.Tensor | None:
        """The step's rows of logits, ``[rows, vocab]``, float32; None if the step has no rows.
        Waits for the forward, and raises its error."""
        if self.forward is not None:
            self.forward.work.wait()
        return self.device_logits()

    def device_logits(self) -> torch.Tensor | None:
        """The rows of ``logits``, returned before the forward has ended. So only work that is
        queued after the forward may call this method."""
        parts = [kept.logits.unsqueeze(0) for kept in self.kept if kept.logits is not None]
        if self.forward is not None and self.forward.num_rows:
            parts.insert(0, self.forward.work.value)
        if len(parts) < 2:
            return parts[0] if parts else None
        return torch.cat(parts)

    def add_kept(self, sequences: Iterable[Sequence]) -> None:
        """Adds rescheduled sequences to this step, which samples them from their kept rows.
        Sequences without a kept row are ignored."""
        for sequence in sequences:
            if sequence in self.rows or sequence.row is None:
                continue
            own = [row for row, kept in self.keeping if kept is sequence.row]
            if own:
                # The sequence was deferred in this step, so its logits are still in the forward's
                # rows.
                self.rows[sequence] = own[0]
                sequence.row = None
            else:
                self.rows[sequence] = self.num_forward_rows + len(self.kept)
                self.kept.append(sequence.row)

    def keep_rows(self, logits: torch.Tensor) -> None:
        """Copies the rows of sequences that were deferred in this step. ``logits``: all rows of the
        step. Called by work on the device queue."""
        for row, kept in self.keeping:
            kept.logits = logits[row].clone()

    def keep(self, row: int) -> KeptRow:
        """Returns an object for a copy of a row of logits, because the row's sequence is deferred
        in this step. The object has the copy already, or receives it later. ``row``: the number of
        the row."""
        if row >= self.num_forward_rows:
            return self.kept[row - self.num_forward_rows]
        kept = KeptRow()
        self.keeping.append((row, kept))
        return kept
