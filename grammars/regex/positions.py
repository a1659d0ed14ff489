"""Computes Glushkov's automaton: the positions of a pattern, and the positions that may follow each
position.

A position is one place of the pattern that matches a character. Before positions are numbered, a
repetition with counts is expanded to its copies. A state of the automaton is the set of positions
that may match the next character. Source: V. M. Glushkov, The abstract theory of automata, 1961.

Position ~i stands for the end of pattern i, and does not match a character. A state that contains
this position accepts pattern i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .bounds import Budget
from .charsets import CharSet
from .tree import Alternation, Chars, Concatenation, Repeat, Tree

Open = tuple[bool, list[frozenset[int]], list[int]]
"""Three values about a part of a pattern. First: whether the part matches the empty text. Second: a
list of sets; their union has the positions that may match the first character. Third: the positions
that may match the last character."""


@dataclass(slots=True)
class Positions:
    """The positions of a pattern. ``charset[p]``: the index in ``charsets`` of the characters that
    position p matches. The union of the sets ``follow[p]`` has the positions that may follow p.
    ``first`` has the positions of the first character."""

    charsets: list[CharSet] = field(default_factory=list)
    charset: list[int] = field(default_factory=list)
    follow: list[list[frozenset[int]]] = field(default_factory=list)
    first: frozenset[int] = frozenset()


def positions_of(trees: Sequence[Tree], budget: Budget) -> Positions:
    """The positions of several alternative trees. Raises Exhausted if there are too many
    positions."""
    return _Builder(budget).choice(trees)


def spelled_out(tree: Tree) -> int:
    """Number of positions of a tree whose repetitions are expanded."""
    match tree:
        case Chars():
            return 1
        case Repeat():
            return spelled_out(tree.item) * _copies(tree)
    return sum(map(spelled_out, tree.items))


def _copies(tree: Repeat) -> int:
    return max(tree.least, 1) if tree.most is None else tree.most


class _Builder:
    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.made = Positions()
        self.numbers: dict[CharSet, int] = {}
        self.links = 0

    def choice(self, trees: Sequence[Tree]) -> Positions:
        self.budget.positions(sum(map(spelled_out, trees)))
        start: list[frozenset[int]] = []
        for number, tree in enumerate(trees):
            empty, first, last = self.part(tree)
            end = frozenset((~number,))
            self.link(last, [end])
            start += first
            if empty:
                start.append(end)
        self.made.first = frozenset().union(*start)
        return self.made

    def link(self, last: list[int], first: list[frozenset[int]]) -> None:
        self.links += len(last) * len(first)
        self.budget.entries(self.links)
        follow = self.made.follow
        for position in last:
            self.budget.tick()
            follow[position] += first

    def part(self, tree: Tree) -> Open:
        self.budget.tick()
        match tree:
            case Chars():
                return self.chars(tree)
            case Concatenation():
                return self.sequence(tree)
            case Alternation():
                parts = [self.part(item) for item in tree.items]
                return (
                    any(empty for empty, _, _ in parts),
                    _joined([one for _, first, _ in parts for one in first]),
                    [one for _, _, last in parts for one in last],
                )
            case Repeat():
                return self.repeat(tree)

    def chars(self, tree: Chars) -> Open:
        if not tree.chars:
            return False, [], []
        position = len(self.made.charset)
        number = self.numbers.setdefault(tree.chars, len(self.numbers))
        if number == len(self.made.charsets):
            self.made.charsets.append(tree.chars)
        self.made.charset.append(number)
        self.made.follow.append([])
        return False, [frozenset((position,))], [position]

    def sequence(self, tree: Concatenation) -> Open:
        empty = True
        first: list[frozenset[int]] = []
        last: list[int] = []
        for item in tree.items:
            one_empty, one_first, one_last = self.part(item)
            self.link(last, one_first)
            if empty:
                first += one_first
            if one_empty:
                last += one_last
            else:
                empty = False
                last = one_last
        return empty, _joined(first), last

    def repeat(self, tree: Repeat) -> Open:
        copies = _copies(tree)
        if copies == 0:
            return True, [], []
        empty, first, last = self.part(tree.item)
        # If the item matches the empty text, so does any number of copies, and the minimum is 0.
        least = 0 if empty else tree.least
        ends = list(last) if least <= 1 else []
        for copy in range(2, copies + 1):
            _, next_first, next_last = self.part(tree.item)
            self.link(last, next_first)
            last = next_last
            if copy >= least:
                ends += last
            if copy == copies and tree.most is None:
                self.link(last, next_first)
        if copies == 1 and tree.most is None:
            self.link(last, first)
        return least == 0, first, ends


def _joined(sets: list[frozenset[int]]) -> list[frozenset[int]]:
    return sets if len(sets) < 2 else [frozenset().union(*sets)]
