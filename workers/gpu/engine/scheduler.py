"""The plan of the next step: continuous batching with chunked prefill. Pure: no clock, no torch.

A step has room for ``max_num_batched_tokens``. Decodes, which need one token each, go first, so
that a long prompt never delays them; prompts fill what is left, in chunks; then waiting sequences
are admitted. Where blocks run out, the last in order is preempted: it gives its
blocks back, waits, and is computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence
from .waiting import WaitingQueue

SCORE_ROWS = 256
"""Scored tokens of a sequence in one step at most: each takes a row of logits ``[vocab]``."""
MAX_HELD = 4
"""Running and deferred sequences, as a multiple of ``max_num_seqs``, from which on none is
admitted. A deferred sequence has no slot but keeps its row of logits (``vocab`` * 4 bytes). Without
this bound, the whole queue would be admitted and deferred while a controller worker does not
respond, and the device would run out of memory."""


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int
    draft: Tokens[int] = ()
    """The last of them, where these are not the sequence's own but a draft behind its last."""

    @property
    def tokens(self) -> Tokens[int]:
        """The ids of its tokens."""
        own = self.sequence.tokens[self.start : self.end]
        return [*own, *self.draft] if self.draft else own

    @property
    def completes(self) -> bool:
        """Whether the sequence has a result after it."""
        return self.end - len(self.draft) == self.sequence.target

    @property
    def first_row(self) -> int:
        """The first of its tokens whose logits are needed; ``end`` where none are."""
        if self.sequence.scored:
            return min(max(self.start, self.sequence.scored_from - 1), self.end)
        return self.end - len(self.draft) - 1 if self.completes else self.end

    @property
    def scored_tokens(self) -> Tokens[int]:
        """For a score: the tokens that follow those whose logits are needed."""
        return self.sequence.tokens[self.first_row + 1 : self.end + 1]


