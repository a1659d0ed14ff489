"""Places of a text in several parts at once.

A place is a state of one copy of one part, a number: the copy times ``stride``, and the state. A
state of the combination is the set of places in which a text may be. A place in which its part
accepts brings with it the starts of the copies that may follow, and ``END`` where none has to.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..regex.bounds import Budget
from ..regex.dfa import Dfa
from .rows import Row, joint_labels, rows_of

END = -1
"""The place at which the whole text may end."""

State = frozenset[int]


def stride_of(parts: Sequence[Dfa]) -> int:
    """From one copy's places to the next one's."""
    return max(part.num_states for part in parts)


class Places:
    """The places of some copies of parts.

    ``copies`` are the parts in order, one as often as it is repeated; ``first`` are the places
    before the text, ``after[c]`` those that the end of copy c brings. ``counted_to`` is of a
    repetition: it says which copies are worth no more than others, see ``_needed``.
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
        """The next set of places for each label that goes on. Raises Exhausted on many places."""
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
        """Whether the text may end."""
        return END in state

    def _closed(self, places: tuple[int, ...]) -> State:
        """These places, and what the ends of copies among them bring."""
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
        """Without places that allow no more than the same state in another copy of a repetition.

        A text in copy c of a repetition to a last copy may end with this copy where c is at least
        ``counted_to``; with an earlier one of these it can go on with more copies.
        """
        ordered = sorted(places, reverse=True)
        bound = counted_to * self.stride
        best = {place % self.stride: place for place in ordered if place >= bound}
        return {place for place in ordered if place < bound} | set(best.values())
