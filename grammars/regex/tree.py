"""The syntax tree of a pattern. It has only characters, concatenations, alternations and
repetitions.

Groups, their names, greediness, and anchors at the ends do not change which texts match, so they
are dropped. Any other construct, for example a back-reference, is an error. Without the error, the
automaton and the pattern would match different texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from re import _constants as op  # type: ignore[attr-defined]
from typing import Any

from . import charsets
from .bounds import Budget, RegexError, shown
from .charsets import CharSet
from .syntax import parse, place, too_deep

# The flags are converted to integers, because operations on the enumeration members of ``re`` are
# slow.
_ASCII = int(re.ASCII)
_DOTALL = int(re.DOTALL)
_IGNORECASE = int(re.IGNORECASE)
_VERBOSE = int(re.VERBOSE)
_TYPES = int(re.ASCII | re.LOCALE | re.UNICODE)
_STARTS = (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
_ENDS = (op.AT_END, op.AT_END_STRING)
_CATEGORIES = {
    op.CATEGORY_DIGIT: "d",
    op.CATEGORY_NOT_DIGIT: "D",
    op.CATEGORY_SPACE: "s",
    op.CATEGORY_NOT_SPACE: "S",
    op.CATEGORY_WORD: "w",
    op.CATEGORY_NOT_WORD: "W",
}


@dataclass(frozen=True, slots=True)
class Chars:
    """Matches one character, which is in the set ``chars``."""

    start: int
    end: int
    chars: CharSet


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Matches the items, one after another. Without items, matches the empty text."""

    start: int
    end: int
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Matches any one of the items."""

    start: int
    end: int
    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Matches an item ``least`` to ``most`` times; ``least`` times or more if ``most`` is None."""

    start: int
    end: int
    item: Tree
    least: int
    most: int | None


Tree = Chars | Concatenation | Alternation | Repeat
"""A node of the syntax tree. Its ``start`` and ``end`` are its span in the text of the pattern."""


def tree_of(pattern: str, budget: Budget) -> Tree:
    """The tree of a pattern.

    Raises RegexError if the pattern is not valid, uses an unsupported construct, or does not match
    any text. Raises Exhausted when the time is used up.
    """
    parsed, flags = parse(pattern, budget)
    try:
        tree = _Reader(pattern, budget).sequence(parsed, flags, 0, (True, True))
        nothing = void(tree)
    except RecursionError:
        raise too_deep(pattern) from None
    if nothing is not None:
        raise RegexError(
            f"the language is empty: no text matches {shown(pattern[nothing.start : nothing.end])}",
            pattern,
            nothing.start,
        )
    return tree


def literal_tree(text: str) -> Tree:
    """The tree of a literal text. Raises RegexError for a lone surrogate."""
    for at, char in enumerate(text):
        if "\ud800" <= char <= "\udfff":
            raise RegexError(
                f"U+{ord(char):04X} is a surrogate, which UTF-8 cannot encode", text, at
            )
    items = tuple(Chars(at, at + 1, ((ord(char), ord(char)),)) for at, char in enumerate(text))
    return Concatenation(0, len(text), items)


def void(tree: Tree) -> Tree | None:
    """If a tree does not match any text: the part that is the cause. If it matches a text: None."""
    match tree:
        case Chars():
            return None if tree.chars else tree
        case Concatenation():
            return next((part for item in tree.items if (part := void(item))), None)
        case Alternation():
            parts = [void(item) for item in tree.items]
            return None if None in parts else tree
        case Repeat():
            return void(tree.item) if tree.least else None


