"""Builds the states of texts that must end with a stop. A state consists of two numbers: the state
of the part, and the *matched length*. The matched length is the length of the longest prefix of the
stop with which the text ends.

The prefix is found with the automaton of D. Knuth, J. Morris and V. Pratt, Fast pattern matching in
strings, SIAM Journal on Computing 6, 1977. Bytes are compared instead of characters. This is
equivalent, because in UTF-8 the bytes of a stop occur only where its characters occur.
"""

from __future__ import annotations

from ..regex.bounds import Budget
from ..regex.dfa import Dfa
from .rows import joint_labels, rows_of

_STOPPED = -1
"""The state of a text that ends with the stop and that the part accepts."""


class Stopped:
    """The states of a combination: pairs of a state of the part and a matched length of the stop. A
    pair is encoded as one number: the state times the size of the stop, plus the length."""

    def __init__(self, part: Dfa, stop: bytes, budget: Budget) -> None:
        letters = bytearray(256)
        for number, byte in enumerate(dict.fromkeys(stop), 1):
            letters[byte] = number
        self.labels = joint_labels([part.classes, bytes(letters)])
        self.part = part
        self.stop = stop
        self.first = part.start * len(stop)
        self._rows = rows_of(part, self.labels, budget)
        self._after = _lengths([self.labels[byte] for byte in stop], max(self.labels) + 1, budget)

    def row(self, state: int) -> dict[int, int]:
        """For each label that can follow: the next state. Empty after the stop."""
        if state == _STOPPED:
            return {}
        size = len(self.stop)
        inner, length = divmod(state, size)
        after = self._after[length]
        row: dict[int, int] = {}
        for label, target in self._rows[inner].items():
            if after[label] < size:
                row[label] = target * size + after[label]
            elif self.part.accepting[target]:
                row[label] = _STOPPED
        return row

    def accepts(self, state: int) -> bool:
        """Whether the text ends with the stop and the part accepts the text."""
        return state == _STOPPED


def _lengths(stop: list[int], labels: int, budget: Budget) -> list[list[int]]:
    """A table ``[matched length][label]``. An entry is the matched length after one more byte with
    this label."""
    lengths: list[list[int]] = []
    border = 0
    for length, label in enumerate(stop):
        budget.tick()
        row = lengths[border][:] if length else [0] * labels
        back = row[label]
        row[label] = length + 1
        lengths.append(row)
        border = back if length else 0
    return lengths
