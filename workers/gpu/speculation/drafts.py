"""Chooses the sequences that have drafts in the next step, and records the outcome of drafts."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from .drafting import Drafting
from .earlier import SessionTexts
from .lengths import WRITTEN, Costs, lengths, written_length
from .ngrams import PromptLookup
from .places import LONGEST, Match

if TYPE_CHECKING:
    from ..engine.sequence import Sequence
    from .draft_model import DraftModel

MIN_PROBABILITY = 0.2
"""If the probability that a sequence accepts a token of the draft model is lower, the sequence only
gets trial drafts from the draft model."""
RETRY_STEPS = 32
"""A sequence gets a trial draft after this number of steps without a draft from the draft model,
because its new text may be easier to predict. Trial drafts are written only in steps without other
drafts from the draft model."""
RETRY_TOKENS = 3
"""Number of tokens of a trial draft."""


class Speculation:
    """The drafts of one engine.

    A draft may be wrong, but it does not change any token of the sequence: each token is sampled
    from the same logits as without the draft (``verify.py``). ``costs``: the costs of drafts on the
    engine's device; None disables drafts. ``model`` writes drafts for sequences for which prompt
    lookup (``ngrams.py``) does not find a draft.
    """

    def __init__(self, costs: Costs | None, model: DraftModel | None = None) -> None:
        self._costs = costs
        self._model = model
        self._earlier = SessionTexts()
        self._drafted: list[Sequence] = []
        self._ahead: list[Sequence] = []
        """Sequences in ``_drafted`` whose draft was set by ``propose_ahead``. ``propose`` keeps
        these drafts."""
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def begin(self, sequence: Sequence, steered: bool = False) -> None:
        """Enables drafts for a sequence. ``steered``: whether a controller computes a mask after
        each token of a draft."""
        if self._costs is not None and sequence.drafting is None:
            earlier = self._earlier.of(sequence.client)
            sequence.drafting = Drafting(PromptLookup(sequence.tokens, earlier), steered)

    def ended(self, sequence: Sequence) -> None:
        """Stores the text of an ended sequence, so that drafts for the client's next requests can
        be copied from it."""
        if self._model is not None:
            self._model.forget(sequence)
        if self._costs is None or sequence.scored or not sequence.num_generated:
            return
        # The text of sequence 0 is stored with the whole prompt. The texts of other sequences are
        # stored with only the last ``LONGEST`` tokens of the prompt.
        start = max(0, sequence.num_prompt - LONGEST) if sequence.seq else 0
        self._earlier.add(sequence.client, sequence.tokens[start:])

    @property
    def any_drafts(self) -> bool:
        """Whether any sequence has a draft for the next step."""
        return bool(self._drafted)

    def propose(self, running: Collection[Sequence]) -> None:
        """Called before a step is scheduled. Removes the drafts of the last step, and sets
        ``draft`` of the running sequences. Keeps the drafts that ``propose_ahead`` has made for
        this step."""
        ahead, self._ahead = self._ahead, []
        for sequence in self._drafted:
            if sequence not in ahead:
                sequence.draft = ()
        self._drafted = ahead
        self._propose([s for s in running if s.decodes and not _steered(s)], len(running))

    def propose_ahead(self, sequences: Collection[Sequence], rows: int) -> None:
        """Called before the next step is scheduled. Sets ``draft`` of sequences with controllers.
        The controllers can then compute a mask after each token of the draft. ``rows``: number of
        rows of the next step."""
        self._propose([s for s in sequences if _steered(s)], rows)
        self._ahead = [s for s in sequences if s.draft]

    def _propose(self, ready: list[Sequence], rows: int) -> None:
        for sequence in ready:
            sequence.draft = ()
        for sequence, drafting, match, count in self._worthwhile(ready, rows):
            count = min(count, _room(sequence))
            if count > 0:
                drafting.guess = None
                sequence.draft = drafting.lookup.draft(match, count)
                self._drafted.append(sequence)
        if self._model is not None:
            self._write(self._model, [s for s in ready if not s.draft], rows)

    def awaits(self, sampled: Collection[Sequence]) -> bool:
        """Whether any of the sequences that are being sampled is likely to have a draft in the next
        step. If so, the next step must not be scheduled before their tokens are known."""
        rows = len(sampled)
        if self._worthwhile(sampled, rows):
            return True
        return self._model is not None and bool(self._foreseen(self._model, sampled, rows)[1])

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Records the outcome of a sequence's draft."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        if sequence.drafting is not None:
            sequence.drafting.acceptance.observe(sequence.drafting.kind, drafted, accepted)

    def _worthwhile(
        self, sequences: Iterable[Sequence], rows: int
    ) -> list[tuple[Sequence, Drafting, Match, int]]:
        """The sequences for which a draft saves more than it costs in a step of ``rows`` rows. Each
        sequence comes with its match and the length of the draft."""
        if self._costs is None or not 0 < rows <= self._costs.max_sequences:
            return []
        found: list[tuple[Sequence, Drafting, Match]] = []
        for sequence in sequences:
            drafting = sequence.drafting
            match = drafting.look(sequence.tokens) if drafting is not None else None
            if drafting is not None and match is not None:
                found.append((sequence, drafting, match))
        if not found:
            return []
        counts = lengths([one.chances(match) for _, one, match in found], rows, self._costs)
        return [(*one, count) for one, count in zip(found, counts, strict=True) if count]

    # --- the draft model ------------------------------------------------------------------------

    def _write(self, model: DraftModel, sequences: Iterable[Sequence], rows: int) -> None:
        """Writes drafts with the draft model if they save more than they cost."""
        foreseen, count = self._foreseen(model, sequences, rows)
        if not count:
            return
        for sequence, tokens in zip(foreseen, model.draft(foreseen, count), strict=True):
            drafting = sequence.drafting
            draft = tokens[: _room(sequence)]
            if drafting is not None and draft:
                drafting.idle, drafting.kind, drafting.guess = 0, WRITTEN, None
                sequence.draft = draft
                self._drafted.append(sequence)

    def _foreseen(
        self, model: DraftModel, sequences: Iterable[Sequence], rows: int
    ) -> tuple[list[Sequence], int]:
        """The sequences for which the draft model writes drafts in a step of ``rows`` rows, and the
        number of tokens of each draft. This number is 0 if no drafts are written."""
        if self._costs is None or not 0 < rows <= self._costs.max_sequences:
            return [], 0
        foreseen: list[Sequence] = []
        retried: list[Sequence] = []
        probabilities: list[float] = []
        for sequence in sequences:
            drafting = sequence.drafting
            if drafting is None or _room(sequence) <= 0:
                continue
            drafting.idle += 1
            if drafting.idle > RETRY_STEPS:
                retried.append(sequence)
            probability = drafting.acceptance.expected(WRITTEN)
            if probability >= MIN_PROBABILITY:
                foreseen.append(sequence)
                probabilities.append(probability)
        count = written_length(probabilities, rows, self._costs, model.forward_cost)
        return (foreseen, count) if count else (retried, RETRY_TOKENS if retried else 0)


def _steered(sequence: Sequence) -> bool:
    return sequence.drafting is not None and sequence.drafting.steered


def _room(sequence: Sequence) -> int:
    """The greatest useful length of a draft. The step also samples the token after the draft. So
    this length is one less than the number of tokens that the sequence may still get."""
    return sequence.max_length - len(sequence.tokens) - 1
