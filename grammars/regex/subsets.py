"""The subset construction, over classes of characters.

Two characters are in the same class if each set of the pattern contains either both or neither. So
large Unicode sets do not slow this step down. A state is a set of positions (``positions.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from .bounds import Budget
from .charsets import CharSet
from .positions import Positions

Segments = list[tuple[int, int, int]]
"""Ranges of characters in order, each with its class."""


@dataclass(slots=True)
class Automaton:
    """A deterministic automaton over classes of characters.

    ``rows[s]`` maps classes to next states. Classes without a next state are missing.
    ``accepts[s]`` is a bit set: bit i is set if state s accepts the pattern with number i. The
    start is state 0.
    """

    segments: Segments
    rows: list[dict[int, int]]
    accepts: list[int]


def character_classes(charsets: list[CharSet]) -> tuple[Segments, list[list[int]]]:
    """Returns two values. The first has the ranges of all characters that are in any set, each
    range with its class. The second has, for each set, its classes."""
    changes: dict[int, int] = {}
    for number, chars in enumerate(charsets):
        bit = 1 << number
        for low, high in chars:
            changes[low] = changes.get(low, 0) ^ bit
            changes[high + 1] = changes.get(high + 1, 0) ^ bit
    segments: Segments = []
    classes: dict[int, int] = {}
    active = 0
    begun = 0
    for point in sorted(changes):
        if active:
            segments.append((begun, point - 1, classes.setdefault(active, len(classes))))
        active ^= changes[point]
        begun = point
    members: list[list[int]] = [[] for _ in charsets]
    for holders, number in classes.items():
        while holders:
            low_bit = holders & -holders
            members[low_bit.bit_length() - 1].append(number)
            holders ^= low_bit
    return segments, members


def determinise(positions: Positions, budget: Budget) -> Automaton:
    """The deterministic automaton of some positions. Raises Exhausted if the automaton is too
    large."""
    segments, members = character_classes(positions.charsets)
    classes = [members[number] for number in positions.charset]
    follow = positions.follow
    states: dict[frozenset[int], int] = {positions.first: 0}
    pending = [positions.first]
    nexts: dict[tuple[int, ...], int] = {}
    rows: list[dict[int, int]] = []
    accepts: list[int] = []
    entries = len(positions.first)
    # The list grows during the loop.
    for state in pending:
        budget.check()
        read: dict[int, list[int]] = {}
        accepted = 0
        for position in sorted(state):
            if position < 0:
                accepted |= 1 << ~position
                continue
            for number in classes[position]:
                if number in read:
                    read[number].append(position)
                else:
                    read[number] = [position]
        row: dict[int, int] = {}
        for number, at in read.items():
            key = tuple(at)
            target = nexts.get(key)
            if target is None:
                budget.tick()
                after = frozenset().union(*[one for position in at for one in follow[position]])
                target = states.get(after)
                if target is None:
                    target = states[after] = len(pending)
                    pending.append(after)
                    entries += len(after)
                    budget.states(len(pending))
                entries += len(key)
                budget.entries(entries)
                nexts[key] = target
            row[number] = target
        rows.append(row)
        accepts.append(accepted)
    return Automaton(segments, rows, accepts)
