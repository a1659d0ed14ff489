"""Prompt lookup: a text that repeats what stood before it is likely to go on as that did.

The index has, for each run of ``SIZE`` tokens, the last places where it occurred in the texts of
one request: its prompt, what it has generated, and its forks. It grows with the texts, one entry
for each token, so that a lookup costs the same however long they are. Found places are compared
backwards, and the longest match wins. The idea is Saxena's (prompt lookup decoding, 2023).
"""

from __future__ import annotations

from typing import NamedTuple

SIZE = 3
"""Tokens of a run: shorter ones occur everywhere and predict little."""
PLACES = 4
"""Places that are remembered of each run, the last ones."""
LONGEST = 32
"""Matches are compared up to this length; a longer one predicts no better."""
ADVANCE = 4096
"""Tokens that one lookup adds to the index at most: of a long prompt it takes several."""

Index = dict[tuple[int, ...], list[tuple[list[int], int]]]
"""By run: the texts in which it occurred, and where in them it ended, the latest last."""


class Match(NamedTuple):
    """An earlier occurrence of what a text ends with."""

    text: list[int]
    end: int
    """The token there followed the occurrence."""
    length: int
    """How many tokens are the same before it; at most ``LONGEST``."""


class PromptLookup:
    """The lookups of one sequence, in an index that it shares with its forks.

    ``tokens`` is the sequence's own list: what is appended to it is found without a further call.
    Tokens that were dropped from it may be in the index still, and are recognised there.
    """

    __slots__ = ("_index", "_indexed", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._index: Index = {}
        self._indexed = SIZE
        """Runs that end before this position are in the index."""

    def fork(self, tokens: list[int]) -> PromptLookup:
        """The lookups of a fork, whose ``tokens`` are equal until now."""
        copy = PromptLookup(tokens)
        copy._index = self._index
        copy._indexed = self._indexed
        return copy

    def match(self) -> Match | None:
        """The longest earlier occurrence of what the text ends with, the latest of equal ones."""
        tokens = self._tokens
        size = len(tokens)
        if size <= SIZE:
            return None
        self._advance(size)
        best: Match | None = None
        for text, end in reversed(self._index.get(tuple(tokens[-SIZE:]), ())):
            if end < len(text):
                length = _agreement(tokens, size, text, end)
                if length >= SIZE and (best is None or length > best.length):
                    best = Match(text, end, length)
                    if length == LONGEST:
                        break
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

    def _advance(self, size: int) -> None:
        """Adds the runs that end before the last token. The run at the end is added when another
        token follows it, so that it does not find itself."""
        tokens, index = self._tokens, self._index
        first = min(self._indexed, size)
        until = min(size, first + ADVANCE)
        for end in range(first, until):
            run = tuple(tokens[end - SIZE : end])
            places = index.get(run)
            if places is None:
                index[run] = [(tokens, end)]
            else:
                places.append((tokens, end))
                if len(places) > PLACES:
                    del places[0]
        self._indexed = max(until, SIZE)


def _agreement(tokens: list[int], size: int, text: list[int], end: int) -> int:
    """How many tokens before ``size`` equal those of ``text`` before ``end``."""
    most = min(size, end, LONGEST)
    if tokens[size - most : size] == text[end - most : end]:
        return most
    length = 0
    while tokens[size - 1 - length] == text[end - 1 - length]:
        length += 1
    return length
