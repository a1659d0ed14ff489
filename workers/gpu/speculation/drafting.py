"""The state of speculative decoding of one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .lengths import Acceptance, kind_of
from .ngrams import PromptLookup
from .places import Match


class Guess(NamedTuple):
    """The token that a match (``places.Match``) predicts for a position of the sequence."""

    position: int
    token: int
    kind: int


@dataclass(slots=True)
class Drafting:
    """A sequence's state of speculative decoding."""

    lookup: PromptLookup
    steered: bool = False
    """Whether a controller computes a mask and a bias after each token of a draft."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    kind: int = 0
    """The kind of the last match or draft (``kind_of``)."""
    idle: int = 0
    """How often a draft from the draft model was considered since the last such draft. It is
    considered once or twice in each step."""
    guess: Guess | None = None
    """The prediction of a match, if no draft was made from this match. When the next token is
    known, the prediction counts towards ``acceptance`` like a draft of one token."""

    def look(self, tokens: list[int]) -> Match | None:
        """Looks up the match of the sequence, and compares the last guess with the tokens.
        ``tokens``: all tokens of the sequence."""
        guess, self.guess = self.guess, None
        if guess is not None and guess.position < len(tokens):
            self.acceptance.observe(guess.kind, 1, tokens[guess.position] == guess.token)
        match = self.lookup.match()
        if match is not None:
            self.kind = kind_of(match.length)
            self.guess = Guess(len(tokens), match.text[match.end], self.kind)
        return match

    def chances(self, match: Match) -> Iterator[float]:
        """The acceptance probability of each token of a draft from this match."""
        return self.lookup.chances(match, self.acceptance.expected(self.kind))

    def fork(self, tokens: list[int]) -> Drafting:
        """The state of a fork with these tokens."""
        return Drafting(self.lookup.fork(tokens), self.steered, self.acceptance.fork())
