"""Where runs of tokens occur: the index of prompt lookup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

SIZE = 3
"""Tokens of a run: shorter ones occur everywhere and predict little."""
PLACES = 6
"""Places that are remembered of each run, the last ones."""
LONGEST = 32
"""Matches are compared up to this length; a longer one predicts no better."""

Places = list[tuple[list[int], int]]
"""The texts in which a run occurs, and where in them it ends, the latest last."""
Index = dict[tuple[int, ...], Places]
"""By run: its places."""


class Match(NamedTuple):
    """An earlier occurrence of what a text ends with."""

    text: list[int]
    end: int
    """The token there followed the occurrence."""
    length: int
    """How many tokens are the same before it; at most ``LONGEST``."""


def add_runs(index: Index, text: list[int], start: int, end: int) -> None:
    """Adds the runs of a text that end in ``[start, end)``: before the token of that place."""
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
    """The longest of the matches of what ``tokens`` ends with, the first of equal ones."""
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
    """How many places of a run are followed by the same token as the one before them, of how many
    of which that is known."""
    alike, known, before = 0, -1, -1
    for text, end in places:
        if end < len(text):
            known += 1
            alike += text[end] == before
            before = text[end]
    return alike, max(0, known)


def _agreement(tokens: list[int], size: int, text: list[int], end: int) -> int:
    """How many tokens before ``size`` equal those of ``text`` before ``end``."""
    most = min(size, end, LONGEST)
    if tokens[size - most : size] == text[end - most : end]:
        return most
    length = 0
    while tokens[size - 1 - length] == text[end - 1 - length]:
        length += 1
    return length
