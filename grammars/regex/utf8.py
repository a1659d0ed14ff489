"""From characters to bytes: an automaton over exactly the valid UTF-8.

UTF-8 of all characters of a pattern is one directed graph without cycles: a node is what may stand
after some bytes of a character, its leaves are classes of characters. Equal nodes are one node.
Each state's transitions are that graph with the next states as leaves, and with classes that go to
the same state merged.

Where the automaton over characters is minimal, so is the one over bytes: inside a character two
nodes differ in what they lead to, and no node inside a character can do what one between two
characters does. Overlong forms and surrogates have no path. After R. Cox, Regular expression
matching in the wild, 2010, and the Rust crate ``utf8-ranges``.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from .bounds import Budget
from .subsets import Automaton, Segments

Runs = tuple[tuple[int, int, int], ...]
"""Ranges of bytes in order, each with where it leads. In the graph: a class from 0 up, or ~n for
node n. In the result: a state."""

_FORMS = (
    # first character, last, levels below the first byte, the first byte of character 0
    (0x00, 0x7F, 0, 0x00),
    (0x80, 0x7FF, 1, 0xC0),
    (0x800, 0xFFFF, 2, 0xE0),
    (0x10000, 0x10FFFF, 3, 0xF0),
)


@dataclass(slots=True)
class ByteAutomaton:
    """``rows[s]`` are the runs of state s; state 0 is dead and 1 the start; ``accepts`` as before.

    States are numbered in the order in which they are reached by ascending bytes, so that a
    language has one numbering.
    """

    rows: list[Runs]
    accepts: list[int]


def to_bytes(automaton: Automaton, budget: Budget) -> ByteAutomaton:
    """The automaton over bytes. Raises Exhausted when it has too many states."""
    graph = _Graph()
    root = graph.root(automaton.segments)
    states = len(automaton.rows)
    rows: list[Runs] = []
    inner: dict[Runs, int] = {}

    def instance(number: int, targets: list[int], made: dict[int, int]) -> int:
        """The state of a node inside a character, with its leaves replaced by next states."""
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
    """Nodes of UTF-8, each once."""

    def __init__(self) -> None:
        self.nodes: list[Runs] = []
        self._numbers: dict[Runs, int] = {}
        self._whole: dict[tuple[int, int], int] = {}
        self._projections: dict[tuple[tuple[int, int], ...], dict[int, int]] = {}

    def node(self, runs: list[tuple[int, int, int]]) -> int:
        """The node with these runs; neighbours that lead to the same are one run."""
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
        """The node before a character."""
        lows = [low for low, _, _ in segments]
        runs: list[tuple[int, int, int]] = []
        for first, last, levels, byte in _FORMS:
            runs += self.runs(segments, lows, first, last, levels, byte)
        return self.node(runs)

    def runs(
        self, segments: Segments, lows: list[int], first: int, last: int, levels: int, byte: int
    ) -> list[tuple[int, int, int]]:
        """The runs for the characters first..last, each byte for a block of 64**levels.

        ``byte`` is the byte of block 0, the block that holds character 0.
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
            # The blocks before the segment hold nothing.
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
        """Where a byte leads after which any ``levels`` bytes end in the same class."""
        if levels == 0:
            return label
        number = self._whole.get((levels, label))
        if number is None:
            number = self.node([(0x80, 0xBF, self.whole(levels - 1, label))])
            self._whole[levels, label] = number
        return ~number

    def projected(self, root: int, groups: tuple[tuple[int, int], ...]) -> int:
        """The root with each class replaced by its group, and without the classes of none."""
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
