"""The index of prompt lookup: the places where runs of tokens occur."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SIZE = 3
"""Number of tokens of a run. Shorter runs are too frequent to predict the next token."""
PLACES = 6
"""For each run, this number of places is stored: the latest places."""
LONGEST = 32
"""Maximum number of tokens that are compared for a match. A longer match does not predict
better."""

Places = list[tuple[list[int], int]]
"""The places of a run, the latest last. A place consists of a text and the index in this text at
which the run ends."""
Index = dict[tuple[int, ...], Places]
"""The places of each run."""


class Match(NamedTuple):
    """An earlier occurrence of the end of a text."""

    text: list[int]
    end: int
    """The index after the occurrence: ``text[end]`` is the token that followed it."""
    length: int
    """Number of equal tokens before ``end``; at most ``LONGEST``."""


def add_runs(index: Index, text: list[int], start: int, end: int) -> None:
    """Adds the runs of a text that end in ``[start, end)``. The end of a run is the index after its
    last token."""
    for at in range(max(start, SIZE), end):
        run = tuple(text[at - SIZE : at])
        places = index.get(run)
        if places is None:
            index[run] = [(text, at)]
        else:
            places.append((text, at))
            if len(places) > PLACES:
                del places[0]


def longest(tokens: list[int], places: Iterable[tuple[list[int], int]]) -> Match | None:
    """The longest match of the end of ``tokens`` at one of ``places``. If several matches have this
    length, the first."""
    best: Match | None = None
    size = len(tokens)
    for text, end in places:
        if end < len(text):
            length = _agreement(tokens, size, text, end)
            if length >= SIZE and (best is None or length > best.length):
                best = Match(text, end, length)
                if length == LONGEST:
                    break
    return best


def followed_alike(places: Places) -> tuple[int, int]:
    """Compares the token that follows each place of a run with the token that follows the previous
    place. Returns the number of equal pairs, and the number of all pairs."""
    alike, known, before = 0, -1, -1
    for text, end in places:
        if end < len(text):
            known += 1
            alike += text[end] == before
            before = text[end]
    return alike, max(0, known)


def _agreement(tokens: list[int], size: int, text: list[int], end: int) -> int:
    """Number of tokens that are equal directly before index ``size`` in ``tokens`` and directly
    before index ``end`` in ``text``; at most ``LONGEST``."""
    most = min(size, end, LONGEST)
    if tokens[size - most : size] == text[end - most : end]:
        return most
    length = 0
    while tokens[size - 1 - length] == text[end - 1 - length]:
        length += 1
    return length
