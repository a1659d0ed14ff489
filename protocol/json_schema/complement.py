"""Computes the complement of a pattern. The complement matches the strings in which the pattern
does not match at any place. ``matching`` rewrites a pattern that has anchors inside.

The pattern is converted to an automaton (subset construction). This automaton or its complement is
converted back to a pattern (state elimination). Validators of schemas do not agree about all
strings. For some of them, ``\\w``, ``\\d`` and ``\\s`` also match characters outside ASCII, and
``$`` also matches before a line end at the end of a string. The result matches only strings about
which all validators agree.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser, error  # type: ignore[attr-defined]
from typing import Any

from .parts import Unsupported, written

MAX_PATTERN = 300
"""Maximum number of characters of a pattern."""
MAX_NODES = 400
"""Maximum number of nodes of the automaton before the subset construction."""
MAX_STATES = 60
"""Maximum number of states after the subset construction."""
MAX_RESULT = 4_000
"""Maximum number of characters of the resulting pattern."""
STEPS = 300
"""The cost of computing a complement, without the subset construction. A cost of 1 is the time to
visit one schema."""
NODES_OF_STEP = 60
"""Number of nodes that can be visited in the time of visiting one schema."""

_OTHER = 128
"""The number that stands for all characters outside ASCII."""
_ALL = frozenset(range(129))
_NEWLINE = 10
_CATEGORIES = {
    op.CATEGORY_DIGIT: frozenset(range(48, 58)),
    op.CATEGORY_WORD: frozenset(c for c in range(128) if chr(c).isalnum() or chr(c) == "_"),
    op.CATEGORY_SPACE: frozenset((9, 10, 11, 12, 13, 28, 29, 30, 31, 32)),
}
_NEGATED = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
}
_MAYBE_INNER = re.compile(r"[^\\[]\^|\$.")
"""Matches in every pattern that has an anchor inside. Also matches in some other patterns."""
_MAYBE_SPACES = frozenset((28, 29, 30, 31))
"""Characters that are white space only in Python."""

Chars = frozenset[int]


def without(pattern: str, step: Callable[[int], None]) -> str:
    """A pattern of strings in which ``pattern`` does not match at any place. ``step`` counts the
    work. Raises Unsupported if the pattern is not valid or exceeds the bounds. The pattern may only
    have characters, classes, groups, alternatives, repetitions and anchors."""
    step(STEPS)
    return f"^{_Eliminated(_states(_automaton(pattern), step)).pattern()}$"


def matching(pattern: str, step: Callable[[int], None]) -> str:
    """A pattern of strings in which ``pattern`` matches for all validators. The result has no
    anchors inside. ``step`` and the errors are as for ``without``."""
    step(STEPS)
    automaton = _automaton(pattern, certain=True)
    return f"^{_Eliminated(_states(automaton, step, negated=False)).pattern()}$"


def may_have_inner_anchor(pattern: str) -> bool:
    """Whether ``has_inner_anchor`` may be true. This function takes less time than
    ``has_inner_anchor``."""
    return _MAYBE_INNER.search(pattern) is not None


def has_inner_anchor(pattern: str) -> bool:
    """Whether a pattern has ``^`` after its beginning, or ``$`` before its end. llguidance does not
    implement such anchors. False if the pattern is not valid or exceeds the bounds."""
    try:
        return may_have_inner_anchor(pattern) and _has_inner_anchor(_parsed(pattern), True, True)
    except Unsupported:
        return False


def _has_inner_anchor(nodes: Any, first: bool, last: bool) -> bool:
    """``first``: whether the nodes are at the beginning of the pattern. ``last``: whether they are
    at its end."""
    others = [at for at, (operator, _) in enumerate(nodes) if operator is not op.AT]
    for at, (operator, value) in enumerate(nodes):
        begins = first and (not others or at <= others[0])
        ends = last and (not others or at >= others[-1])
        inner: list[Any] = []
        if operator is op.AT and value in _ANCHORS:
            if not (begins if _ANCHORS[value] == "^" else ends):
                return True
        elif operator is op.SUBPATTERN:
            inner = [value[3]]
        elif operator is op.BRANCH:
            inner = value[1]
        elif operator in (op.MAX_REPEAT, op.MIN_REPEAT):
            inner, begins, ends = [value[2]], False, False
        if any(_has_inner_anchor(one, begins, ends) for one in inner):
            return True
    return False


def matches(pattern: str, text: str, step: Callable[[int], None]) -> bool:
    """Whether a pattern matches at some place of a text. ``step`` counts the work, which is
    proportional to the length of the text. Raises Unsupported if the text has a line feed or a
    character outside ASCII, or if ``without`` does not support the pattern."""
    if not text.isascii() or "\n" in text:
        raise Unsupported
    automaton = _automaton(pattern)
    step(1 + len(automaton.steps) * len(text) // NODES_OF_STEP)
    nodes = automaton.closure(frozenset((0,)), "^" if text else "^$")
    searching = automaton.closure(frozenset((0,)), "")
    for char in map(ord, text):
        if automaton.end in nodes:
            return True
        nodes = automaton.closure(_step(automaton, nodes, char), "") | searching
    return automaton.end in automaton.closure(nodes, "$" if text else "^$")


def _automaton(pattern: str, certain: bool = False) -> _Automaton:
    """The automaton of a pattern. If ``certain`` is true, a character matches only if it matches
    for all validators."""
    automaton = _Automaton(certain)
    automaton.end = automaton.sequence(automaton.node(), _parsed(pattern))
    return automaton


def _parsed(pattern: str) -> Any:
    """The parser nodes of a pattern."""
    if len(pattern) > MAX_PATTERN:
        raise Unsupported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(pattern)
    except (error, OverflowError, RecursionError):
        raise Unsupported from None
    if tree.state.flags & ~int(re.UNICODE):
        raise Unsupported
    return tree


class _Automaton:
    """A nondeterministic automaton (Thompson's construction)."""

    def __init__(self, certain: bool) -> None:
        self._certain = certain
        self.steps: list[list[tuple[Chars, int]]] = []
        """By node: the characters that lead to another node."""
        self.free: list[list[tuple[str, int]]] = []
        """By node: the nodes that are reached without a character, each with a condition. The
        condition is "" (always), "^" (only at the beginning of the string) or "$" (only at the end
        of the string)."""
        self.end = 0

    def node(self) -> int:
        if len(self.steps) >= MAX_NODES:
            raise Unsupported
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def sequence(self, at: int, nodes: Any) -> int:
        """Adds the automaton of a list of parser nodes after the node ``at``; returns its last
        node."""
        for operator, value in nodes:
            at = self._one(at, operator, value)
        return at

    def _one(self, at: int, operator: Any, value: Any) -> int:
        chars = _chars(operator, value, self._certain)
        if chars is not None:
            after = self.node()
            self.steps[at].append((chars, after))
            return after
        if operator is op.AT:
            if value not in _ANCHORS:
                raise Unsupported
            after = self.node()
            self.free[at].append((_ANCHORS[value], after))
            return after
        if operator is op.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise Unsupported
            return self.sequence(at, inner)
        if operator is op.BRANCH:
            after = self.node()
            for inner in value[1]:
                first = self.node()
                self.free[at].append(("", first))
                self.free[self.sequence(first, inner)].append(("", after))
            return after
        if operator in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(at, *value)
        raise Unsupported

    def _repeat(self, at: int, least: int, most: int, inner: Any) -> int:
        for _ in range(least):
            at = self.sequence(at, inner)
        if most == op.MAXREPEAT:
            first, after = self.node(), self.node()
            self.free[at].append(("", first))
            self.free[first].append(("", after))
            self.free[self.sequence(first, inner)].append(("", first))
            return after
        after = self.node()
        for _ in range(most - least):
            self.free[at].append(("", after))
            at = self.sequence(at, inner)
        self.free[at].append(("", after))
        return after

    def closure(self, nodes: Chars, conditions: str) -> Chars:
        """``nodes``, and the nodes that are reached from them without a character. ``conditions``:
        the conditions that hold at this place of the string."""
        found, left = set(nodes), list(nodes)
        while left:
            for condition, after in self.free[left.pop()]:
                if condition in conditions and after not in found:
                    found.add(after)
                    left.append(after)
        return frozenset(found)


_ANCHORS = {
    op.AT_BEGINNING: "^",
    op.AT_BEGINNING_STRING: "^",
    op.AT_END: "$",
    op.AT_END_STRING: "$",
}


def _chars(operator: Any, value: Any, certain: bool) -> Chars | None:
    """The characters that a parser node may match; None if the node does not match exactly one
    character. If ``certain`` is true, only the characters that the node matches for all
    validators."""
    if operator is op.LITERAL:
        return _literal(value)
    if operator is op.NOT_LITERAL:
        return _ALL - _literal(value)
    if operator is op.ANY:
        return _ALL - {_NEWLINE}
    if operator is op.IN:
        negated = bool(value) and value[0][0] is op.NEGATE
        every = negated is not certain
        sets = [_of_class(one[0], one[1], every) for one in value if one[0] is not op.NEGATE]
        chars = frozenset[int]().union(*sets)
        return _ALL - chars if negated else chars
    return None


def _of_class(operator: Any, value: Any, every: bool) -> Chars:
    """The characters that an element of a character class matches. If ``every`` is true, each
    character matches for every validator. If it is false, each character matches for at least one
    validator."""
    if operator is op.LITERAL:
        return _literal(value)
    if operator is op.RANGE:
        low, high = value
        if high > 127:
            raise Unsupported
        return frozenset(range(low, high + 1))
    if operator is not op.CATEGORY:
        raise Unsupported
    inverted = value in _NEGATED
    chars = _CATEGORIES[_NEGATED.get(value, value)]
    certain = chars - _MAYBE_SPACES if value is op.CATEGORY_SPACE or inverted else chars
    if every:
        return _ALL - chars - {_OTHER} if inverted else certain
    return _ALL - certain if inverted else chars | {_OTHER}


def _literal(value: int) -> Chars:
    if value > 127:
        raise Unsupported
    return frozenset((value,))


def _states(
    automaton: _Automaton, step: Callable[[int], None], negated: bool = True
) -> dict[int, dict[int, Chars]]:
    """Maps each state of the subset construction to its next states, with the characters that lead
    to them. State 0 is the start. The next state -1 stands for the end of the string. If
    ``negated`` is false, the string may end after a match. If ``negated`` is true, it may end only
    if there was no match, and a state after a match has no next states."""
    classes = _classes(automaton)
    first = automaton.closure(frozenset((0,)), "^")
    searching = automaton.closure(frozenset((0,)), "")
    numbers: dict[tuple[Chars, bool, bool], int] = {}
    states: dict[int, dict[int, Chars]] = {}
    left = [(first, True, False)]
    numbers[left[0]] = 0
    while left:
        state = left.pop()
        nodes, begins, matched = state
        if automaton.end in nodes:
            number = numbers[state]
            states[number] = {} if negated else {number: _ALL, -1: frozenset()}
            continue
        at_end = automaton.closure(nodes, "^$" if begins else "$")
        is_end = automaton.end in at_end
        following: dict[int, Chars] = {}
        for one in classes:
            char = min(one)
            after = automaton.closure(_step(automaton, nodes, char), "") | searching
            step(1 + (len(nodes) + len(after)) // NODES_OF_STEP)
            key = (after, False, negated and is_end and char == _NEWLINE)
            if key not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise Unsupported
                numbers[key] = len(numbers)
                left.append(key)
            number = numbers[key]
            following[number] = following.get(number, frozenset()) | one
        if not (is_end or matched) if negated else is_end:
            following[-1] = frozenset()
        states[numbers[state]] = following
    return states


def _step(automaton: _Automaton, nodes: Chars, char: int) -> Chars:
    return frozenset(
        after for node in nodes for chars, after in automaton.steps[node] if char in chars
    )


def _classes(automaton: _Automaton) -> list[Chars]:
    """Sets of characters that the automaton does not distinguish."""
    sets = {chars for steps in automaton.steps for chars, _ in steps} | {frozenset((_NEWLINE,))}
    by_sets: dict[tuple[bool, ...], set[int]] = {}
    for char in _ALL:
        by_sets.setdefault(tuple(char in chars for chars in sets), set()).add(char)
    return [frozenset(chars) for chars in by_sets.values()]


class _Eliminated:
    """Converts an automaton to a pattern by eliminating its states one after another."""

    def __init__(self, states: dict[int, dict[int, Chars]]) -> None:
        self._ways: dict[int, dict[int, str]] = {
            state: {
                after: "" if after == -1 else _class(chars) for after, chars in following.items()
            }
            for state, following in states.items()
        }

    def pattern(self) -> str:
        """A pattern that matches exactly the texts that lead from state 0 to the end."""
        self._ways[-2] = {0: ""}
        states = [state for state in self._ways if state >= 0]
        while states:
            state = min(states, key=self._cost)
            states.remove(state)
            self._eliminate(state)
        found = self._ways[-2].get(-1)
        if found is None:
            raise Unsupported
        return f"(?:{found})"

    def _cost(self, state: int) -> int:
        into = sum(state in ways for one, ways in self._ways.items() if one != state)
        return into * len(self._ways[state])

    def _eliminate(self, state: int) -> None:
        ways = self._ways.pop(state)
        loop = ways.pop(state, None)
        again = "" if loop is None else f"(?:{loop})*"
        for others in self._ways.values():
            before = others.pop(state, None)
            if before is None:
                continue
            for after, way in ways.items():
                joined = f"{_group(before)}{again}{_group(way)}"
                others[after] = f"{others[after]}|{joined}" if after in others else joined
                if len(others[after]) > MAX_RESULT:
                    raise Unsupported


def _group(way: str) -> str:
    return f"(?:{way})" if "|" in way else way


def _class(chars: Chars) -> str:
    """A pattern that matches one character of a set."""
    if chars == _ALL:
        return "(?s:.)"
    if _OTHER in chars:
        return f"[^{''.join(_ranges(_ALL - chars))}]"
    return f"[{''.join(_ranges(chars))}]"


def _ranges(chars: Chars) -> Iterator[str]:
    left = sorted(chars)
    while left:
        low = high = left.pop(0)
        while left and left[0] == high + 1:
            high = left.pop(0)
        yield written(chr(low)) + (f"-{written(chr(high))}" if high > low else "")
