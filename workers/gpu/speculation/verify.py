"""Verifies drafts. Each row is sampled as it would be sampled without a draft.

The forward computes the sequence's last token and its draft, with a row of logits for each of these
tokens. A token is sampled from the first row. If this token equals the first draft token, the
second row is the same row that the next step would have computed. So the token after the first
draft token is sampled from the second row, and so on. Sampling depends on the seed, the sequence,
the position and the tokens before the position. All these inputs are the same as without a draft,
so the sampled tokens are the same too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from ..engine.block_manager import BlockManager
from ..engine.pending_step import PendingStep
from ..engine.sequence import Sequence, TokenOutput
from ..engine.sequences import LiveSequences
from ..model.device_queue import Work
from ..model.runner import Runner
from ..sampling.row_parameters import Row, Rows
from ..sampling.sampler import NAN, Drawn, Sampled, draw
from ..sampling.token_counts import has_penalties
from ..sampling.under import Under
from .drafts import Speculation

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Verification:
    """The queued sampling of sequences with drafts."""

    sequences: list[Sequence]
    work: Work[Drawn]
    """For each sequence: one drawn token for each token of its draft, and the token after the
    draft."""


class Verifier:
    """Samples the sequences of a step that have drafts."""

    def __init__(
        self, live: LiveSequences, blocks: BlockManager, runner: Runner, speculation: Speculation
    ) -> None:
        self._live = live
        self._blocks = blocks
        self._runner = runner
        self._speculation = speculation
        self.sampled_tokens = 0

    def sample(self, step: PendingStep) -> Verification | None:
        """Queues the sampling of a step's sequences with drafts, and removes these sequences from
        the step. Returns None if no sequence has a draft. If the draft of a sequence cannot be
        verified (``_is_verifiable``), the sequence stays in the step and is sampled without its
        draft. If a controller computes masks for a draft, only the draft tokens with an element in
        ``Sequence.along`` are verified."""
        sequences = [s for s in step.drafted if s in step.rows and _is_verifiable(s)]
        if not sequences:
            return None
        which: list[int] = []
        for sequence in sequences:
            first = step.rows.pop(sequence)
            which += range(first, first + len(sequence.draft) + 1)
        rows = Rows.of([row for sequence in sequences for row in _rows(sequence)])

        def run() -> Drawn:
            logits = step.device_logits()
            assert logits is not None
            return draw(logits, which, rows)

        return Verification(sequences, self._runner.queue.submit(run))

    def take(self, verification: Verification) -> None:
        """Waits for the tokens. Appends to each sequence its accepted draft tokens and the token
        after them. If the step or the sampling failed, the sequences continue without drafts."""
        work = verification.work
        work.wait()
        if work.error is not None:
            log.warning("a step with drafts failed; it is repeated without drafts: %s", work.error)
            for sequence in verification.sequences:
                sequence.draft = ()
                sequence.drafting = None
                last = len(sequence.tokens) - 1
                sequence.num_computed_tokens = min(sequence.num_computed_tokens, last)
            return
        sampled = work.value.fetch()
        first = 0
        for sequence in verification.sequences:
            count = len(sequence.draft) + 1
            try:
                self._take(sequence, sequence.draft, sampled, first)
            except Exception as failure:
                self._live.fail_defect(sequence, failure)
            first += count

    def _take(self, sequence: Sequence, draft: Tokens[int], sampled: Sampled, first: int) -> None:
        """Appends sampled tokens. The first token that differs from the draft is the last token
        that is appended. If no token differs, the token after the draft is the last."""
        drawn = sampled.tokens[first : first + len(draft) + 1]
        bad = {i - first for i in sampled.errors if first <= i <= first + len(draft)}
        accepted = 0
        while accepted < len(draft) and accepted not in bad and drawn[accepted] == draft[accepted]:
            accepted += 1
        sequence.draft = sequence.along = ()
        sequence.mask = sequence.bias = None
        self._speculation.verified(sequence, len(draft), accepted)
        unusable = any(i > accepted and sampled.errors[first + i] == NAN for i in bad)
        self._settle(sequence, draft[:accepted], unusable)
        for i in range(accepted + 1):
            if i in bad:
                self._live.fail(sequence, sampled.errors[first + i])
                return
            self.sampled_tokens += 1
            output = TokenOutput.of(sequence, drawn[i], sampled.logprobs[first + i])
            output.top_logprobs = sampled.top_of(first + i)
            output.report(sampled.candidates.get(first + i))
            if not self._live.append(sequence, output):
                return

    def _settle(self, sequence: Sequence, accepted: Tokens[int], unusable: bool) -> None:
        """Counts the accepted tokens as computed, and frees the blocks of the rejected tokens.
        ``unusable``: whether the keys and values of the rejected tokens may contain NaN."""
        blocks, table = self._blocks, sequence.block_table
        if unusable:
            # Attention multiplies the values at masked positions by 0, and 0 * NaN is NaN. So the
            # blocks are cleared, and all tokens are computed again.
            self._runner.clear_blocks(blocks.discard(table))
            sequence.num_computed_tokens = 0
            sequence.drafting = None
            return
        if accepted:
            sequence.num_computed_tokens += len(accepted)
            if sequence.num_computed_tokens // blocks.block_size > len(table.keys):
                tokens = [*sequence.tokens, *accepted]
                blocks.commit(table, tokens, sequence.num_computed_tokens)
        if len(table.blocks) > blocks.blocks_for(sequence.num_computed_tokens):
            blocks.truncate(table, sequence.num_computed_tokens)


def _is_verifiable(sequence: Sequence) -> bool:
    """Whether the beginning of a sequence's draft can be verified. Shortens the draft to this
    beginning. If a controller has set options, the result is False, because options apply only to
    the next token."""
    if sequence.options is not None:
        return False
    if sequence.drafting is None or not sequence.drafting.steered:
        return sequence.mask is None and sequence.bias is None
    masked = 0 if sequence.mask is None else len(sequence.along)
    sequence.draft = sequence.draft[:masked]
    return bool(sequence.draft)


def _rows(sequence: Sequence) -> list[Row]:
    """The sampling inputs of the next token and of the token after each draft token."""
    sampling, draft = sequence.sampling, sequence.draft
    counts = sequence.count_tokens() if has_penalties(sampling) else None
    unders = [Under(sequence.mask, sequence.bias), *sequence.along]
    unders += [Under()] * (len(draft) + 1 - len(unders))
    return [
        Row(
            sampling,
            sequence.draw_seed,
            sequence.seq,
            sequence.num_generated + i,
            mask=unders[i].mask,
            bias=unders[i].bias,
            inspect=sequence.inspect,
            least=sequence.least,
            logit_bias=sequence.logit_bias,
            counts=counts.plus(draft[:i]) if counts is not None else None,
        )
        for i in range(len(draft) + 1)
    ]
