"""Computes the states of a sequence, an alternation or a repetition by a subset construction.

Each part has at least one copy, and a repeated part has several. A *place* is a state of the
automaton of one copy. It is encoded as a number: the copy's number times ``stride``, plus the
state. A state of the combination is a set of places: all places to which a text may lead. If a
place of the set accepts, the set also has the start of each copy that may follow. If the whole text
may end there, the set has ``END``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..regex.bounds import Budget
from ..regex.dfa import Dfa
from .rows import Row, joint_labels, rows_of

END = -1
"""A member of a set of places. It means that the whole text may end."""

State = frozenset[int]


def stride_of(parts: Sequence[Dfa]) -> int:
    """The difference between the numbers of two places that have the same state in neighbouring
    copies."""
    return max(part.num_states for part in parts)


class Places:
    """The states of a combination: sets of places in copies of parts.

    ``copies``: the automaton of each copy, in order. ``first``: the places at the beginning of a
    text. ``after[c]``: the places that are added to a set if copy c may end. ``counted_to``: only
    for a bounded repetition; the text may end after copy number ``counted_to`` and after each later
    copy (``_needed``).
    """

    def __init__(
        self,
        copies: Sequence[Dfa],
        first: State,
        after: Sequence[State],
        budget: Budget,
        counted_to: int | None = None,
    ) -> None:
        self.stride = stride_of(copies)
        parts = {id(part): part for part in copies}
        self.labels = joint_labels([part.classes for part in parts.values()])
        self.first = first
        self.copies = copies
        self._after = after
        rows = {key: rows_of(part, self.labels, budget) for key, part in parts.items()}
        self._rows: list[list[Row]] = [rows[id(part)] for part in copies]
        self._budget = budget
        self._counted_to = counted_to
        self._closures: dict[tuple[int, ...], State] = {}
        self._entries = 0

    def row(self, state: State) -> dict[int, State]:
        """For each label that can follow: the next set of places. Raises Exhausted if the sets have
        too many places."""
        stride = self.stride
        reached: dict[int, list[int]] = {}
        for place in state:
            if place == END:
                continue
            copy, inner = divmod(place, stride)
            base = place - inner
            for label, target in self._rows[copy][inner].items():
                if label in reached:
                    reached[label].append(base + target)
                else:
                    reached[label] = [base + target]
        return {label: self._closed(tuple(places)) for label, places in reached.items()}

    def accepts(self, state: State) -> bool:
        """Whether the text may end in this state."""
        return END in state

    def _closed(self, places: tuple[int, ...]) -> State:
        """The set of the given places. If one of them accepts, its copy may end there. The set then
        also has the places that may follow this copy."""
        known = self._closures.get(places)
        if known is not None:
            return known
        closed = set(places)
        for place in places:
            copy, inner = divmod(place, self.stride)
            if self.copies[copy].accepting[inner]:
                closed |= self._after[copy]
        if self._counted_to is not None and len(closed) > 1:
            closed = self._needed(closed, self._counted_to)
        state = self._closures[places] = frozenset(closed)
        self._entries += len(places) + len(state)
        self._budget.entries(self._entries)
        return state

    def _needed(self, places: set[int], counted_to: int) -> set[int]:
        """Removes redundant places. If several copies from ``counted_to`` on are in the same state,
        only the place in the earliest copy is kept.

        The other places are redundant, because the text may end after any of these copies, and
        after the earliest copy the most further repetitions are possible.
        """
        ordered = sorted(places, reverse=True)
        bound = counted_to * self.stride
        best = {place % self.stride: place for place in ordered if place >= bound}
        return {place for place in ordered if place < bound} | set(best.values())
