"""One step of an engine: schedule, run the forward, sample, append.

begin    schedule ─▶ forward: one token of each decode, chunks of prompts ─▶ rows of logits
         (decisions of controllers arrive: masks, splices, forks, deferred sequences)
finish   sample the rows ─▶ append to each sequence, or end it
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
import torch

from ...protocol.logs import about
from ...protocol.metrics import STEP_TOKENS, Histogram
from .block_manager import BlockManager
from .runner import Runner
from .sampler import NAN, Row, sample, scores
from .scheduler import Batch, Chunk, Scheduler
from .sequence import (
    Inspected,
    PendingStep,
    Sequence,
    StepOutputs,
    TokenColumns,
    TokenOutput,
)
from .sequences import LiveSequences

log = logging.getLogger(__name__)


class Stepper:
    """Runs the steps of one model over its live sequences."""

    def __init__(
        self, live: LiveSequences, scheduler: Scheduler, blocks: BlockManager, runner: Runner
    ) -> None:
        self._live = live
        self._scheduler = scheduler
        self._blocks = blocks
        self._runner = runner
        self._columns: TokenColumns | None = None
        """The plain tokens of the step that is being sampled."""
        self.sampled_tokens = 0
        self.step_tokens = Histogram.over(STEP_TOKENS)

    def begin(self) -> PendingStep:
        """The first half: the forward of what is scheduled."""
        batch = self._scheduler.schedule()
        self._count(batch)
        step = self._live.step = PendingStep()
        if batch.chunks:
            for chunks, logits in self._run(batch):
                self._take_in(step, chunks, logits)
        if batch.rescheduled:
            first = step.add(torch.stack([s.row for s in batch.rescheduled if s.row is not None]))
            step.rows.update((s, first + i) for i, s in enumerate(batch.rescheduled))
        return step

    def finish(self, step: PendingStep) -> StepOutputs:
        """The second half: samples the next token of each sequence that is ready."""
        self._live.step = None
        self._columns = None
        if step.logits is not None and step.rows:
            self._sample(step.logits, step.rows)
        return StepOutputs(self._live.take_outputs(), self._columns)

    # --- the parts of a step --------------------------------------------------------------------

    def _count(self, batch: Batch) -> None:
        if batch.chunks:
            self.step_tokens.observe(batch.num_tokens)
        for sequence in batch.admitted:
            usage = sequence.prompt_usage
            if usage.admitted_at is None:
                usage.admitted_at = time.monotonic()

    def _run(self, batch: Batch) -> list[tuple[list[Chunk], torch.Tensor]]:
        """The forward of a batch. Where it fails, each chunk is run on its own, so that only the
        sequences whose chunks fail again end."""
        try:
            return [self._runner.run(batch)]
        except Exception as error:
            if len(batch.chunks) == 1:
                sequence = batch.chunks[0].sequence
                number = sequence.request
                log.exception("the forward of request %d failed", number, extra=about(number))
                self._live.fail(sequence, f"the model failed: {error}")
                return []
        computed = []
        copies = batch.copies
        for chunk in batch.chunks:
            computed += self._run(Batch([chunk], copies))
            copies = []
        return computed

    def _sample(
        self, logits: torch.Tensor, rows: Mapping[Sequence, int], in_columns: bool = True
    ) -> None:
        """Samples each of these sequences from its row of ``logits``, and appends. Where sampling
        fails, each is sampled on its own, so that only those that fail again end."""
        live = self._live
        try:
            sampled = sample(logits, list(rows.values()), [_row(s) for s in rows])
        except Exception as error:
            if len(rows) > 1:
                for sequence, row in rows.items():
                    self._sample(logits, {sequence: row}, in_columns=False)
                return
            [sequence] = rows
            number = sequence.request
            log.exception("sampling failed for request %d", number, extra=about(number))
            live.fail(sequence, f"sampling failed: {error}")
            return
        self.sampled_tokens += len(rows)
        others = {output.request for output in live.outputs}
        others.update(
            s.request
            for i, s in enumerate(rows)
            if not in_columns or i in sampled.errors or not _plain(s, sampled.tokens[i])
        )
        plain: list[int] = []
        for i, sequence in enumerate(rows):
            inspected = None
            if sequence.inspect:
                allowed = _allowed(sequence.mask, logits.shape[-1])
                inspected = Inspected(allowed, sampled.cut.get(i, ()))
            sequence.mask = sequence.row = None
            if i in sampled.errors:
                live.fail(sequence, sampled.errors[i])
            elif sequence.request in others:
                token, logprob, top = sampled.tokens[i], sampled.logprobs[i], sampled.top[i]
                live.append(sequence, token, logprob, top, inspected=inspected)
            else:
                sequence.tokens.append(sampled.tokens[i])
                plain.append(i)
        if plain:
            sequences = list(rows)
            self._columns = TokenColumns(
                [sequences[i] for i in plain],
                np.array([sampled.tokens[i] for i in plain], np.int64),
                np.array([sampled.logprobs[i] for i in plain], np.float64),
                np.array([sequences[i].num_generated - 1 for i in plain], np.int64),
            )

    def _take_in(self, step: PendingStep, chunks: list[Chunk], logits: torch.Tensor) -> None:
        """Records what was computed: scores, rows to sample from, and the forks that waited for
        their prompt."""
        row = step.add(logits)
        for chunk in chunks:
            sequence, rows = chunk.sequence, chunk.end - chunk.first_row
            sequence.num_computed_tokens = chunk.end
            # Before its scores are taken, which may end it and free its blocks.
            self._blocks.commit(sequence.block_table, sequence.tokens, chunk.end)
            if sequence.scored and rows:
                assert step.logits is not None
                self._take_scores(chunk, step.logits[row : row + rows])
            elif rows:
                for ready in (sequence, *self._live.fork_pending(sequence)):
                    step.rows[ready] = row
            row += rows

    def _take_scores(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """The log-probabilities of the tokens that follow a chunk's rows."""
        sequence = chunk.sequence
        tokens = sequence.tokens[chunk.first_row + 1 : chunk.end + 1]
        first = chunk.first_row + 1 - sequence.num_prompt
        found, tops = scores(logits, tokens, sequence.sampling.top_logprobs)
        if any(value != value for value in found):
            self._live.fail(sequence, NAN)
            return
        texts: list[str | None] = [None] * len(tokens)
        if sequence.text is not None:
            try:
                texts = [sequence.text.push(token).certain for token in tokens]
                if chunk.completes:
                    texts.append((texts.pop() or "") + sequence.text.finish().certain)
            except Exception as error:
                self._live.fail_text(sequence, error)
                return
        request, seq = sequence.request, sequence.seq
        outputs = [
            TokenOutput(request, seq, token, value, first + i, None, top, text)
            for i, (token, value, top, text) in enumerate(
                zip(tokens, found, tops, texts, strict=True)
            )
        ]
        if chunk.completes:
            outputs[-1] = outputs[-1]._replace(finish_reason="length")
            self._live.remove(sequence)
        self._live.outputs += outputs


def _plain(sequence: Sequence, token: int) -> bool:
    """Whether this next token of a sequence is nothing but a token."""
    return (
        sequence.text is None
        and not sequence.inspect
        and not sequence.sampling.top_logprobs
        and token not in sequence.stop_ids
        and len(sequence.tokens) + 1 < sequence.max_length
    )


def _allowed(mask: np.ndarray | None, vocab: int) -> int | None:
    """How many of ``vocab`` tokens a mask allows; None where there is none."""
    if mask is None:
        return None
    bits = int.from_bytes(mask.tobytes(), "little")
    return (bits & ((1 << vocab) - 1)).bit_count()


def _row(sequence: Sequence) -> Row:
    """How the sampler chooses the next token of a sequence."""
    sampling = sequence.sampling
    looks_back = (
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )
    return Row(
        sampling,
        sequence.seed,
        sequence.seq,
        sequence.num_generated,
        prompt=sequence.tokens[: sequence.num_prompt] if looks_back else (),
        generated=sequence.generated if looks_back else (),
        mask=sequence.mask,
        inspect=sequence.inspect,
    )
