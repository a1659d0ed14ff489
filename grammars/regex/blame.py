"""Finds the part of a pattern that makes the pattern too large.

The search begins with the whole pattern. It compiles the longest items of the pattern, each alone
and for a short time. If an item is too large by itself, the search continues within this item. If
the items of a concatenation are too large only together, the result is the shortest sequence of
neighbouring items that is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .bounds import Budget, Exhausted, shown
from .minimize import minimise
from .positions import positions_of, spelled_out
from .subsets import determinise
from .tree import Alternation, Chars, Concatenation, Repeat, Tree
from .utf8 import to_bytes

_TRIAL_SHARE = 0.15
"""The compilation of one part may take this share of the search's time."""
_TRIED = 20
"""For each part, at most this number of items is tried, the longest first."""
_MANY_RANGES = 50
"""If a set of characters has more ranges than this number, error messages call it a Unicode
category. A class that is written in a pattern rarely has as many ranges."""


@dataclass(frozen=True, slots=True)
class Grown:
    """A part of a pattern that is too large when it is compiled alone. ``what`` describes the
    exceeded limit."""

    part: Tree
    what: str

    def description(self, pattern: str) -> str:
        """The part's text and place, and the limit that it exceeds."""
        part = self.part
        text = shown(pattern[part.start : part.end])
        description = f"the part {text} at {part.start} to {part.end} alone {self.what}"
        if _widest(part) > _MANY_RANGES:
            description += "; it contains Unicode categories, which (?a) restricts to ASCII"
        return description


def grown(
    tree: Tree, max_states: int, seconds: float, known: Exhausted | None = None
) -> Grown | None:
    """Finds a small part of a tree that is too large: if it is compiled alone, it needs more than
    ``max_states`` states or too much time.

    ``known``: the limit that the whole tree is known to exceed. If the whole tree, compiled without
    other patterns, is small enough, returns None.
    """
    limit = Budget(max_states, seconds)

    def trial(part: Tree) -> str | None:
        limit.check()
        budget = Budget(max_states, seconds * _TRIAL_SHARE)
        try:
            to_bytes(minimise(determinise(positions_of([part], budget), budget), budget), budget)
        except Exhausted as over:
            return over.what
        return None

    found: Grown | None = None
    try:
        what = known.what if known else trial(tree)
        while what is not None:
            found = Grown(tree, what)
            inner = _first(tree, trial)
            if inner is None:
                return _shortest(tree, trial) or found if isinstance(tree, Concatenation) else found
            tree, what = inner.part, inner.what
    except (Exhausted, RecursionError):
        pass
    return found


Trial = Callable[[Tree], str | None]


def _widest(tree: Tree) -> int:
    if isinstance(tree, Chars):
        return len(tree.chars)
    return max(map(_widest, _items(tree)), default=0)


def _first(tree: Tree, trial: Trial) -> Grown | None:
    """The longest item of a tree that is too large by itself; None if none of the ``_TRIED``
    longest items is too large."""
    items = () if isinstance(tree, Chars) else _items(tree)
    for part in sorted(items, key=spelled_out, reverse=True)[:_TRIED]:
        if isinstance(part, Chars):
            break
        what = trial(part)
        if what is not None:
            return Grown(part, what)
    return None


def _items(tree: Concatenation | Alternation | Repeat) -> tuple[Tree, ...]:
    return (tree.item,) if isinstance(tree, Repeat) else tree.items


def _shortest(tree: Concatenation, trial: Trial) -> Grown | None:
    """The shortest sequence of neighbouring items that is still too large. One bisection finds the
    last item of the sequence. A second bisection finds the first item."""
    items = tree.items

    def run(first: int, end: int) -> Concatenation:
        return Concatenation(items[first].start, items[end - 1].end, items[first:end])

    low, high = 1, len(items)
    while low < high:
        middle = (low + high) // 2
        if trial(run(0, middle)) is None:
            low = middle + 1
        else:
            high = middle
    end = high
    low, high = 0, end - 1
    found = None
    while low < high:
        middle = (low + high + 1) // 2
        what = trial(run(middle, end))
        if what is None:
            high = middle - 1
        else:
            low = middle
            found = Grown(run(middle, end), what)
    if found is None and end < len(items):
        what = trial(run(0, end))
        return Grown(run(0, end), what) if what else None
    return found