class _Reader:
    """Converts the parser's nodes. ``ends`` has two values: whether a node is at the start of the
    pattern, and whether it is at the end of the pattern."""

    def __init__(self, pattern: str, budget: Budget) -> None:
        self.pattern = pattern
        self.budget = budget
        self.literals: dict[tuple[int, int], CharSet] = {}

    def sequence(self, nodes: Any, flags: int, start: int, ends: tuple[bool, bool]) -> Tree:
        anchors = [operator is op.AT for operator, _ in nodes]
        first = anchors.index(False) if False in anchors else len(anchors)
        last = len(anchors) - 1 - anchors[::-1].index(False) if False in anchors else -1
        items = []
        for at, node in enumerate(nodes):
            inside = (ends[0] and at <= first, ends[1] and at >= last)
            item = self.node(node, flags, start, inside)
            if item is not None:
                items.append(item)
                start = item.end
        if len(items) == 1:
            return items[0]
        if not items:
            return Concatenation(start, start, ())
        return Concatenation(items[0].start, items[-1].end, tuple(items))

    def node(self, node: Any, flags: int, before: int, ends: tuple[bool, bool]) -> Tree | None:
        self.budget.tick()
        operator, argument = node
        start, end = place(self.pattern, node.span, bool(flags & _VERBOSE))
        if start >= end:
            start = min(before, end)
        match operator:
            case op.LITERAL:
                chars = self.literals.get((argument, flags))
                if chars is None:
                    chars = self.literals[argument, flags] = self.chars(operator, argument, flags)
                return Chars(start, end, chars)
            case op.NOT_LITERAL | op.IN | op.ANY:
                return Chars(start, end, self.chars(operator, argument, flags))
            case op.SUBPATTERN:
                _, added, dropped, inner = argument
                if added & _TYPES:
                    flags &= ~_TYPES
                return self.within(
                    self.sequence(inner, (flags | added) & ~dropped, start + 1, ends), start, end
                )
            case op.BRANCH:
                branches = [self.sequence(one, flags, start, ends) for one in argument[1]]
                return Alternation(start, end, tuple(branches))
            case op.MAX_REPEAT | op.MIN_REPEAT:
                least, most, inner = argument
                if most > 1:
                    ends = (False, False)
                item = self.sequence(inner, flags, start, ends)
                return Repeat(start, end, item, least, None if most is op.MAXREPEAT else most)
            case op.AT if argument in _STARTS and ends[0]:
                return None
            case op.AT if argument in _ENDS and ends[1]:
                return None
        raise RegexError(_refused(operator, argument, self.pattern[start:end]), self.pattern, start)

    def within(self, tree: Tree, start: int, end: int) -> Tree:
        """The tree of a group's content, with the span of the group."""
        match tree:
            case Chars():
                return Chars(start, end, tree.chars)
            case Concatenation():
                return Concatenation(start, end, tree.items)
            case Alternation():
                return Alternation(start, end, tree.items)
            case Repeat():
                return Concatenation(start, end, (tree,))

    def chars(self, operator: Any, argument: Any, flags: int) -> CharSet:
        """The characters that a node matches in ``re`` under the flags, as a set."""
        ascii_only = bool(flags & _ASCII)
        if operator is op.ANY:
            return charsets.ANY if flags & _DOTALL else charsets.NOT_NEWLINE
        negated = operator is op.NOT_LITERAL
        members: Sequence[tuple[Any, Any]] = argument
        if operator is not op.IN:
            members = [(op.LITERAL, argument)]
        ranges: list[tuple[int, int]] = []
        categories: list[tuple[int, int]] = []
        for kind, value in members:
            if kind is op.LITERAL:
                ranges.append((value, value))
            elif kind is op.RANGE:
                ranges.append(value)
            elif kind is op.CATEGORY:
                categories.extend(charsets.category(_CATEGORIES[value], ascii_only))
            else:
                negated = True
        chars = charsets.union(ranges)
        if flags & _IGNORECASE:
            chars = charsets.any_case(chars, ascii_only)
        if categories:
            chars = charsets.union([*chars, *categories])
        return charsets.complement(chars) if negated else chars


def _refused(operator: Any, argument: Any, text: str) -> str:
    """The message that a construct is not supported, with the reason or an alternative."""
    match operator:
        case op.AT if argument in _STARTS:
            return f"the anchor {text} is supported at the start of the pattern only"
        case op.AT if argument in _ENDS:
            return f"the anchor {text} is supported at the end of the pattern only"
        case op.AT:
            return f"the word boundary {text} is not supported: spell out what may stand there"
        case op.GROUPREF:
            return f"the back-reference {text} is not supported: its language is not regular"
        case op.GROUPREF_EXISTS:
            return f"the conditional group {shown(text)} is not supported: write out both cases"
        case op.ASSERT | op.ASSERT_NOT | op.FAILURE:
            behind = operator is not op.FAILURE and argument[0] < 0
            side = "look-behind" if behind else "look-ahead"
            return f"the {side} {shown(text)} is not supported: spell out what may stand there"
        case op.ATOMIC_GROUP:
            return f"the atomic group {shown(text)} is not supported: use (?:...)"
        case op.POSSESSIVE_REPEAT:
            return f"the possessive repetition {shown(text)} is not supported: drop its last +"
    return f"{shown(text)} is not supported"
