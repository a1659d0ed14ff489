"""Builds the transition table of combined automata, within limits on size and time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, TypeVar

from ..regex.bounds import Budget
from ..regex.dfa import Dfa, table
from ..regex.minimize import minimise, trimmed
from ..regex.subsets import Automaton
from ..regex.utf8 import ByteAutomaton
from .rows import MAX_TRANSITIONS, Row, segments_of, too_many_transitions

MAX_MINIMISED = 200_000
"""An automaton with more transitions than this number is not minimised. Bytes with the same label
(``Source.labels``) count as one transition. Minimising an automaton of this size takes about half a
second."""

State = TypeVar("State", bound=Hashable)


class CombinationError(ValueError):
    """The parts cannot be combined in this way, or their combination is too large."""


class Source(Protocol[State]):
    """The states of a combination. Each state is computed when ``built`` reaches it."""

    labels: bytes
    """The label of each byte. Bytes with the same label have the same transitions."""
    first: State

    def row(self, state: State) -> dict[int, State]:
        """For each label that can follow in this state: the next state."""

    def accepts(self, state: State) -> bool:
        """Whether the text may end in this state."""


def built(source: Source[State], budget: Budget, reached: list[State]) -> Dfa | None:
    """The table of the combination; None if it matches no text.

    An automaton of at most ``MAX_MINIMISED`` transitions is minimised. Its states are numbered by a
    breadth-first search that follows the bytes in ascending order. So if a combination and a
    pattern match the same texts, they have the same table. Each state of the combination is added
    to ``reached`` when it is found. From ``reached``, the caller can find the part that is too
    large. Raises Exhausted if a limit is exceeded.
    """
    numbers = {source.first: 0}
    reached.append(source.first)
    rows: list[Row] = []
    accepts: list[int] = []
    count = 0
    # The list grows during the loop.
    for state in reached:
        row: Row = {}
        for label, after in sorted(source.row(state).items(), key=_label):
            number = numbers.setdefault(after, len(reached))
            if number == len(reached):
                budget.states(number + 2)
                reached.append(after)
            row[label] = number
        budget.tick()
        count += len(row)
        if count > MAX_TRANSITIONS:
            raise too_many_transitions()
        rows.append(row)
        accepts.append(int(source.accepts(state)))
    if not any(accepts):
        return None
    segments = segments_of(source.labels)
    automaton = Automaton(segments, rows, accepts)
    small = minimise(automaton, budget) if count <= MAX_MINIMISED else trimmed(automaton)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(256)]
    for low, high, label in segments:
        spans[label].append((low, high))
    runs = [
        tuple([(low, high, to + 1) for label, to in row.items() for low, high in spans[label]])
        for row in small.rows
    ]
    found = table(ByteAutomaton([(), *runs], [0, *small.accepts]))
    budget.check()
    return found


def _label(item: tuple[int, object]) -> int:
    return item[0]
