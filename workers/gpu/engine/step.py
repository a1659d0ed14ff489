"""One step of an engine: schedule, run the forward, sample, append.

begin    schedule ─▶ forward: one token of each decode, chunks of prompts ─▶ rows of logits
         (decisions of controllers arrive: masks, splices, forks, deferred sequences)
finish   sample the rows ─▶ append to each sequence, or end it

The device runs its work in the order in which it was queued. If steps overlap, ``finish`` launches
the sampling of this step and the forward of the next step, and then waits for the tokens. So the
device has work while the host processes and sends tokens. The next forward reads the sampled tokens
on the device; the host needs only their positions. If a sequence ends at a stop token or stop
string, the host detects the end after it has launched the next forward. The host then discards the
row of the ended sequence.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ....protocol.metrics import STEP_TOKENS, Histogram
from ....protocol.sampling import Query
from ..model.device_queue import Work
from ..model.runner import Runner
from ..sampling.distributions import Answers, look
from ..sampling.row_parameters import Rows
from ..sampling.sampled_batch import SampledBatch
from ..sampling.sampler import Drawn, Scores, draw, score
from ..speculation.drafts import Speculation
from ..speculation.verify import Verifier
from .block_manager import BlockManager
from .decodes import Decodes
from .one_by_one import OneByOne
from .pending_step import Part, PendingStep
from .results import Results
from .scheduler import Batch, Chunk, Scheduler
from .sequence import Sequence, StepOutputs
from .sequences import LiveSequences

log = logging.getLogger(__name__)


class Look(NamedTuple):
    """A sequence whose logits answer a query, without sampling."""

    sequence: Sequence
    row: int
    query: Query


@dataclass(slots=True)
class Sampling:
    """The sampling of a step, queued on the device."""

    step: PendingStep
    batch: SampledBatch
    rows: Rows
    looks: list[Look]
    work: Work[tuple[Drawn | None, list[Scores], Answers | None]]

    def device_tokens(self) -> torch.Tensor:
        """The sampled tokens, for work that is queued after the sampling."""
        drawn, _, _ = self.work.value
        assert drawn is not None
        return drawn.tokens


class Stepper:
    """Runs the steps of one model over its live sequences.

    ``overlap``: whether the next forward is launched before the tokens of this step are processed.
    ``speculation`` makes drafts for the sequences. A step with drafts does not overlap with other
    steps, because the token after a draft is unknown until the draft is verified.
    """

    def __init__(
        self,
        live: LiveSequences,
        scheduler: Scheduler,
        blocks: BlockManager,
        runner: Runner,
        overlap: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        self._live = live
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._overlap = overlap
        self._results = Results(live)
        self._one_by_one = OneByOne(live, runner, self._results)
        self._ahead: PendingStep | None = None
        """The next step; None if ``finish`` has not launched its forward."""
        self._decodes: Decodes | None = None
        """The last launched batch, if it consists only of decodes."""
        self._batch = SampledBatch([])
        self._drops = 0
        """The value of ``LiveSequences.dropped_tokens`` when ``_batch`` was made."""
        self._speculation = speculation or Speculation(None)
        self._verifier = Verifier(live, blocks, runner, self._speculation)
        self.step_tokens = Histogram.over(STEP_TOKENS)

    @property
    def launched_ahead(self) -> bool:
        """Whether the next step's forward has been launched."""
        return self._ahead is not None

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens since the model was loaded."""
        return self._results.sampled_tokens + self._verifier.sampled_tokens

    def begin(self) -> PendingStep:
        """The first half of a step: schedules a forward and launches it. If ``finish`` has done
        this already, only returns the step."""
        step, self._ahead = self._ahead, None
        if step is None or not self._live.has_any_of(step):
            step = self._launch(None) or PendingStep()
        self._live.step = step
        return step

    def finish(self, step: PendingStep) -> StepOutputs:
        """The second half of a step: samples the next token of each sequence that is ready."""
        self._live.step = None
        step.add_kept(self._scheduler.take_rescheduled())
        looks = self._take_looks(step) if self._live.looks else []
        verification = self._verifier.sample(step)
        sampling = self._sample(step, looks)
        if self._overlap and verification is None and not self._speculation.awaits(step.rows):
            self._live.step = self._ahead = self._launch(sampling)
        if verification is not None:
            self._verifier.take(verification)
        return self._take(sampling)

    def cancel_ahead(self) -> None:
        """Discards the next step if ``finish`` has launched it; its tokens are computed again."""
        if self._ahead is not None and self._ahead.forward is not None:
            self._ahead.forward.work.wait()
        self._one_by_one.undo(self._ahead)
        self._live.step = self._ahead = self._decodes = None

    # --- the parts of a step --------------------------------------------------------------------

    def _launch(self, before: Sampling | None) -> PendingStep | None:
        """Launches the next forward; None if the step would be empty.

        ``before``: the sampling of the previous step, which the device runs before this forward;
        None if the host already has its tokens.
        """
        # A draft depends on the last token. So no drafts are made while the last token is only on
        # the device.
        self._speculation.propose(self._scheduler.running if before is None else ())
        tokens = before.device_tokens if before is not None else None
        decodes, self._decodes = self._decodes, None
        if decodes is not None and self._continues(decodes, before):
            count = len(decodes.sequences)
            self.step_tokens.observe(count)
            mirrors = self._runner.mirrors_for(count, count)
            packed = decodes.pack(before is not None, mirrors)
            step = PendingStep(self._runner.launch(packed, tokens))
            step.decodes = decodes.sequences, decodes.positions
            step.rows = dict(zip(decodes.sequences, range(len(packed.ids)), strict=True))
            self._decodes = decodes
            return step
        with _on_device(before):
            return self._launch_scheduled(tokens)

    def _launch_scheduled(self, tokens: Callable[[], torch.Tensor] | None) -> PendingStep | None:
        """Schedules, packs and launches a batch; None if it is empty."""
        batch = self._scheduler.schedule()
        self._count(batch)
        if not batch.chunks and not batch.rescheduled:
            return None
        step = PendingStep()
        if batch.chunks:
            changes = self._scheduler.changes
            chunks, packed = self._runner.pack(batch)
            with_adapters = packed.adapters is not None or packed.further is not None
            if not with_adapters and self._only_decodes(batch):
                self._decodes = Decodes(chunks, packed, self._blocks, changes)
            step.forward = self._runner.launch(packed, tokens)
            self._take_in(step, chunks)
        step.add_kept(batch.rescheduled)
        return step

    def _take_looks(self, step: PendingStep) -> list[Look]:
        """Removes from a step the sequences whose logits answer queries, and defers these
        sequences."""
        looks = []
        for sequence in [s for s in self._live.looks if s in step.rows]:
            row = step.rows.pop(sequence)
            looks.append(Look(sequence, row, self._live.looks.pop(sequence)))
            sequence.row = step.keep(row)
            self._scheduler.defer(sequence)
        return looks

    def _sample(self, step: PendingStep, looks: list[Look]) -> Sampling:
        """Queues two kinds of work after the forward of a step: the sampling, and the computation
        of the answers to ``looks``."""
        sequences = list(step.rows)
        # After sequences have dropped tokens, a new batch is needed, because the seeds of these
        # sequences have changed.
        if sequences != self._batch.sequences or self._drops != self._live.dropped_tokens:
            self._batch, self._drops = SampledBatch(sequences), self._live.dropped_tokens
        batch, which = self._batch, None
        # The sequences themselves are compared, because a fork or a rescheduled sequence may have
        # replaced a deferred sequence. A comparison of only their number would not find this
        # change.
        decodes = step.decodes if not step.kept else None
        if decodes is not None and sequences == decodes[0]:
            rows = batch.rows(decodes[1])
        else:
            rows, which = batch.rows(None), list(step.rows.values())
        for sequence in sequences if step.kept else ():
            sequence.row = None
        scored = step.scored

        def run() -> tuple[Drawn | None, list[Scores], Answers | None]:
            logits = step.device_logits()
            if logits is None:
                return None, [], None
            step.keep_rows(logits)
            found = [
                score(
                    logits[part.row : part.row + part.rows],
                    part.chunk.scored_tokens,
                    part.chunk.sequence.sampling.top_logprobs,
                )
                for part in scored
            ]
            answers = look(logits, [(one.row, one.query) for one in looks]) if looks else None
            return draw(logits, which, rows) if sequences else None, found, answers

        return Sampling(step, batch, rows, looks, self._runner.queue.submit(run))

    def _take(self, sampling: Sampling) -> StepOutputs:
        """Waits for the tokens of a step, and appends each token to its sequence. If the step
        failed, runs each sequence separately. Only sequences that fail again end."""
        work, live = sampling.work, self._live
        work.wait()
        if work.error is not None:
            log.warning(
                "a step failed; its sequences are computed again one by one: %s", work.error
            )
            self._one_by_one.undo(self._ahead)
            live.step = self._ahead = None
            self._one_by_one.run(sampling.step, sampling.batch.sequences)
            for one in sampling.looks:
                self._one_by_one.look(one.sequence, one.query)
            return StepOutputs(live.take_outputs())
        drawn, scored, answers = work.value
        if answers is not None:
            for one, answer in zip(sampling.looks, answers.fetch().values(), strict=True):
                live.take_look(one.sequence, answer)
        for part, scores in zip(sampling.step.scored, scored, strict=True):
            self._results.take_scores(part.chunk, scores)
        columns = None
        if drawn is not None:
            columns = self._results.take(sampling.batch, sampling.rows, drawn.fetch())
        return StepOutputs(live.take_outputs(), columns)

    # --- details --------------------------------------------------------------------------------

    def _count(self, batch: Batch) -> None:
        if batch.chunks:
            self.step_tokens.observe(batch.num_tokens)
        for sequence in batch.admitted:
            usage = sequence.prompt_usage
            if usage.admitted_at is None:
                usage.admitted_at = time.monotonic()

    def _take_in(self, step: PendingStep, chunks: list[Chunk]) -> None:
        """Updates the tables as if a launched forward had run: numbers of computed tokens,
        registered blocks, rows to sample and score, and pending forks. Work that is queued later
        runs after the forward, so it may rely on these entries."""
        row = 0
        for chunk in chunks:
            sequence, rows = chunk.sequence, chunk.end - chunk.first_row
            step.chunked.append(Part(chunk, row, rows))
            sequence.num_computed_tokens = end = chunk.end - len(chunk.draft)
            known = min(end, len(sequence.tokens))
            self._blocks.commit(sequence.block_table, sequence.tokens, known)
            if rows and not sequence.scored:
                for ready in (sequence, *self._live.fork_pending(sequence)):
                    step.rows[ready] = row
            row += rows

    def _continues(self, decodes: Decodes, before: Sampling | None) -> bool:
        """Whether the next step computes one more token of each sequence of the last step. If so,
        advances ``decodes``."""
        if decodes.changes != self._scheduler.changes or self._scheduler.owes_room:
            return False
        if self._speculation.any_drafts:
            return False
        if before is not None and before.batch.sequences != decodes.sequences:
            return False
        return decodes.advance(before is not None)

    def _only_decodes(self, batch: Batch) -> bool:
        """Whether a batch computes exactly one token of each running sequence, and all these
        sequences are sampled."""
        chunks = batch.chunks
        return len(chunks) == len(self._scheduler.running) and all(
            chunk.end - chunk.start == 1 and chunk.completes and not chunk.sequence.scored
            for chunk in chunks
        )


@contextmanager
def _on_device(sampling: Sampling | None) -> Iterator[None]:
    """Sets ``Sequence.drawn`` of the sampled sequences while the next step is scheduled, because
    their tokens are still on the device."""
    sequences = sampling.batch.sequences if sampling is not None else ()
    for row, sequence in enumerate(sequences):
        sequence.drawn = row
    try:
        yield
    finally:
        for sequence in sequences:
            sequence.drawn = -1
