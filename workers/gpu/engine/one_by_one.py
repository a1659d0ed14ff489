"""Runs a failed step again, one sequence at a time. A sequence that fails again ends. The other
sequences continue.

A *look* answers a controller's query from the logits of a sequence, without sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ....protocol.logs import about
from ....protocol.sampling import Query
from ..model.runner import Runner
from ..sampling.distributions import look
from ..sampling.sampled_batch import SampledBatch
from ..sampling.sampler import draw, score
from .pending_step import Part, PendingStep
from .results import Results
from .scheduler import Batch, Chunk
from .sequence import KeptRow, Sequence
from .sequences import LiveSequences

log = logging.getLogger(__name__)


class OneByOne:
    """Runs failed steps again."""

    def __init__(self, live: LiveSequences, runner: Runner, results: Results) -> None:
        self._live = live
        self._runner = runner
        self._results = results

    def undo(self, ahead: PendingStep | None) -> None:
        """Marks the tokens of ``ahead`` as not computed, and makes all mirrors invalid.

        ``ahead`` is a step that was launched before the previous step was processed. Mirrors are
        copies of keys and values (``packing.py``). This method is called when the weights are about
        to change. It is also called if the previous step has failed, because the device then skips
        the forward of ``ahead``. In both cases the device still copies the blocks of ``ahead``, so
        block tables are not changed.
        """
        self._runner.forget_mirrors()
        self._live.changed()
        if ahead is None:
            return
        for sequence, row in ahead.rows.items():
            for part in ahead.parts:
                if part.row <= row < part.row + part.rows:
                    _compute_again(sequence, part.chunk.start)
        failed = ahead.forward is not None and ahead.forward.work.done and ahead.forward.work.error
        for part in ahead.parts:
            sequence = part.chunk.sequence
            _compute_again(sequence, part.chunk.start)
            if failed:
                # Forks of the sequence may have copies of blocks that have not been computed, so
                # the forks compute this chunk again too.
                for other in self._live.requests.get(sequence.request, {}).values():
                    _compute_again(other, part.chunk.start)

    def run(self, step: PendingStep, sequences: Iterable[Sequence]) -> None:
        """Computes each chunk of a step separately, and samples ``sequences`` one at a time."""
        rows = {s: row for s, row in step.rows.items() if s in set(sequences)}
        for part in step.parts:
            sampled = {s: row for s, row in rows.items() if part.row <= row < part.row + part.rows}
            self._run_part(step, part, sampled)
        for sequence, row in rows.items():
            if row >= step.num_forward_rows:
                kept = step.kept[row - step.num_forward_rows]
                assert kept.logits is not None
                self._sample(sequence, kept.logits)

    def look(self, sequence: Sequence, query: Query) -> None:
        """Answers a query from the kept logits of a sequence. If the forward has failed to compute
        these logits, a later step computes them and answers the query."""
        live, logits = self._live, sequence.row.logits if sequence.row is not None else None
        if live.find(sequence.request, sequence.seq) is not sequence:
            return
        if logits is None:
            live.look_again(sequence, query)
            return
        try:
            row = logits.unsqueeze(0)
            answers = self._runner.queue.submit(lambda: look(row, [(0, query)])).result()
            live.take_look(sequence, answers.fetch()[0])
        except Exception as error:
            number = sequence.request
            log.exception("a look failed for request %d", number, extra=about(number))
            live.fail(sequence, f"reading the distribution of its next token failed: {error}")

    def _run_part(self, step: PendingStep, part: Part, sampled: dict[Sequence, int]) -> None:
        live, chunk = self._live, part.chunk
        kept = [(row, k) for row, k in step.keeping if part.row <= row < part.row + part.rows]
        # The chunk's own sequence may have been spliced since, and then has other tokens. A fork
        # that will be sampled from the chunk still has the chunk's tokens. So if any sequence will
        # be sampled from the chunk, its tokens are computed.
        sequence = next(iter(sampled), chunk.sequence)
        alive = live.find(sequence.request, sequence.seq) is sequence
        usable = alive and len(sequence.tokens) >= chunk.end
        # Forks of the sequence may have copies of blocks that have not been computed, so the forks
        # compute this chunk again too.
        for other in live.requests.get(sequence.request, {}).values():
            if other is not sequence or not usable:
                _compute_again(other, chunk.start)
        if not usable:
            return
        try:
            _, packed = self._runner.pack(Batch([Chunk(sequence, chunk.start, chunk.end)]))
            logits = self._runner.launch(packed).work.result()
        except Exception as error:
            log.exception("the forward of request %d failed", sequence.request)
            for other in {chunk.sequence, *sampled, *self._sampled_from([k for _, k in kept])}:
                if live.find(other.request, other.seq) is other:
                    live.fail(other, f"the model failed: {error}")
            return
        for row, one in kept:
            one.logits = logits[row - part.row].clone()
        if part.is_scored:
            most = chunk.sequence.sampling.top_logprobs
            found = self._runner.queue.submit(lambda: score(logits, chunk.scored_tokens, most))
            self._results.take_scores(chunk, found.result())
        for other, row in sampled.items():
            self._sample(other, logits[row - part.row])

    def _sample(self, sequence: Sequence, logits: torch.Tensor) -> None:
        batch = SampledBatch([sequence])
        rows = batch.rows(None)
        try:
            drawn = self._runner.queue.submit(lambda: draw(logits.unsqueeze(0), None, rows))
            sampled = drawn.result().fetch()
        except Exception as error:
            number = sequence.request
            log.exception("sampling failed for request %d", number, extra=about(number))
            self._live.fail(sequence, f"sampling failed: {error}")
            return
        columns = self._results.take(batch, rows, sampled)
        self._live.outputs += columns or ()

    def _sampled_from(self, kept: list[KeptRow]) -> list[Sequence]:
        """The deferred sequences that will be sampled from the rows ``kept``."""
        every = (s for live in self._live.requests.values() for s in live.values())
        return [s for s in every if any(s.row is one for one in kept)]


def _compute_again(sequence: Sequence, start: int) -> None:
    """Marks the tokens of a sequence from ``start`` on as not computed."""
    sequence.num_computed_tokens = min(sequence.num_computed_tokens, start)
