"""The numbers of an answer's choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


class Indexes:
    """Numbers the choices of an answer: first the requested choices of each prompt, in the order of
    the prompts, then the forks."""

    def __init__(self, counts: Sequence[int]) -> None:
        """``counts``: the number of choices of each prompt."""
        self._counts = counts
        *self._first, self._next = accumulate(counts, initial=0)
        self._forks: dict[tuple[int, int], int] = {}

    def of(self, place: int, seq: int) -> int:
        """The number of the choice for sequence ``seq`` of the prompt with the index ``place``."""
        if seq < self._counts[place]:
            return self._first[place] + seq
        number = self._forks.get((place, seq))
        if number is None:
            number = self._forks[place, seq] = self._next
            self._next += 1
        return number
