"""Appends the tokens of a step to their sequences, and makes the step's outputs.

An ordinary token, which is called *plain*, is reported as a row of ``TokenColumns``. Other results,
such as the last token of a sequence, are separate outputs.
"""

from __future__ import annotations

import numpy as np
from msgspec import UNSET

from ..sampling.row_parameters import Rows
from ..sampling.sampled_batch import SampledBatch
from ..sampling.sampler import NAN, Sampled, Scores
from .scheduler import Chunk
from .sequence import Sequence, TokenColumns, TokenOutput
from .sequences import LiveSequences
from .text import Text

Pushed = Text | Exception
"""The text that a token added to its sequence, or the error that was raised when the token was
decoded."""


class Results:
    """Applies the results of steps to the live sequences."""

    def __init__(self, live: LiveSequences) -> None:
        self._live = live
        self.sampled_tokens = 0

    def take(self, batch: SampledBatch, rows: Rows, sampled: Sampled) -> TokenColumns | None:
        """Appends the sampled token to each sequence of ``batch``. If the row of a sequence has an
        error, ends the sequence instead. Returns the plain tokens (``TokenColumns``); None if no
        token is plain. Adds all other outputs to ``LiveSequences.outputs``."""
        sequences, tokens = batch.sequences, sampled.tokens
        self.sampled_tokens += len(sequences)
        others = self._others(batch, rows, sampled)
        pushed = _push_texts(batch, tokens, others) if batch.with_text else {}
        for i in rows.masks:
            sequences[i].mask = None
        for i in rows.biases:
            sequences[i].bias = None
        for i in rows.options:
            sequences[i].options = None
        if not others:
            for sequence, token in zip(sequences, tokens, strict=True):
                sequence.tokens.append(token)
            return _columns(sequences, rows, sampled, pushed)
        plain = [i for i, sequence in enumerate(sequences) if sequence.request not in others]
        columns = _columns(sequences, rows, sampled, pushed).of(plain) if plain else None
        for i, sequence in enumerate(sequences):
            if sequence.request in others:
                self._append(i, sequence, sampled, pushed.get(i))
            else:
                sequence.tokens.append(tokens[i])
        return columns

    def take_scores(self, chunk: Chunk, scores: Scores) -> None:
        """Adds an output for each token that a chunk scores, if the sequence is alive."""
        sequence = chunk.sequence
        if self._live.find(sequence.request, sequence.seq) is not sequence:
            return
        try:
            self._take_scores(chunk, scores)
        except Exception as error:
            self._live.fail_defect(sequence, error)

    def _take_scores(self, chunk: Chunk, scores: Scores) -> None:
        sequence, live = chunk.sequence, self._live
        tokens = chunk.scored_tokens
        first = chunk.first_row + 1 - sequence.num_prompt
        found, tops = scores.fetch()
        if any(value != value for value in found):
            live.fail(sequence, NAN)
            return
        if sequence.scoring is not None:
            live.take_text_scores(sequence, first, found, chunk.completes)
            return
        if first < sequence.num_reported:
            # The sequence was preempted or the weights have changed, so some tokens were scored
            # twice. The outputs of these tokens have already been returned.
            again = sequence.num_reported - first
            tokens, found, tops = tokens[again:], found[again:], tops[again:]
            first = sequence.num_reported
        sequence.num_reported = first + len(tokens)
        texts: list[str | None] = [None] * len(tokens)
        if sequence.text is not None:
            try:
                texts = [sequence.text.push(token).certain for token in tokens]
                if chunk.completes:
                    texts.append((texts.pop() or "") + sequence.text.finish().certain)
            except Exception as error:
                live.fail_text(sequence, error)
                return
        rows = zip(tokens, found, tops, texts, strict=True)
        for pos, (token, value, top, text) in enumerate(rows, first):
            output = TokenOutput.of(sequence, token, value)
            output.pos = pos
            output.top_logprobs = UNSET if top is None else top
            output.text = UNSET if text is None else text
            live.outputs.append(output)
        if chunk.completes:
            live.outputs[-1].finish_reason = "length"
            live.remove(sequence)

    def _others(self, batch: SampledBatch, rows: Rows, sampled: Sampled) -> set[int]:
        """The requests with at least one output in this step that is not a plain token."""
        others = {output.request for output in self._live.outputs}
        special = (*sampled.errors, *sampled.distributions, *batch.others(rows, sampled.tokens))
        others.update(batch.sequences[i].request for i in special)
        return others

    def _append(self, i: int, sequence: Sequence, sampled: Sampled, pushed: Pushed | None) -> None:
        """Appends the token of row i, and makes its output. If the row has an error, ends the
        sequence instead. ``pushed``: the token's text, if it has already been decoded."""
        try:
            if i in sampled.errors:
                self._live.fail(sequence, sampled.errors[i])
                return
            if isinstance(pushed, Exception):
                self._live.fail_text(sequence, pushed)
                return
            output = TokenOutput.of(sequence, sampled.tokens[i], sampled.logprobs[i])
            output.top_logprobs = sampled.top_of(i)
            output.distribution = sampled.distributions.get(i)
            output.report(sampled.candidates.get(i))
            if sequence.inspect:
                output.allowed = sampled.allowed.get(i, UNSET)
                output.cut, output.bias = sampled.cut.get(i, []), sampled.biased.get(i, {})
            self._live.append(sequence, output, pushed)
        except Exception as error:
            self._live.fail_defect(sequence, error)


def _push_texts(batch: SampledBatch, tokens: list[int], others: set[int]) -> dict[int, Pushed]:
    """Decodes the text of each row, except for rows of the requests ``others``. If the text of a
    request reaches a stop string or cannot be decoded, adds the request to ``others``."""
    pushed: dict[int, Pushed] = {}
    for i in batch.with_text:
        sequence = batch.sequences[i]
        if sequence.text is None or sequence.request in others:
            continue
        try:
            text = pushed[i] = sequence.text.push(tokens[i])
        except Exception as error:
            pushed[i] = error
            others.add(sequence.request)
            continue
        if text.stop:
            others.add(sequence.request)
    return pushed


def _columns(
    sequences: list[Sequence], rows: Rows, sampled: Sampled, pushed: dict[int, Pushed]
) -> TokenColumns:
    tokens, logprobs = sampled.numbers
    columns = TokenColumns(sequences, tokens.astype(np.int64), logprobs, rows.positions)
    if pushed:
        texts: list[str | None] = [None] * len(sequences)
        for i, text in pushed.items():
            if isinstance(text, Text) and sequences[i].with_text:
                texts[i] = text.certain
        columns.texts = texts
    if sampled.candidates:
        columns.candidates = [sampled.candidates.get(i) for i in range(len(sequences))]
    return columns
