"""Who is in the next step: continuous batching with chunked prefill. Pure: no clock, no torch.

A step has room for ``max_step_tokens``. Sequences that need one token go first, so that a long
prompt never holds up those that are being generated; prompts fill what is left, in chunks; then
new ones are let in. Where pages run out, the last in order is sent back to wait, and computed
again later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence

MAX_OVERTAKEN = 1024
"""Later arrivals that may be let in before a waiting sequence: the bound on its wait."""
SCORE_ROWS = 256
"""Scored tokens of a sequence in one step at most: each takes a row of logits ``[vocab]``."""


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the sequence has a result after it."""
        return self.end == self.sequence.target

    @property
    def first_row(self) -> int:
        """The first of its tokens whose logits are wanted; ``end`` where none are."""
        if self.sequence.scored:
            return min(max(self.start, self.sequence.num_prompt - 1), self.end)
        return self.end - 1 if self.completes else self.end


@dataclass(slots=True)
class Batch:
    """The work of one step."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before the forward, as (from, to)."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed forward."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


class Scheduler:
    """Keeps the waiting and the running sequences, and packs the steps."""

    def __init__(self, blocks: BlockManager, max_running: int, max_step_tokens: int) -> None:
        self._blocks = blocks
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.suspended: list[Sequence] = []
        self.preemptions = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting) or any(not s.held for s in self.running)

    def add(self, sequence: Sequence) -> None:
        """Lets a new sequence wait for its turn."""
        self.waiting.append(sequence)

    def forked(self, children: Iterable[Sequence]) -> None:
        """Takes in sequences that share another one's pages."""
        for child in children:
            room = len(self.running) < self._max_running
            (self.running if room else self.waiting).append(child)

    def suspend(self, sequence: Sequence) -> None:
        """Takes a sequence out of the steps. It keeps its pages while there are enough, and no
        slot."""
        self._take_out(sequence)
        self.suspended.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Lets a suspended sequence wait for its turn again, before those that came after it."""
        self.suspended.remove(sequence)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out; its pages go back."""
        self._take_out(sequence)
        self._blocks.free(sequence.table)

    def _take_out(self, sequence: Sequence) -> None:
        for held in (self.running, self.waiting, self.suspended):
            if sequence in held:
                held.remove(sequence)

    def schedule(self) -> Batch:
        """The next step's work."""
        batch = Batch()
        room = self._max_step_tokens
        # Those that are ready already wait for their controller, not for a forward.
        decodes = [s for s in self.running if s.target - s.computed == 1]
        prefills = [s for s in self.running if s.target - s.computed > 1]
        scheduled: set[int] = set()
        before = self.preemptions
        for sequence in [*decodes, *prefills]:
            if room == 0:
                break
            evicted = self.preemptions > before and sequence not in self.running
            if not evicted and self._grow(batch, sequence, room, scheduled):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
                scheduled.add(id(sequence))
        while room > 0 and self.waiting:
            sequence = self._next()
            slots = len(self.running) + sum(s.pending for s in self.running)
            if self.running and slots + 1 + sequence.pending > self._max_running:
                break
            if sequence.row is not None:
                # A fork that found no slot, with logits that wait for its controller.
                self._let_in(sequence)
            elif self._admit(batch, sequence, room):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
            elif self.running or not self._evict_idle(sequence):
                break
        return batch

    # --- the parts of a step --------------------------------------------------------------------

    def _next(self) -> Sequence:
        """The waiting sequence whose turn it is: by priority, then the client that has least
        running, then arrival. One that was overtaken ``MAX_OVERTAKEN`` times goes before all."""
        shares = Counter(s.client for s in self.running)
        return min(
            self.waiting,
            key=lambda s: (
                s.overtaken < MAX_OVERTAKEN,
                -s.priority,
                shares[s.client],
                s.arrival,
            ),
        )

    def _chunk(self, sequence: Sequence, start: int, room: int) -> Chunk:
        end = min(sequence.target, start + room)
        if sequence.scored:
            end = min(end, max(start, sequence.num_prompt - 1) + SCORE_ROWS)
        return Chunk(sequence, start, end)

    def _grow(self, batch: Batch, sequence: Sequence, room: int, scheduled: set[int]) -> bool:
        """Adds a running sequence's next chunk, sending others back to wait for its pages."""
        chunk = self._chunk(sequence, sequence.computed, room)
        while True:
            copies = self._blocks.reserve(sequence.table, chunk.start, chunk.end)
            if copies is not None:
                batch.chunks.append(chunk)
                batch.copies += copies
                return True
            victim = self._victim(scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False

    def _admit(self, batch: Batch, sequence: Sequence, room: int) -> bool:
        """Lets a waiting sequence in, where pages for all of its known tokens are available."""
        # The last token is computed in any case: its logits are what is wanted.
        kept = bool(sequence.table.pages)
        if kept:
            hit = sequence.computed
        else:
            limit = sequence.num_prompt - 1 if sequence.scored else sequence.target - 1
            hit = self._blocks.match(sequence.table, sequence.tokens, limit)
        needed = self._blocks.pages_for(sequence.target + 1) - len(sequence.table.pages)
        chunk = self._chunk(sequence, hit, room)
        spare = self._blocks.num_available - needed
        copies = None
        # A little stays free, so that what runs can grow before it must be sent back.
        if spare >= 0 and (not self.running or spare >= len(self.running)):
            copies = self._blocks.reserve(sequence.table, chunk.start, chunk.end)
        if copies is None:
            if not kept:
                self._blocks.free(sequence.table)
            return False
        sequence.computed = hit
        self.prefix_hit_tokens += 0 if kept else hit
        self._let_in(sequence)
        batch.chunks.append(chunk)
        batch.copies += copies
        return True

    def _let_in(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        for other in self.waiting:
            other.overtaken += other.arrival < sequence.arrival

    def _evict_idle(self, wanting: Sequence) -> bool:
        """Takes the pages of one that does not run, for the one whose turn it is."""
        idle = [s for s in self._idle() if s is not wanting]
        if idle:
            self._preempt(min(idle, key=_least))
        elif wanting.table.pages:
            self._preempt(wanting)
        else:
            return False
        return True

    def _idle(self) -> list[Sequence]:
        return [s for s in (*self.suspended, *self.waiting) if s.table.pages]

    def _victim(self, scheduled: set[int]) -> Sequence:
        """The sequence that loses its pages: one that does not run, where such a one has any; else
        one that is not in this step yet, lowest in priority, the last to arrive. There is one:
        whoever asks is not in this step yet."""
        candidates = self._idle() or [s for s in self.running if id(s) not in scheduled]
        return min(candidates, key=_least)

    def _preempt(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.table)
        sequence.computed = 0
        sequence.row = None
        sequence.held = False
        self.preemptions += 1
        if sequence in self.running:
            self.running.remove(sequence)
            self.waiting.append(sequence)


def _least(sequence: Sequence) -> tuple[int, int, int]:
    """The order in which sequences lose their pages."""
    return sequence.priority, -sequence.arrival, -sequence.seq
