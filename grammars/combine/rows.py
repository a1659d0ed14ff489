"""The transitions of several automata, by labels that they share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from ..regex.bounds import Budget, Exhausted
from ..regex.dfa import Dfa
from ..regex.subsets import Segments

MOST_TRANSITIONS = 1_000_000
"""Transitions, by label, of the parts together, and of their combination: some 150 MB."""

Row = dict[int, int]
"""Of a state: the next one for each label, without the labels that end it."""


def joint_labels(classes: Sequence[bytes]) -> bytes:
    """A label for each byte: the same where all of some classes of bytes hold two together.

    Labels are numbered by their lowest bytes.
    """
    labels: dict[tuple[int, ...], int] = {}
    return bytes(labels.setdefault(kinds, len(labels)) for kinds in zip(*classes, strict=True))


def segments_of(labels: bytes) -> Segments:
    """The ranges of bytes that have one label, in order."""
    segments: Segments = []
    begun = 0
    for byte in range(1, 257):
        if byte == 256 or labels[byte] != labels[begun]:
            segments.append((begun, byte - 1, labels[begun]))
            begun = byte
    return segments


def rows_of(part: Dfa, labels: bytes, budget: Budget) -> list[Row]:
    """The row of each state of a part. Raises Exhausted where they have too many transitions."""
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
        if count > MOST_TRANSITIONS:
            raise too_many_transitions()
    return rows


def too_many_transitions() -> Exhausted:
    """The bound on transitions was met."""
    return Exhausted(f"has more than {MOST_TRANSITIONS:,} transitions")
