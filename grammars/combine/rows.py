"""Rewrites the transitions of several automata with labels of bytes that all these automata
share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from ..regex.bounds import Budget, Exhausted
from ..regex.dfa import Dfa
from ..regex.subsets import Segments

MAX_TRANSITIONS = 1_000_000
"""Maximum number of transitions of a part, and of a combination. All bytes with the same label
count as one transition. A million transitions take 150 MB."""

Row = dict[int, int]
"""The transitions of a state: a map from label to next state. Labels without a next state are
missing."""


def joint_labels(classes: Sequence[bytes]) -> bytes:
    """A label for each byte. Two bytes have the same label if, in each part, they have the same
    class.

    Labels are numbered in the order of their lowest bytes.
    """
    labels: dict[tuple[int, ...], int] = {}
    return bytes(labels.setdefault(kinds, len(labels)) for kinds in zip(*classes, strict=True))


def segments_of(labels: bytes) -> Segments:
    """The ranges of neighbouring bytes with the same label, in order."""
    segments: Segments = []
    begun = 0
    for byte in range(1, 257):
        if byte == 256 or labels[byte] != labels[begun]:
            segments.append((begun, byte - 1, labels[begun]))
            begun = byte
    return segments


def rows_of(part: Dfa, labels: bytes, budget: Budget) -> list[Row]:
    """The row of each state of a part, with the joint labels. Raises Exhausted if the part has too
    many transitions."""
    width = part.num_classes
    labels_of: list[list[int]] = [[] for _ in range(width)]
    for number, label in sorted(set(zip(part.classes, labels, strict=True))):
        labels_of[number].append(label)
    rows: list[Row] = [{} for _ in range(part.num_states)]
    transitions = part.transitions
    count = 0
    for at in compress(range(len(transitions)), transitions):
        budget.tick()
        state, number = divmod(at, width)
        row = rows[state]
        target = transitions[at]
        count += len(labels_of[number])
        for label in labels_of[number]:
            row[label] = target
        if count > MAX_TRANSITIONS:
            raise too_many_transitions()
    return rows


def too_many_transitions() -> Exhausted:
    """The error for more than ``MAX_TRANSITIONS`` transitions."""
    return Exhausted(f"has more than {MAX_TRANSITIONS:,} transitions")
