"""Prompt lookup: a text that repeats what stood before it is likely to go on as that did.

The index has, for each run of ``SIZE`` tokens, the last places where it occurred in the texts of
one request: its prompt, what it has generated, and its forks. It grows with the texts, one entry
for each token, so that a lookup costs the same however long they are. Found places are compared
backwards, and the longest match wins. Where it is not found there over ``LONGEST`` tokens, the
texts of the session's earlier requests are looked at too (``earlier.py``). The idea is Saxena's
(prompt lookup decoding, 2023).

Where a text departs from what it repeats (a name that was replaced, a value of a record), it often
comes back soon. So behind the last match one or two tokens are enough. The likelihood of a draft
token follows from the tokens after the other places of the run before it.
"""

from __future__ import annotations

from collections.abc import Iterator

from .earlier import ADVANCE, EarlierTexts
from .lengths import MOST, PRIOR
from .places import LONGEST, PLACES, SIZE, Index, Match, add_runs, followed_alike, longest

NEAR = 12
"""This many tokens after the last match, and this many tokens long, the text is expected back."""


class PromptLookup:
    """The lookups of one sequence, in an index that it shares with its forks.

    ``tokens`` is the sequence's own list: what is appended to it is found without a further call.
    Tokens that were dropped from it may be in the index still, and are recognised there.
    ``earlier``: texts of other requests.
    """

    __slots__ = ("_earlier", "_index", "_indexed", "_last", "_size", "_tokens")

    def __init__(self, tokens: list[int], earlier: EarlierTexts | None = None) -> None:
        self._tokens = tokens
        self._earlier = earlier
        self._index: Index = {}
        self._indexed = SIZE
        """Runs that end before this position are in the index."""
        self._last: Match | None = None
        """The last match of a run."""
        self._size = 0
        """How many tokens there were then."""

    def fork(self, tokens: list[int]) -> PromptLookup:
        """The lookups of a fork, whose ``tokens`` are equal until now."""
        copy = PromptLookup(tokens, self._earlier)
        copy._index = self._index
        copy._indexed = self._indexed
        return copy

    def match(self) -> Match | None:
        """The longest earlier occurrence of what the text ends with, the latest of equal ones."""
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
        """The ``count`` tokens that followed a match; fewer where another text ends before.

        Where the match is near the end of the sequence's own text, the text has a period, and goes
        round in it.
        """
        found = match.text[match.end : match.end + count]
        if match.text is self._tokens:
            period = len(self._tokens) - match.end
            while len(found) < count:
                found.append(found[-period])
        return found

    def chances(self, match: Match, guess: float) -> Iterator[float]:
        """How likely each token of a draft from a match is to be accepted, where those before it
        were. ``guess``: the same of any token of a match of its kind, which counts as much as
        ``PRIOR`` observations."""
        run = self._tokens[-SIZE:]
        for token in self.draft(match, MOST):
            alike, observed = self._followed_alike(tuple(run))
            yield (alike + PRIOR * guess) / (observed + PRIOR)
            run = [*run[1:], token]

    def _followed_alike(self, run: tuple[int, ...]) -> tuple[int, int]:
        places = self._index.get(run, [])
        if self._earlier is not None and len(places) < PLACES:
            places = [*self._earlier.known_places(run), *places]
        return followed_alike(places)

    def _near(self) -> Match | None:
        """Where behind the last match the last two tokens occur, or the last one."""
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
        token follows it, so that it does not find itself."""
        first = min(self._indexed, size)
        until = min(size, first + ADVANCE)
        add_runs(self._index, self._tokens, first, until)
        self._indexed = max(until, SIZE)
