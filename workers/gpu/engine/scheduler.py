"""Plans the next step, with continuous batching and chunked prefill. The scheduler uses neither a
clock nor torch.

A step computes at most ``max_num_batched_tokens`` tokens. Decodes need one token each, or more with
a draft. They are scheduled first, so that a long prompt does not delay them. Prefill chunks of
running sequences follow, and then waiting sequences are admitted. If blocks run out, a sequence is
preempted: its blocks are freed, and it is computed again later. The sequence that is *last in
order* is preempted first: the sequence with the lowest priority, and among these the latest
arrival. A *slot* is one of the ``max_num_seqs`` places for running sequences. Clients share the
slots. The first waiting sequence may lack a slot or blocks while its client does not have a running
or deferred sequence. Then sequences of the clients with the most such sequences are preempted
(``preemption.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import chain
from typing import NamedTuple

from .block_manager import BlockManager, Content
from .preemption import Lack, choose_victims, from_largest_client, num_blocks, num_freed, rank
from .sequence import Sequence
from .waiting import WaitingQueue

SCORE_ROWS = 256
"""Maximum number of tokens that one step scores for a sequence. Each of them needs a row of logits
``[vocab]``."""
MAX_LIKELY = 20_480
"""Bound on the most likely tokens that scores report in one step. Each scored token counts as its
``top_logprobs`` and ``LIKELY_ROW`` more. On one core of a CPU, a step at the bound takes 70 ms for
them if the vocabulary has 131,072 tokens. The sequences with ``top_logprobs`` divide the bound."""
LIKELY_ROW = 64
"""The time to search a row of logits, as a number of reported tokens."""
MAX_ADMITTED = 4
"""Bound on running and deferred sequences, as a multiple of ``max_num_seqs``. At the bound,
sequences without logits are not admitted. A deferred sequence does not have a slot, but keeps its
row of logits (``vocab`` * 4 bytes). If a controller worker does not respond, all its sequences
become deferred. Without the bound, all waiting sequences would then be admitted and deferred, until
the device runs out of memory. At the bound, a sequence can be preempted for the first sequence of
another client."""
RECOMPUTED = 8
"""Bound on recomputation. A sequence that is preempted for another client must be computed again.
On average, tokens that are computed again for this reason may take at most 1 / ``RECOMPUTED`` of
``max_num_batched_tokens`` in each scheduled step. Without this bound, the engine could have to
compute a long text again for each of many short requests."""
MAX_DISPLACED = 8
"""At most 1 / ``MAX_DISPLACED`` of ``max_num_seqs`` sequences may wait because they were preempted
for other clients. If no such sequence is waiting, the next preemption may exceed this bound. A
client is usually one session. Without this bound, a user with many sessions could preempt all but
one of another user's sequences."""

MATCH_STEPS = 32
"""If a waiting sequence lacks blocks, its prefix is matched again when it may fit, and at least
every this number of attempts. Matching 128k tokens takes 5 ms, during which all sequences wait."""


class Chunk(NamedTuple):
    """Tokens ``[start, end)`` of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    end: int
    draft: Tokens[int] = ()
    """The draft tokens at the end of the chunk, after the sequence's own last token."""

    @property
    def tokens(self) -> Tokens[int]:
        """The ids of the chunk's tokens, including the draft."""
        own = self.sequence.tokens[self.start : self.end]
        return [*own, *self.draft] if self.draft else own

    @property
    def completes(self) -> bool:
        """Whether the sequence can be sampled, or its score is complete, after this chunk
        (``Sequence.target``)."""
        return self.end - len(self.draft) == self.sequence.target

    @property
    def first_row(self) -> int:
        """The first position whose logits are needed; ``end`` if no logits are needed."""
        if self.sequence.scored:
            return min(max(self.start, self.sequence.scored_from - 1), self.end)
        return self.end - len(self.draft) - 1 if self.completes else self.end

    @property
    def scored_tokens(self) -> Tokens[int]:
        """If the sequence is a score: the tokens whose log-probabilities are computed from this
        chunk's logits."""
        return self.sequence.tokens[self.first_row + 1 : self.end + 1]


