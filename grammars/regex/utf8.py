"""Converts an automaton over characters to an automaton over the bytes of valid UTF-8.

The UTF-8 encodings of all characters of a pattern form one directed acyclic graph. A node stands
for the first bytes of a character, and has the bytes that may follow them. A leaf is a class of
characters. Equal nodes are merged. The graph is copied for each state s of the automaton over
characters. In this copy, each leaf is replaced by the state to which its class leads from s.
Classes that lead to the same state are merged.

If the automaton over characters is minimal, the automaton over bytes is minimal too. Take two
different states inside a character. Some bytes that complete the character lead from them to two
different states between characters, which are not equivalent. So the two states inside a character
are not equivalent either. A state inside a character is never equivalent to a state between two
characters, because only a state inside a character reads continuation bytes. Overlong forms and
surrogates have no path in the graph, so they never match. Sources: R. Cox, Regular expression
matching in the wild, 2010, and the Rust crate ``utf8-ranges``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .bounds import Budget
from .subsets import Automaton, Segments

Runs = tuple[tuple[int, int, int], ...]
"""Ranges of bytes in order, each with its target. In the graph, a target is a class (0 or more), or
~n, which stands for node n. In the result, a target is a state."""

_FORMS = (
    # first character, last character, number of continuation bytes, constant bits of the first byte
    (0x00, 0x7F, 0, 0x00),
    (0x80, 0x7FF, 1, 0xC0),
    (0x800, 0xFFFF, 2, 0xE0),
    (0x10000, 0x10FFFF, 3, 0xF0),
)


@dataclass(slots=True)
class ByteAutomaton:
    """An automaton over bytes. ``rows[s]`` has the runs of state s. ``accepts[s]`` is a bit set:
    bit i is set if state s accepts the pattern with number i. State 0 is dead, and state 1 is the
    start.

    The states are numbered by a breadth-first search that follows bytes in ascending order. So
    minimal automata of the same language are identical.
    """

    rows: list[Runs]
    accepts: list[int]


def to_bytes(automaton: Automaton, budget: Budget) -> ByteAutomaton:
    """Converts an automaton. Raises Exhausted if the automaton over bytes has too many states."""
    graph = _Graph()
    root = graph.root(automaton.segments)
    states = len(automaton.rows)
    rows: list[Runs] = []
    inner: dict[Runs, int] = {}

    def instance(number: int, targets: list[int], made: dict[int, int]) -> int:
        """The state inside a character for node ``number``. ``targets``: for each leaf, the next
        state that replaces it."""
        state = made.get(number)
        if state is None:
            runs = filled(number, targets, made)
            state = inner.get(runs)
            if state is None:
                state = inner[runs] = states + len(inner)
                budget.states(state)
            made[number] = state
        return state

    def filled(number: int, targets: list[int], made: dict[int, int]) -> Runs:
        return tuple(
            [
                (low, high, targets[to] if to >= 0 else instance(~to, targets, made))
                for low, high, to in graph.nodes[number]
            ]
        )

    for row in automaton.rows:
        budget.check()
        groups: dict[int, int] = {}
        merged = [(label, groups.setdefault(row[label], len(groups))) for label in sorted(row)]
        node = graph.projected(root, tuple(merged))
        rows.append(filled(node, list(groups), {}))
    rows.extend(inner)
    return _numbered(rows, automaton.accepts)


class _Graph:
    """The nodes of the graph of UTF-8 encodings, by number. Equal nodes have the same number."""

    def __init__(self) -> None:
        self.nodes: list[Runs] = []
        self._numbers: dict[Runs, int] = {}
        self._whole: dict[tuple[int, int], int] = {}
        self._projections: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}

    def node(self, runs: list[tuple[int, int, int]]) -> int:
        """The node with these runs. Neighbouring runs with the same target are merged."""
        joined: list[tuple[int, int, int]] = []
        for low, high, to in runs:
            if joined and joined[-1][1] + 1 == low and joined[-1][2] == to:
                joined[-1] = (joined[-1][0], high, to)
            else:
                joined.append((low, high, to))
        key = tuple(joined)
        number = self._numbers.setdefault(key, len(self.nodes))
        if number == len(self.nodes):
            self.nodes.append(key)
        return number

    def root(self, segments: Segments) -> int:
        """The node before the first byte of a character."""
        lows = [low for low, _, _ in segments]
        runs: list[tuple[int, int, int]] = []
        for first, last, levels, byte in _FORMS:
            runs += self.runs(segments, lows, first, last, levels, byte)
        return self.node(runs)

    def runs(
        self, segments: Segments, lows: list[int], first: int, last: int, levels: int, byte: int
    ) -> list[tuple[int, int, int]]:
        """The runs for the characters ``first`` to ``last``.

        The next byte of a character selects a block of ``64**levels`` characters. ``levels``: the
        number of bytes after the next byte. Blocks are numbered, and character 0 is in block 0. The
        byte that selects block n is ``byte`` + n.
        """
        shift = 6 * levels
        runs: list[tuple[int, int, int]] = []
        at = first
        index = max(bisect_right(lows, first) - 1, 0)
        while at <= last and index < len(segments):
            low, high, label = segments[index]
            if high < at:
                index += 1
                continue
            if low > last:
                break
            # Blocks before the segment are skipped.
            at = max(at, low >> shift << shift)
            block = at >> shift
            end = (min(high, last) + 1 >> shift) - 1
            if low <= at == block << shift and end >= block:
                runs.append((byte + block, byte + end, self.whole(levels, label)))
                at = end + 1 << shift
                continue
            below = self.runs(
                segments,
                lows,
                max(at, block << shift),
                min(last, (block + 1 << shift) - 1),
                levels - 1,
                0x80 - (block << 6),
            )
            if below:
                runs.append((byte + block, byte + block, ~self.node(below)))
            at = block + 1 << shift
        return runs

    def whole(self, levels: int, label: int) -> int:
        """Returns a target from which any ``levels`` continuation bytes lead to the class
        ``label``."""
        if levels == 0:
            return label
        number = self._whole.get((levels, label))
        if number is None:
            number = self.node([(0x80, 0xBF, self.whole(levels - 1, label))])
            self._whole[levels, label] = number
        return ~number

    def projected(self, root: int, groups: tuple[tuple[int, int], ...]) -> int:
        """A copy of the root in which each class is replaced by its group. Classes without a group
        are removed."""
        made = self._projections.setdefault(groups, {})
        group_of = dict(groups)

        def project(number: int) -> int:
            if number not in made:
                runs = []
                for low, high, to in self.nodes[number]:
                    if to >= 0:
                        if to in group_of:
                            runs.append((low, high, group_of[to]))
                    elif self.nodes[below := project(~to)]:
                        runs.append((low, high, ~below))
                made[number] = self.node(runs)
            return made[number]

        return project(root)


def _numbered(rows: list[Runs], accepts: list[int]) -> ByteAutomaton:
    numbers = {0: 1}
    pending = [0]
    ordered: list[Runs] = [()]
    for state in pending:
        runs = []
        for low, high, to in rows[state]:
            if to not in numbers:
                numbers[to] = len(numbers) + 1
                pending.append(to)
            runs.append((low, high, numbers[to]))
        ordered.append(tuple(runs))
    between = len(accepts)
    return ByteAutomaton(
        ordered, [0, *(accepts[state] if state < between else 0 for state in pending)]
    )
