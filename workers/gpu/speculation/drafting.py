"""The state of a sequence for its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .lengths import Acceptance, kind_of
from .ngrams import PromptLookup
from .places import Match


class Guess(NamedTuple):
    """The expected token at a position, by a match."""

    position: int
    token: int
    kind: int


@dataclass(slots=True)
class Drafting:
    """The state of a sequence for its drafts."""

    lookup: PromptLookup
    steered: bool = False
    """It has a controller, which gives the masks along its drafts."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    kind: int = 0
    """That of the last match or draft."""
    idle: int = 0
    """Steps without a draft of the draft model."""
    guess: Guess | None = None
    """A match that was not drafted from. Its outcome costs nothing and is as informative as that of
    a draft."""

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

    def chances(self, match: Match) -> Iterator[float]:
        """How likely each token of a draft from the last match is to be accepted."""
        return self.lookup.chances(match, self.acceptance.expected(self.kind))

    def fork(self, tokens: list[int]) -> Drafting:
        """The same for a fork with these tokens."""
        return Drafting(self.lookup.fork(tokens), self.steered, self.acceptance.fork())