@dataclass(slots=True)
class Batch:
    """The work of one step."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before the forward, as (from, to)."""
    rescheduled: list[Sequence] = field(default_factory=list)
    """Sequences that are sampled from the logits that they kept while they were deferred."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that had waited and are in this step."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed forward."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


class Scheduler:
    """The tables of the live sequences, and what each step computes.

    Every live sequence is in exactly one table. ``waiting`` sequences wait for a slot and for
    blocks, and ``running`` ones have both. ``deferred`` sequences have blocks and logits, but their
    decision has not arrived. ``suspended`` ones wait to be resumed. A deferred sequence gives its
    slot up; when it is rescheduled it runs again at once, so that more than ``max_num_seqs`` may
    run for a while. A step then skips the last in order, and none is admitted. Nor is one admitted
    while ``MAX_HELD`` times as many run or are deferred.
    """

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}
        self.deferred: dict[Sequence, bool] = {}
        """Whether each had a slot: a fork may find none and be sampled all the same."""
        self.suspended: dict[Sequence, None] = {}
        self.changes = 0
        """Number of changes to the tables, or to the remaining work of a sequence, from outside a
        step. While it is unchanged, a batch of decodes is followed by the same batch."""
        self._rescheduled: list[Sequence] = []
        """Those that were rescheduled since the last step was scheduled."""
        self._stalled = False
        """Whether no sequence runs and the first waiting one cannot be admitted, because the
        deferred ones leave too few blocks or are too many. No step then does anything until a table
        changes."""
        self.preemptions = 0
        self.deferrals = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running) or (bool(self.waiting) and not self._stalled)

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence, which waits to be admitted. It arrived later than all before."""
        self.waiting.append(sequence)
        self.changed()

    def forked(self, children: Iterable[Sequence]) -> None:
        """Takes sequences that share another one's blocks."""
        for child in children:
            if len(self.running) < self._max_num_seqs:
                self._run(child)
            else:
                self.waiting.put_back(child)
        self.changed()

    def defer(self, sequence: Sequence) -> None:
        """Takes a sequence that was to be sampled out of the steps until ``reschedule``. It keeps
        its blocks while there are enough, and no slot."""
        self.deferrals += 1
        self.deferred[sequence] = sequence in self.running
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self.changed()

    def reschedule(self, sequence: Sequence) -> None:
        """Puts a deferred sequence back to where it was; any other stays where it is."""
        had_slot = self.deferred.pop(sequence, None)
        if had_slot is None:
            return
        if had_slot:
            self.running[sequence] = None
            self._rescheduled.append(sequence)
        else:
            self.waiting.put_back(sequence)
        self.changed()

    def suspend(self, sequence: Sequence) -> None:
        """Takes a sequence out of the steps until ``resume``. It keeps its blocks while there are
        enough, and no slot."""
        self._take_out(sequence)
        self.suspended[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        """Lets a suspended sequence wait to be admitted, at the place of its arrival."""
        self._take_out(sequence)
        self.waiting.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out for good; its blocks are given back."""
        self._take_out(sequence)
        self._blocks.free(sequence.block_table)

    def changed(self) -> None:
        """Other tokens of a sequence are to be computed than was known."""
        self.changes += 1
        self._stalled = False

    def take_rescheduled(self) -> list[Sequence]:
        """Sequences with logits of their own that were rescheduled since the last step was
        scheduled: they can be sampled with that one. None while more run than there are slots."""
        found, self._rescheduled = self._rescheduled, []
        if len(self.running) > self._max_num_seqs:
            return []
        return [s for s in found if s.row is not None and s in self.running]

    def schedule(self) -> Batch:
        """The next step's work."""
        self._rescheduled.clear()
        batch = Batch()
        room = self._max_num_batched_tokens
        active: Iterable[Sequence] = self.running
        if len(self.running) > self._max_num_seqs:
            active = nlargest(self._max_num_seqs, self.running, key=_rank)
        # Those that are rescheduled have their logits already: they need no forward.
        ending = [s for s in active if s.ends_with_next]
        if ending:
            active = [s for s in active if not s.ends_with_next]
        decodes = [s for s in active if s.target - s.num_computed_tokens == 1]
        prefills = [s for s in active if s.target - s.num_computed_tokens > 1]
        scheduled: set[int] = set()
        for sequence in [*decodes, *prefills]:
            if room == 0:
                break
            preempted = sequence not in self.running
            if not preempted and self._grow(batch, sequence, room, scheduled):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
                scheduled.add(id(sequence))
        while room > 0 and self.waiting:
            slots = len(self.running) - len(ending) + sum(s.pending_forks for s in self.running)
            if self.running and slots >= self._max_num_seqs:
                break
            sequence = self.waiting.first()
            if sequence.drawn >= 0:
                # It was preempted just now, and its token is still on the device.
                break
            if self.running and slots + 1 + sequence.pending_forks > self._max_num_seqs:
                break
            if sequence.row is not None:
                # A fork that found no slot and has its logits: it needs no forward.
                self._admit(sequence)
            elif len(self.running) + len(self.deferred) >= MAX_HELD * self._max_num_seqs:
                break
            elif sequence.continued and self._prefills(sequence.request):
                # It waits for the blocks of the text that they have in common.
                break
            elif self._prefill(batch, sequence, room):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
            elif self.running or not self._evict_for(sequence):
                break
        batch.rescheduled = [s for s in active if s.row is not None]
        self._stalled = not self.running and bool(self.waiting)
        return batch

    # --- the parts of a step --------------------------------------------------------------------

    def _chunk(self, sequence: Sequence, start: int, room: int) -> Chunk:
        end = min(sequence.target, start + room)
        if sequence.scored:
            end = min(end, max(start, sequence.scored_from - 1) + SCORE_ROWS)
        return Chunk(sequence, start, end)

    def _grow(self, batch: Batch, sequence: Sequence, room: int, scheduled: set[int]) -> bool:
        """Adds a running sequence's next chunk, and preempts others where blocks run out."""
        chunk = self._chunk(sequence, sequence.num_computed_tokens, room)
        alone = chunk.end - chunk.start == 1 and sequence.drawn < 0 and chunk.completes
        if sequence.draft and alone and self._spare(len(sequence.draft), room):
            chunk = chunk._replace(end=chunk.end + len(sequence.draft), draft=sequence.draft)
        while True:
            copies = self._blocks.reserve(sequence.block_table, chunk.start, chunk.end)
            if copies is not None:
                batch.chunks.append(chunk)
                batch.copies += copies
                return True
            victim = self._victim(scheduled)
            self._preempt(victim)
            if victim is sequence:
                return False

    def _prefills(self, request: int) -> bool:
        """Whether a running sequence of a request has more than its last token to compute."""
        return any(
            s.request == request and s.target - s.num_computed_tokens > 1 for s in self.running
        )

    def _spare(self, drafted: int, room: int) -> bool:
        """Whether a draft takes neither tokens of the step nor blocks from other sequences."""
        blocks = self._blocks.blocks_for(drafted) + 1
        running = len(self.running)
        return room >= running + drafted and self._blocks.num_available >= running + blocks

    def _prefill(self, batch: Batch, sequence: Sequence, room: int) -> bool:
        """Admits a waiting sequence, where blocks for all of its known tokens are available."""
        # The last token is computed in any case, for its logits.
        kept = bool(sequence.block_table.blocks)
        if kept:
            hit = sequence.num_computed_tokens
        else:
            limit = sequence.scored_from - 1 if sequence.scored else sequence.target - 1
            hit = self._blocks.match(sequence.block_table, sequence.tokens, limit)
        needed = self._blocks.blocks_for(sequence.target + 1) - len(sequence.block_table.blocks)
        chunk = self._chunk(sequence, hit, room)
        spare = self._blocks.num_available - needed
        copies = None
        # A little stays free, so that the admitted can grow before one of them is preempted.
        if spare >= 0 and (not self.running or spare >= len(self.running) + len(self.deferred)):
            copies = self._blocks.reserve(sequence.block_table, chunk.start, chunk.end)
        if copies is None:
            if not kept:
                self._blocks.free(sequence.block_table)
            return False
        sequence.num_computed_tokens = hit
        if not kept:
            self.prefix_hit_tokens += hit
            self.prefix_query_tokens += sequence.target
        batch.admitted.append(sequence)
        if sequence.prompt_usage.cached is None:
            sequence.prompt_usage.cached = hit
        self._admit(sequence)
        batch.chunks.append(chunk)
        batch.copies += copies
        return True

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.admit(sequence)
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.running[sequence] = None
        self.waiting.count_running(sequence.client, 1)

    def _evict_for(self, sequence: Sequence) -> bool:
        """Frees blocks for a waiting sequence while none runs: first those of sequences that
        cannot be scheduled, then those of deferred ones that come after it in order."""
        idle = [s for s in self._idle() if s is not sequence]
        after = [s for s in self.deferred if _rank(s) < _rank(sequence)]
        if idle or after:
            self._preempt(min(idle or after, key=_rank))
        elif sequence.block_table.blocks and not self.deferred:
            self._preempt(sequence)
        else:
            return False
        return True

    def _idle(self) -> list[Sequence]:
        """The sequences that have blocks and are not admitted."""
        return [s for s in (*self.suspended, *self.waiting.returned) if s.block_table.blocks]

    def _victim(self, scheduled: set[int]) -> Sequence:
        """The sequence that loses its blocks to a running one. It is a sequence that is not
        admitted, if one has blocks; else the last to arrive of the lowest priority that is not in
        this step yet. Such a sequence always exists: the sequence that needs the blocks is not in
        this step yet."""
        admitted = (*self.running, *self.deferred)
        return min(self._idle() or [s for s in admitted if id(s) not in scheduled], key=_rank)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a sequence's blocks and logits; if it was admitted, it waits again."""
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.row = None
        self.preemptions += 1
        if sequence in self.running or sequence in self.deferred:
            self._take_out(sequence)
            self.waiting.put_back(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """Takes a sequence out of the table that it is in, if any."""
        if sequence in self.running:
            del self.running[sequence]
            self.waiting.count_running(sequence.client, -1)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.deferred:
            if self.deferred.pop(sequence):
                self.waiting.count_running(sequence.client, -1)
        else:
            self.suspended.pop(sequence, None)
        self.changed()


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    """The order of admitted sequences: the least loses its blocks or its place in a step first."""
    return sequence.priority, -sequence.arrival, -sequence.seq
