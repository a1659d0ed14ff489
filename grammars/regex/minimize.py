"""Minimises an automaton. After each text, the minimal automaton accepts the same patterns as the
given automaton.

Source: A. Valmari, Fast brief practical DFA minimization, Information Processing Letters 112, 2012:
Hopcroft's refinement for automata in which most transitions are missing. It takes O(m log n) for m
transitions and n states. In turn, blocks of transitions split blocks of states, and blocks of
states split blocks of transitions.
"""

from __future__ import annotations

from collections.abc import Sequence

from .bounds import Budget
from .subsets import Automaton


class _Partition:
    """A partition of 0..n-1 into blocks. Each block is a contiguous part of ``elements``, with its
    marked elements first."""

    def __init__(self, blocks: list[list[int]], size: int) -> None:
        self.elements = [element for block in blocks for element in block]
        self.place = [0] * size
        self.block = [0] * size
        self.first: list[int] = []
        self.end: list[int] = []
        self.marked: list[int] = []
        self.touched: list[int] = []
        for number, block in enumerate(blocks):
            self.first.append(self.end[-1] if self.end else 0)
            self.end.append(self.first[-1] + len(block))
            self.marked.append(0)
            for element in block:
                self.block[element] = number
        for at, element in enumerate(self.elements):
            self.place[element] = at

    def mark(self, element: int) -> None:
        block = self.block[element]
        at = self.place[element]
        to = self.first[block] + self.marked[block]
        if at < to:
            return
        other = self.elements[to]
        self.elements[at] = other
        self.place[other] = at
        self.elements[to] = element
        self.place[element] = to
        if not self.marked[block]:
            self.touched.append(block)
        self.marked[block] += 1

    def split(self) -> None:
        """Splits each block that has marked and unmarked elements into these two parts. The smaller
        part becomes a new block."""
        for block in self.touched:
            first, end = self.first[block], self.end[block]
            middle = first + self.marked[block]
            self.marked[block] = 0
            if middle == end:
                continue
            new = len(self.first)
            if middle - first <= end - middle:
                self.first.append(first)
                self.end.append(middle)
                self.first[block] = middle
            else:
                self.first.append(middle)
                self.end.append(end)
                self.end[block] = middle
            self.marked.append(0)
            for at in range(self.first[new], self.end[new]):
                self.block[self.elements[at]] = new
        self.touched.clear()


def minimise(automaton: Automaton, budget: Budget) -> Automaton:
    """The minimal automaton that accepts the same patterns after each text.

    States that cannot lead to a match are removed, together with the transitions to them. The start
    is state 0. Raises Exhausted when the time is used up.
    """
    live = _live(automaton.rows, automaton.accepts)
    tails: list[int] = []
    heads: list[int] = []
    labels: dict[int, list[int]] = {}
    entering: list[list[int]] = [[] for _ in automaton.rows]
    for state, row in enumerate(automaton.rows):
        if not live[state]:
            continue
        budget.tick()
        for label, target in row.items():
            if live[target]:
                number = len(tails)
                labels.setdefault(label, []).append(number)
                entering[target].append(number)
                tails.append(state)
                heads.append(target)
    alike: dict[int, list[int]] = {}
    for state, accepted in enumerate(automaton.accepts):
        if live[state]:
            alike.setdefault(accepted, []).append(state)

    blocks = _Partition(list(alike.values()), len(automaton.rows))
    cords = _Partition(list(labels.values()), len(tails))
    block, cord = 1, 0
    while cord < len(cords.first):
        budget.tick()
        for at in range(cords.first[cord], cords.end[cord]):
            blocks.mark(tails[cords.elements[at]])
        blocks.split()
        cord += 1
        while block < len(blocks.first):
            budget.tick()
            for at in range(blocks.first[block], blocks.end[block]):
                for number in entering[blocks.elements[at]]:
                    cords.mark(number)
            cords.split()
            block += 1
    return _merged(automaton, blocks.block, live)


def trimmed(automaton: Automaton) -> Automaton:
    """The automaton without the states that cannot lead to a match; it is not minimised.

    States are numbered as in ``minimise``. The start, state 0, must be able to lead to a match.
    """
    live = _live(automaton.rows, automaton.accepts)
    return _merged(automaton, range(len(automaton.rows)), live)


def _live(rows: Sequence[dict[int, int]], accepts: Sequence[int]) -> list[bool]:
    """For each state, whether an accepting state can be reached from it."""
    sources: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in set(row.values()):
            sources[target].append(state)
    live = [bool(accepted) for accepted in accepts]
    pending = [state for state, alive in enumerate(live) if alive]
    while pending:
        for source in sources[pending.pop()]:
            if not live[source]:
                live[source] = True
                pending.append(source)
    return live


def _merged(automaton: Automaton, block_of: Sequence[int], live: list[bool]) -> Automaton:
    """The automaton that has one state for each block. A breadth-first search numbers the
    states."""
    numbers = {block_of[0]: 0}
    pending = [0]
    rows = []
    accepts = []
    for state in pending:
        row: dict[int, int] = {}
        for label, target in automaton.rows[state].items():
            if live[target]:
                block = block_of[target]
                if block not in numbers:
                    numbers[block] = len(pending)
                    pending.append(target)
                row[label] = numbers[block]
        rows.append(row)
        accepts.append(automaton.accepts[state])
    return Automaton(automaton.segments, rows, accepts)
