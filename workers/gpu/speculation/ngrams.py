"""Prompt lookup: finds where the last tokens of a sequence occur earlier, and drafts the tokens
that followed there.

A *run* is ``SIZE`` consecutive tokens. For each run, the index has the last places where the run
occurs in the texts of one request. These texts are the prompt and the generated tokens of the
sequence and its forks. A lookup adds only new tokens to the index, so its time does not depend on
the length of the text. A lookup finds the places of the sequence's last run. At each place, it
counts how many tokens before the place equal the sequence's last tokens. The place with the most
equal tokens is the *match*. If fewer than ``LONGEST`` tokens are equal, the texts of the session's
earlier requests are searched too (``earlier.py``). The idea is Saxena's (prompt lookup decoding,
2023).

A sequence may copy an earlier text (its *source*) except at one place, such as a replaced name.
Soon after this place, the sequence often agrees with the source again. So near the last match, one
or two equal tokens are enough for a new match. The acceptance probability of a draft token is
estimated from the places of the run before the token. The probability is high if the same token
often follows at consecutive places.
"""

from __future__ import annotations

from collections.abc import Iterator

from .earlier import ADVANCE, EarlierTexts
from .lengths import MAX_DRAFT_TOKENS, PRIOR
from .places import LONGEST, PLACES, SIZE, Index, Match, add_runs, followed_alike, longest

NEAR = 12
"""A match of one or two tokens is accepted only near the last match. The sequence must have
generated at most this number of tokens since then, and the new place must be within this number of
tokens of the last place."""


class PromptLookup:
    """The lookups of one sequence. Forks share the index.

    ``tokens`` is the sequence's own list, so later lookups also find tokens that are appended to
    it. Runs with dropped tokens may still be in the index, but they never match, because a match
    compares the tokens of the texts. ``earlier``: the texts of the session's earlier requests.
    """

    __slots__ = ("_earlier", "_index", "_indexed", "_last", "_size", "_tokens")

    def __init__(self, tokens: list[int], earlier: EarlierTexts | None = None) -> None:
        self._tokens = tokens
        self._earlier = earlier
        self._index: Index = {}
        self._indexed = SIZE
        """All runs that end before this position are in the index."""
        self._last: Match | None = None
        """The last match of a full run."""
        self._size = 0
        """Number of tokens of the sequence when ``_last`` was found."""

    def fork(self, tokens: list[int]) -> PromptLookup:
        """The lookups of a fork. ``tokens``: the fork's own list. It has the same tokens as this
        sequence."""
        copy = PromptLookup(tokens, self._earlier)
        copy._index = self._index
        copy._indexed = self._indexed
        return copy

    def match(self) -> Match | None:
        """The match with the most equal tokens; if several have as many, the latest. If the last
        run does not occur earlier, returns a match near the last match (``NEAR``), or None."""
        found = self._of_run()
        if found is None:
            return self._near()
        self._last, self._size = found, len(self._tokens)
        return found

    def _of_run(self) -> Match | None:
        tokens = self._tokens
        size = len(tokens)
        if size <= SIZE:
            return None
        self._advance(size)
        run = tuple(tokens[-SIZE:])
        best = longest(tokens, reversed(self._index.get(run, ())))
        if self._earlier is not None and (best is None or best.length < LONGEST):
            other = longest(tokens, reversed(self._earlier.places(run)))
            if other is not None and (best is None or other.length > best.length):
                return other
        return best

    def draft(self, match: Match, count: int) -> list[int]:
        """The ``count`` tokens that follow a match. If the match is in an earlier text, this text
        may end before ``count`` tokens.

        A match near the end of the sequence's own text means that the text is periodic. The draft
        then repeats the period.
        """
        found = match.text[match.end : match.end + count]
        if match.text is self._tokens:
            period = len(self._tokens) - match.end
            while len(found) < count:
                found.append(found[-period])
        return found

    def chances(self, match: Match, guess: float) -> Iterator[float]:
        """The acceptance probability of each token of a draft from a match, if the tokens before it
        were accepted. ``guess``: the expected acceptance for this kind of match. It has the weight
        of ``PRIOR`` observations."""
        run = self._tokens[-SIZE:]
        for token in self.draft(match, MAX_DRAFT_TOKENS):
            alike, observed = self._followed_alike(tuple(run))
            yield (alike + PRIOR * guess) / (observed + PRIOR)
            run = [*run[1:], token]

    def _followed_alike(self, run: tuple[int, ...]) -> tuple[int, int]:
        places = self._index.get(run, [])
        if self._earlier is not None and len(places) < PLACES:
            places = [*self._earlier.known_places(run), *places]
        return followed_alike(places)

    def _near(self) -> Match | None:
        """A match of the last two tokens at a place near the last match. If they do not occur
        there, a match of only the last token. If it does not occur there either, None."""
        last, tokens = self._last, self._tokens
        if last is None or not self._size < len(tokens) <= self._size + NEAR:
            return None
        text, start, _ = last
        single: Match | None = None
        for end in range(start + 1, min(start + NEAR, len(text))):
            if text[end - 1] == tokens[-1] and (text is not tokens or end < len(tokens)):
                if text[end - 2] == tokens[-2]:
                    return Match(text, end, 2)
                single = single or Match(text, end, 1)
        return single

    def _advance(self, size: int) -> None:
        """Adds the runs that end before the last token. The run at the end is added when another
        token follows it, so that it does not match itself."""
        first = min(self._indexed, size)
        until = min(size, first + ADVANCE)
        add_runs(self._index, self._tokens, first, until)
        self._indexed = max(until, SIZE)
