"""Which sequences of the next step have drafts, and what becomes of them."""

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
"""The draft model writes nothing for a sequence whose tokens it foresees less often than this."""
RETRY_STEPS = 32
"""After this many steps without a draft it writes one nevertheless, as the text may have
changed."""
RETRY_TOKENS = 3


class Speculation:
    """The drafts of one engine.

    A draft changes no token: it is verified, and what follows from the logits is sampled as without
    it (``verify.py``). So all that is here is a guess, and may be wrong. ``costs``: what drafts
    cost on the engine's device; None: no sequence has any. ``model`` writes drafts for sequences
    whose text repeats nothing.
    """

    def __init__(self, costs: Costs | None, model: DraftModel | None = None) -> None:
        self._costs = costs
        self._model = model
        self._earlier = SessionTexts()
        self._drafted: list[Sequence] = []
        self._ahead: list[Sequence] = []
        """Those of them whose drafts were made before the step, for their controllers."""
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def begin(self, sequence: Sequence, steered: bool = False) -> None:
        """Lets a sequence have drafts; ``steered``: under masks that its controller gives."""
        if self._costs is not None and sequence.drafting is None:
            earlier = self._earlier.of(sequence.client)
            sequence.drafting = Drafting(PromptLookup(sequence.tokens, earlier), steered)

    def ended(self, sequence: Sequence) -> None:
        """Keeps the text of a sequence for the drafts of its session's next requests."""
        if self._model is not None:
            self._model.forget(sequence)
        if self._costs is None or sequence.scored or not sequence.num_generated:
            return
        # Its request's first sequence has the prompt of all.
        start = max(0, sequence.num_prompt - LONGEST) if sequence.seq else 0
        self._earlier.add(sequence.client, sequence.tokens[start:])

    @property
    def any_drafts(self) -> bool:
        """Whether the next step has drafts."""
        return bool(self._drafted)

    def propose(self, running: Collection[Sequence]) -> None:
        """Sets ``draft`` of the sequences that are to be continued by one, before a step is
        scheduled; those of the step before are removed. Sequences with controllers keep what
        ``propose_ahead`` has made for this step."""
        ahead, self._ahead = self._ahead, []
        for sequence in self._drafted:
            if sequence not in ahead:
                sequence.draft = ()
        self._drafted = ahead
        self._propose([s for s in running if s.decodes and not _steered(s)], len(running))

    def propose_ahead(self, sequences: Collection[Sequence], rows: int) -> None:
        """Sets ``draft`` of sequences with controllers for the next step, of this many ``rows``,
        which has not been scheduled: the controllers are to give the masks along it."""
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
        """Whether some of the sequences that are being sampled are likely to have drafts in the
        next step: then their tokens are to be known before it is scheduled."""
        rows = len(sampled)
        if self._worthwhile(sampled, rows):
            return True
        return self._model is not None and bool(self._foreseen(self._model, sampled, rows)[1])

    def verified(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """Takes in what became of a sequence's draft."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        if sequence.drafting is not None:
            sequence.drafting.acceptance.observe(sequence.drafting.kind, drafted, accepted)

    def _worthwhile(
        self, sequences: Iterable[Sequence], rows: int
    ) -> list[tuple[Sequence, Drafting, Match, int]]:
        """The sequences for which a draft in a step of this many ``rows`` saves more than it costs,
        with the match that it is made from and its length."""
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
        """Lets the draft model write drafts, where they save more than they cost."""
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
        """The sequences for which the draft model is to write in a step of this many ``rows``, and
        how many tokens; 0: none."""
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
    """How long a draft may be: the token after it is sampled in any case, and may be the last."""
    return sequence.max_length - len(sequence.tokens) - 1