@dataclass(slots=True)
class Batch:
    """The work of one step."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy before the forward, as (from, to)."""
    rescheduled: list[Sequence] = field(default_factory=list)
    """Sequences that are sampled from their kept rows of logits, without a forward."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that were admitted in this step and have a chunk."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the forward computes, including drafts."""
        return sum(chunk.end - chunk.start for chunk in self.chunks)


@dataclass(slots=True)
class _Unfit:
    """A waiting sequence that could not be admitted when its prefix was last matched, because too
    few blocks were available."""

    sequence: Sequence
    target: int
    """``Sequence.target`` at that time, and likewise below."""
    spare: int
    """Number of available blocks that the sequence would have left; negative if too few blocks were
    available."""
    num_available: int
    num_freed: int
    """Number of available blocks, and ``BlockManager.num_freed``."""
    following: Content | None
    """The prefix has become longer if a block with this key is registered."""
    attempts: int = 0
    """Number of later attempts without a match."""


class Scheduler:
    """The tables of the live sequences, and the plan of each step.

    Every live sequence is in exactly one table. ``waiting`` sequences wait for a slot and for
    blocks. ``running`` sequences have blocks. ``deferred`` sequences have blocks and logits, but
    their controllers' decisions have not arrived. ``suspended`` sequences wait for ``resume``.

    When a running sequence is deferred, it gives up its slot. When it is rescheduled, it runs again
    at once, even if no slot is free. So more than ``max_num_seqs`` sequences may run for a while.
    Each step then skips the sequences that are last in order, and waiting sequences are not
    admitted. Sequences without logits are also not admitted while ``MAX_ADMITTED`` *
    ``max_num_seqs`` sequences run or are deferred. A request with ``n`` above 1 is admitted when
    one slot is free. Free slots are kept for its other sequences, except from the first sequence of
    another client.
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
        """For each deferred sequence: whether it was running before, and so had a slot. A waiting
        fork can be deferred too."""
        self.suspended: dict[Sequence, None] = {}
        self.changes = 0
        """Number of changes to the tables or to the remaining work of a sequence. If the last batch
        had only decodes, and this number has not changed since, the next batch has the same
        sequences."""
        self._rescheduled: list[Sequence] = []
        """Sequences that were rescheduled since the last step was scheduled."""
        self._refused: Sequence | None = None
        """The first waiting sequence, if the last step could not admit it because a slot or blocks
        were missing, or because of the bound ``MAX_ADMITTED``."""
        self._unfit: _Unfit | None = None
        """The last sequence that was matched and could not be admitted."""
        self._recomputed = 0
        """The debt of recomputation, in tokens. A preemption for another client adds the tokens
        that are computed again. Each step subtracts the tokens that ``RECOMPUTED`` allows. While
        the debt is above 0, no sequence is preempted for another client."""
        self.owes_room = False
        """Whether sequences could be preempted for ``_refused`` in one of the next steps. While
        this flag is set, each step must be scheduled, and may not be derived from the previous step
        (``decodes.py``). ``schedule`` sets and clears this flag."""
        self._num_likely = 0
        """Number of sequences that divide ``MAX_LIKELY`` in the step that is being scheduled."""
        self._stalled = False
        """Whether no sequence runs, but the first waiting sequence cannot be admitted: too many
        sequences are deferred, or the deferred sequences leave too few blocks. ``schedule`` sets
        this flag; a change to the tables clears it."""
        self.preemptions = 0
        self.deferrals = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running) or (bool(self.waiting) and (not self._stalled or self.owes_room))

    def add(self, sequence: Sequence) -> None:
        """Adds a new sequence, which must be the latest arrival. The sequence waits to be
        admitted."""
        self.waiting.append(sequence)
        self.changed()

    def forked(self, children: Iterable[Sequence]) -> None:
        """Adds new forks. If a slot is free, the fork runs. If not, it waits."""
        for child in children:
            if len(self.running) < self._max_num_seqs:
                self._run(child)
            else:
                self.waiting.put_back(child)
        self.changed()

    def compute_anew(self, sequence: Sequence) -> None:
        """Frees the blocks of a sequence whose tokens are replaced. The sequence then waits to be
        admitted."""
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        self._unfit = None
        if sequence not in self.waiting:
            self._take_out(sequence)
            self.waiting.put_back(sequence)
        self.changed()

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Adds sequences of an admitted request. They wait to be admitted."""
        for sequence in sequences:
            self.waiting.put_back(sequence)
        self.changed()

    def defer(self, sequence: Sequence) -> None:
        """Defers a ready sequence until ``reschedule`` is called. The sequence gives up its slot,
        and keeps its blocks until other sequences need them."""
        self.deferrals += 1
        self.deferred[sequence] = sequence in self.running
        if sequence in self.running:
            del self.running[sequence]
        else:
            self.waiting.remove(sequence)
        self.changed()

    def reschedule(self, sequence: Sequence) -> None:
        """Returns a deferred sequence to the table that it came from. Ignores other sequences."""
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
        """Suspends a sequence until ``resume`` is called. The sequence gives up its slot, and keeps
        its blocks until other sequences need them."""
        self._take_out(sequence)
        self.suspended[sequence] = None

    def resume(self, sequence: Sequence) -> None:
        """Moves a suspended sequence to the waiting queue. It keeps its original place in the order
        of arrival."""
        self._take_out(sequence)
        self.waiting.put_back(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence and frees its blocks."""
        if self._unfit is not None and self._unfit.sequence is sequence:
            self._unfit = None
        self._take_out(sequence)
        self._blocks.free(sequence.block_table)

    def compute_again(self) -> None:
        """Frees the blocks and logits of all sequences. The sequences are computed again."""
        for sequence in list(self._with_blocks()):
            self._preempt(sequence)
        self._blocks.outdate(())

    def keep_blocks(self) -> list[Sequence]:
        """Discards all logits and keeps all blocks. If a sequence had logits, its last token is
        computed again. Deferred sequences wait to be admitted again. Returns the sequences that
        have blocks."""
        kept = list(self._with_blocks())
        for sequence in kept:
            last = len(sequence.tokens) - 1
            if sequence.row is not None:
                sequence.row = None
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, last)
            if sequence in self.deferred:
                self._take_out(sequence)
                self.waiting.put_back(sequence)
        self._blocks.outdate([sequence.block_table for sequence in kept])
        self.changed()
        return [sequence for sequence in kept if sequence.block_table.blocks]

    def changed(self) -> None:
        """Records that a table or the remaining work of a sequence has changed."""
        self.changes += 1
        self._stalled = False

    def take_rescheduled(self) -> list[Sequence]:
        """Returns the sequences that were rescheduled after the current step was scheduled, and
        have kept rows of logits. The current step can still sample them. The result is empty if
        more than ``max_num_seqs`` sequences run. Each sequence is returned only once."""
        found, self._rescheduled = self._rescheduled, []
        if len(self.running) > self._max_num_seqs:
            return []
        return [s for s in found if s.row is not None and s in self.running]

    def schedule(self) -> Batch:
        """Plans the next step and returns its work."""
        self._rescheduled.clear()
        self._recomputed = max(0, self._recomputed - self._max_num_batched_tokens // RECOMPUTED)
        self._make_room()
        self._refused = None
        batch = Batch()
        room = self._max_num_batched_tokens
        active: Iterable[Sequence] = self.running
        if len(self.running) > self._max_num_seqs:
            active = nlargest(self._max_num_seqs, self.running, key=rank)
        ending = [s for s in active if s.ends_with_next]
        if ending:
            active = [s for s in active if not s.ends_with_next]
        # Rescheduled sequences already have their logits. They are in neither of the next two
        # lists.
        decodes = [s for s in active if s.target - s.num_computed_tokens == 1]
        prefills = [s for s in active if s.target - s.num_computed_tokens > 1]
        self._num_likely = sum(map(_reports_likely, prefills))
        scheduled: set[int] = set()
        for sequence in [*decodes, *prefills]:
            if room == 0:
                break
            preempted = sequence not in self.running
            if not preempted and self._grow(batch, sequence, room, scheduled):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
                scheduled.add(id(sequence))
        self._admit_waiting(batch, room, len(ending))
        self.owes_room = bool(self._victims_of_others())
        batch.rescheduled = [s for s in active if s.row is not None]
        self._stalled = not self.running and bool(self.waiting)
        return batch

    # --- the parts of a step --------------------------------------------------------------------

    def _admit_waiting(self, batch: Batch, room: int, num_ending: int) -> None:
        """Admits waiting sequences and adds their first chunks to the batch, up to ``room`` tokens.
        ``num_ending``: number of running sequences that end with their next token."""
        while room > 0 and self.waiting:
            sequence = self.waiting.first()
            slots = len(self.running) - num_ending
            if sequence.pending_forks or self.waiting.num_running(sequence.client):
                slots += sum(s.pending_forks for s in self.running)
            if self.running and slots >= self._max_num_seqs:
                self._refused = sequence
                break
            if sequence.drawn >= 0:
                # The sequence was preempted in this step. Its last token is still on the device, so
                # the sequence is not admitted before the next step.
                break
            if sequence.row is not None:
                # This sequence is a fork that had to wait for a slot. It already has logits, and
                # does not need a forward.
                self._admit(sequence)
            elif self._num_over(1) > 0:
                self._refused = sequence
                break
            elif sequence.waits_for_blocks and self._prefills(sequence.request):
                # Another sequence of the request is computing the prompt. The waiting sequence can
                # reuse the blocks of the prompt later.
                break
            elif self._prefill(batch, sequence, room):
                room -= batch.chunks[-1].end - batch.chunks[-1].start
            elif not (self._evict_suspended if self.running else self._evict_for)(sequence):
                self._refused = sequence
                break

    def _make_room(self) -> None:
        """Preempts sequences for the refused sequence (``_victims_of_others``). Does nothing if
        ``_recomputed`` is above 0."""
        victims = self._victims_of_others() if self._recomputed <= 0 else []
        for victim in victims:
            victim.displaced = True
            self._preempt(victim)

    def _victims_of_others(self) -> list[Sequence]:
        """The sequences of other clients to preempt so that the refused sequence can be admitted.
        Empty if the refused sequence's client has an admitted sequence. Running sequences are
        preempted for a slot. For blocks, and for the bound ``MAX_ADMITTED``, deferred sequences are
        preempted too."""
        refused = self._refused
        if refused is None or self.waiting.num_running(refused.client):
            return []
        if not self.waiting or self.waiting.first() is not refused:
            return []
        victims: list[Sequence] = []
        slots = len(self.running) + 1 - self._max_num_seqs
        if self.running and slots > 0:
            lack = Lack(slots, 0)
            victims = choose_victims(refused, self.running, lack, self._blocks)
            if not victims:
                return []
        lack = Lack(
            self._num_over(1 - len(victims)) if refused.row is None else 0,
            self._lacking_blocks(refused) - num_freed(victims, self._blocks),
        )
        if lack.slots > 0 or lack.blocks > 0:
            chosen = set(victims)
            rest = [s for s in (*self.running, *self.deferred) if s not in chosen]
            more = choose_victims(refused, rest, lack, self._blocks)
            if not more:
                return []
            victims += more
        displaced = sum(s.displaced for s in self.waiting.returned)
        if displaced and displaced + len(victims) > self._max_num_seqs // MAX_DISPLACED:
            return []
        return victims

    def _num_over(self, change: int) -> int:
        """The number of running and deferred sequences above the bound ``MAX_ADMITTED``, after
        their number has changed by ``change``. Negative below the bound."""
        admitted = len(self.running) + len(self.deferred) + change
        return admitted - MAX_ADMITTED * self._max_num_seqs

    def _lacking_blocks(self, sequence: Sequence) -> int:
        """The number of further blocks that must become free before a waiting sequence can be
        admitted and all admitted sequences can grow."""
        table, kept = sequence.block_table, bool(sequence.block_table.blocks)
        unfit = None if kept else self._unfit_of(sequence)
        if unfit is not None:
            lacking = unfit.num_available - self._blocks.num_available - unfit.spare
        else:
            if not kept:
                self._blocks.match(table, sequence.tokens, self._match_limit(sequence))
            needed = self._blocks.blocks_for(sequence.target + 1) - len(table.blocks)
            lacking = needed - self._blocks.num_available
            if not kept:
                self._blocks.free(table)
        admitted = (*self.running, *self.deferred)
        return lacking + sum(self._blocks.num_reserved(s.block_table, s.target) for s in admitted)

    def _chunk(self, sequence: Sequence, start: int, room: int) -> Chunk:
        end = min(sequence.target, start + room)
        if sequence.scored:
            end = min(end, max(start, sequence.scored_from - 1) + self._score_rows(sequence))
        return Chunk(sequence, start, end)

    def _score_rows(self, sequence: Sequence) -> int:
        """Maximum number of scored tokens of a sequence in this step."""
        most = sequence.sampling.top_logprobs
        if not most:
            return SCORE_ROWS
        # ``_num_likely`` does not count a running sequence whose last token is left.
        sharing = max(1, self._num_likely + (sequence not in self.running))
        return max(1, min(SCORE_ROWS, MAX_LIKELY // sharing // (LIKELY_ROW + most)))

    def _grow(self, batch: Batch, sequence: Sequence, room: int, scheduled: set[int]) -> bool:
        """Adds the next chunk of a running sequence, and its draft if there is room. While too few
        blocks are available, preempts sequences. Returns False if the sequence itself was
        preempted."""
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
        """Whether a running sequence of a request has several tokens to compute."""
        return any(
            s.request == request and s.target - s.num_computed_tokens > 1 for s in self.running
        )

    def _spare(self, drafted: int, room: int) -> bool:
        """Whether a draft of ``drafted`` tokens leaves enough of the step's tokens and enough
        blocks for the other sequences."""
        blocks = self._blocks.blocks_for(drafted) + 1
        running = len(self.running)
        return room >= running + drafted and self._blocks.num_available >= running + blocks

    def _prefill(self, batch: Batch, sequence: Sequence, room: int) -> bool:
        """Admits a waiting sequence and adds its first chunk to the batch, if enough blocks are
        available. The sequence needs blocks for all of its known tokens, and one block for each
        admitted sequence must stay free. Returns whether the sequence was admitted."""
        kept = bool(sequence.block_table.blocks)
        if kept:
            # The sequence has blocks but no logits, for example because it was suspended. So its
            # last token is computed again.
            hit = min(sequence.num_computed_tokens, sequence.target - 1)
        elif self._still_lacks_blocks(sequence):
            return False
        else:
            limit = self._match_limit(sequence)
            hit = self._blocks.match(sequence.block_table, sequence.tokens, limit)
        needed = self._blocks.blocks_for(sequence.target + 1) - len(sequence.block_table.blocks)
        chunk = self._chunk(sequence, hit, room)
        spare = self._blocks.num_available - needed
        copies = None
        if spare >= self._min_spare:
            copies = self._blocks.reserve(sequence.block_table, chunk.start, chunk.end)
        if copies is None:
            if not kept:
                self._give_back(sequence, spare)
            return False
        sequence.num_computed_tokens = hit
        if not kept:
            self.prefix_hit_tokens += hit
            self.prefix_query_tokens += sequence.target
        if sequence.displaced:
            sequence.displaced = False
            self._recomputed += sequence.target - hit
        batch.admitted.append(sequence)
        if sequence.prompt_usage.cached is None:
            sequence.prompt_usage.cached = hit
        self._admit(sequence)
        self._num_likely += _reports_likely(sequence)
        batch.chunks.append(chunk)
        batch.copies += copies
        return True

    @property
    def _min_spare(self) -> int:
        """Number of blocks that stay free when a sequence is admitted: one for each admitted
        sequence, so that a growing sequence rarely preempts another."""
        return len(self.running) + len(self.deferred) if self.running else 0

    def _give_back(self, sequence: Sequence, spare: int) -> None:
        """Frees the matched blocks of a waiting sequence that cannot be admitted. Stores the result
        of the match (``_unfit``)."""
        blocks, table = self._blocks, sequence.block_table
        following = blocks.following(table, sequence.tokens, self._match_limit(sequence))
        blocks.free(table)
        counts = blocks.num_available, blocks.num_freed
        self._unfit = _Unfit(sequence, sequence.target, spare, *counts, following)

    def _unfit_of(self, sequence: Sequence) -> _Unfit | None:
        """The result of the last match of a waiting sequence; None if the sequence must be matched
        again."""
        unfit = self._unfit
        if unfit is None or unfit.sequence is not sequence or unfit.target != sequence.target:
            return None
        if unfit.attempts >= MATCH_STEPS or self._blocks.is_registered(unfit.following):
            return None
        return unfit

    def _still_lacks_blocks(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence lacks blocks even if all blocks that were freed since its last
        match are available."""
        unfit = self._unfit_of(sequence)
        if unfit is None:
            return False
        unfit.attempts += 1
        return unfit.spare + self._blocks.num_freed - unfit.num_freed < self._min_spare

    def _match_limit(self, sequence: Sequence) -> int:
        """Maximum number of tokens to take from the prefix cache. A token whose logits are needed
        is always computed."""
        return sequence.scored_from - 1 if sequence.scored else sequence.target - 1

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.admit(sequence)
        self._run(sequence)

    def _run(self, sequence: Sequence) -> None:
        self.running[sequence] = None
        self.waiting.count_running(sequence.client, 1)

    def _evict_for(self, sequence: Sequence) -> bool:
        """Called while no sequence runs. Preempts one sequence to free blocks for a waiting
        sequence. A suspended or another waiting sequence is preempted first, then a deferred
        sequence with a lower rank than the waiting sequence. If no sequence can be preempted and
        none is deferred, frees the waiting sequence's own blocks. Returns False if no blocks could
        be freed."""
        idle = [s for s in self._idle() if s is not sequence]
        after = [s for s in self.deferred if rank(s) < rank(sequence)]
        if idle or after:
            self._preempt(min(idle or after, key=rank))
        elif sequence.block_table.blocks and not self.deferred:
            self._preempt(sequence)
        else:
            return False
        return True

    def _evict_suspended(self, sequence: Sequence) -> bool:
        """Called while sequences run. Frees blocks of other clients' suspended sequences for a
        waiting sequence. Returns whether blocks were freed. Each victim belongs to the client whose
        suspended sequences have the most blocks left. Only clients whose suspended sequences have
        more blocks than all sequences of the waiting sequence's client are considered. Does nothing
        if enough blocks are available already, or if all victims together have too few blocks."""
        wanted = self._blocks.blocks_for(sequence.target + 1) - len(sequence.block_table.blocks)
        kept = num_blocks(s for s in self._with_blocks() if s.client == sequence.client)
        wanted += len(self.running) + len(self.deferred) - self._blocks.num_available
        if wanted <= 0:
            return False
        others = (s for s in self.suspended if s.client != sequence.client)
        victims: list[Sequence] = []
        for victim in from_largest_client((s for s in others if s.block_table.blocks), kept):
            victims.append(victim)
            wanted -= len(victim.block_table.blocks)
            if wanted <= 0:
                break
        if wanted > 0:
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _with_blocks(self) -> Iterator[Sequence]:
        """All sequences that may have blocks."""
        return chain(self.running, self.deferred, self.suspended, self.waiting.returned)

    def _idle(self) -> list[Sequence]:
        """Sequences that have blocks and are suspended or waiting."""
        return [s for s in (*self.suspended, *self.waiting.returned) if s.block_table.blocks]

    def _victim(self, scheduled: set[int]) -> Sequence:
        """The sequence to preempt for a running sequence.

        If sequences that are not admitted have blocks, the victim is the one that is last in order.
        If none of them has blocks, the victim is the last in order of the admitted sequences that
        are not yet in this step. There is always such a sequence, because the running sequence
        itself is not yet in the step.
        """
        admitted = (*self.running, *self.deferred)
        return min(self._idle() or [s for s in admitted if id(s) not in scheduled], key=rank)

    def _preempt(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks and logits. If the sequence was admitted, it waits again."""
        self._blocks.free(sequence.block_table)
        sequence.num_computed_tokens = 0
        sequence.row = None
        self.preemptions += 1
        if sequence in self.running or sequence in self.deferred:
            self._take_out(sequence)
            self.waiting.put_back(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        """Removes a sequence from the table that contains it, if any."""
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


def _reports_likely(sequence: Sequence) -> bool:
    """Whether a sequence is a score with ``top_logprobs``."""
    return sequence.scored and sequence.sampling.top_logprobs > 0
