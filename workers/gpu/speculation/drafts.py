"""Which sequences of the next step have drafts, and what becomes of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .earlier import SessionTexts
from .lengths import Acceptance, Costs, kind_of, lengths
from .ngrams import PromptLookup
from .places import LONGEST, Match

if TYPE_CHECKING:
    from ..sequence import Sequence


class Guess(NamedTuple):
    """What the token at a position will be, by a match."""

    position: int
    token: int
    kind: int


@dataclass(slots=True)
class Drafting:
    """What a sequence keeps for its drafts."""

    lookup: PromptLookup
    acceptance: Acceptance = field(default_factory=Acceptance)
    kind: int = 0
    """That of the last match."""
    guess: Guess | None = None
    """Of a match that was not drafted from. What becomes of it costs nothing and says as much."""

    def look(self, tokens: list[int]) -> Match | None:
        """The match of a sequence with these tokens."""
        guess, self.guess = self.guess, None
        if guess is not None and guess.position < len(tokens):
            self.acceptance.observe(guess.kind, 1, tokens[guess.position] == guess.token)
        match = self.lookup.match()
        if match is not None:
            self.kind = kind_of(match.length)
            self.guess = Guess(len(tokens), match.text[match.end], self.kind)
        return match

    @property
    def expected(self) -> float:
        """The probability that a token that followed the last match follows again."""
        return self.acceptance.expected(self.kind)

    def fork(self, tokens: list[int]) -> Drafting:
        """The same for a fork with these tokens."""
        return Drafting(self.lookup.fork(tokens), self.acceptance.fork())


class Speculation:
    """The drafts of one engine.

    A draft changes no token: it is verified, and what follows from the logits is sampled as without
    it (``verify.py``). So all that is here is a guess, and may be wrong. ``costs``: what drafts
    cost on the engine's device; None: no sequence has any.
    """

    def __init__(self, costs: Costs | None) -> None:
        self._costs = costs
        self._earlier = SessionTexts()
        self._drafted: list[Sequence] = []
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0

    def begin(self, sequence: Sequence) -> None:
        """Lets a new sequence have drafts."""
        if self._costs is not None:
            earlier = self._earlier.of(sequence.client)
            sequence.drafting = Drafting(PromptLookup(sequence.tokens, earlier))

    def ended(self, sequence: Sequence) -> None:
        """Keeps the text of a sequence for the drafts of its session's next requests."""
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
        scheduled; those of the step before are removed."""
        for sequence in self._drafted:
            sequence.draft = ()
        self._drafted = []
        ready = (s for s in running if s.decodes)
        for sequence, drafting, match, count in self._worthwhile(ready, len(running)):
            # The token after the draft is sampled in any case, and may be the last.
            count = min(count, sequence.max_length - len(sequence.tokens) - 1)
            if count > 0:
                drafting.guess = None
                sequence.draft = drafting.lookup.draft(match, count)
                self._drafted.append(sequence)

    def awaits(self, sampled: Collection[Sequence]) -> bool:
        """Whether some of the sequences that are being sampled are likely to have drafts in the
        next step: then their tokens are to be known before it is scheduled."""
        return bool(self._worthwhile(sampled, len(sampled)))

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
        """The sequences for which a draft in a step of so many ``rows`` saves more than it costs,
        with the match that it is made from and its length."""
        if self._costs is None or not 0 < rows <= self._costs.most_sequences:
            return []
        found: list[tuple[Sequence, Drafting, Match]] = []
        for sequence in sequences:
            drafting = sequence.drafting
            match = drafting.look(sequence.tokens) if drafting is not None else None
            if drafting is not None and match is not None:
                found.append((sequence, drafting, match))
        if not found:
            return []
        counts = lengths([drafting.expected for _, drafting, _ in found], rows, self._costs)
        return [(*one, count) for one, count in zip(found, counts, strict=True) if count]
