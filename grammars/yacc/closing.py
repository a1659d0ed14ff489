"""Computes the terminals that complete the unfinished rules of each parser state in few bytes.

The kernel items of a parser state are the rules that the text has begun and not finished. A
``Rest`` has the terminals that complete one kernel item in the fewest bytes. To close a text, the
guest engine applies rests that complete the whole stack, from its top to its bottom. It chooses the
rests with the lowest total cost (guest/closing.h).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .grammar import Grammar
from .lr1 import Items, State

MAX_REST_TOKENS = 1024
"""Maximum number of terminals of a ``Rest``. An item that needs more terminals has no ``Rest``."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The completion of an item. After ``terminals``, the parser reduces the item to the
    nonterminal ``lhs``.

    ``pops``: number of symbols of the item that have already been read. The reduction pops this
    number of states. ``cost``: the bytes of the shortest lexemes of the terminals, plus one for
    each terminal.
    """

    lhs: int
    pops: int
    cost: int
    terminals: tuple[int, ...]


def shortest_lexemes(
    classes: bytes,
    num_classes: int,
    transitions: Sequence[int],
    accepted: Sequence[int],
    start: int,
) -> dict[int, bytes]:
    """For each terminal that the lexer can match: a shortest text of the terminal. Texts of digits
    and letters are preferred."""
    byte_of = [_plainest(classes, number) for number in range(num_classes)]
    order = sorted(range(num_classes), key=lambda number: _plainness(byte_of[number]))
    found: dict[int, bytes] = {}
    seen = {start: b""}
    waiting = [start]
    for state in waiting:
        text = seen[state]
        terminal = accepted[state]
        if terminal >= 0 and text:
            found.setdefault(terminal, text)
        for number in order:
            target = transitions[state * num_classes + number]
            if target and target not in seen:
                seen[target] = text + bytes([byte_of[number]])
                waiting.append(target)
    return found


def _plainest(classes: bytes, number: int) -> int:
    return min((byte for byte in range(256) if classes[byte] == number), key=_plainness)


def _plainness(byte: int) -> tuple[int, int]:
    character = chr(byte)
    if byte < 128 and character.isalnum():
        return (0 if character.isdigit() else 1 if character.islower() else 2, byte)
    return (3 if 32 <= byte < 127 else 4, byte)


def find_rests(
    grammar: Grammar, items: Items, states: Sequence[State], lexemes: dict[int, bytes]
) -> tuple[tuple[Rest, ...], ...]:
    """The rests of each state. An item does not have a rest if lexemes cannot complete it, or if it
    needs too many terminals."""
    terminals = len(grammar.terminals)
    costs: dict[int, int] = {t: len(text) + 1 for t, text in lexemes.items()}
    best = _cheapest(grammar, costs)

    def spelled(symbols: Sequence[int]) -> tuple[int, ...] | None:
        out: list[int] = []
        waiting = list(reversed(symbols))
        while waiting:
            symbol = waiting.pop()
            if symbol < terminals:
                out.append(symbol)
                if len(out) > MAX_REST_TOKENS:
                    return None
            else:
                waiting.extend(reversed(grammar.productions[best[symbol]].rhs))
        return tuple(out)

    rests: list[tuple[Rest, ...]] = []
    known: dict[int, Rest | None] = {}
    for state in states:
        for item in state.kernel:
            if item in known:
                continue
            number = items.production[item]
            production = grammar.productions[number]
            dot = item - items.start[number]
            left = production.rhs[dot:]
            known[item] = None
            if all(symbol in costs for symbol in left):
                text = spelled(left)
                if text is not None:
                    cost = sum(costs[symbol] for symbol in left)
                    known[item] = Rest(production.lhs, dot, cost, text)
        rests.append(tuple(rest for item in state.kernel if (rest := known[item]) is not None))
    return tuple(rests)


def _cheapest(grammar: Grammar, costs: dict[int, int]) -> dict[int, int]:
    """For each nonterminal, finds its shortest text. Returns a map from the nonterminal's symbol to
    the production of this text. Adds the costs of the nonterminals to ``costs``. Source: D. E.
    Knuth, "A generalization of Dijkstra's algorithm" (1977)."""
    terminals = len(grammar.terminals)
    uses: dict[int, list[int]] = {}
    missing: list[int] = []
    best: dict[int, int] = {}
    waiting: list[tuple[int, int, int]] = []
    for number, production in enumerate(grammar.productions):
        missing.append(len(production.rhs))
        for symbol in production.rhs:
            uses.setdefault(symbol, []).append(number)
        if not production.rhs:
            heapq.heappush(waiting, (0, number, terminals + production.lhs))
    ready = [(cost, -1, terminal) for terminal, cost in costs.items()]
    for entry in ready:
        heapq.heappush(waiting, entry)
    costs.clear()
    while waiting:
        cost, number, symbol = heapq.heappop(waiting)
        if symbol in costs:
            continue
        costs[symbol] = cost
        if number >= 0:
            best[symbol] = number
        for user in uses.get(symbol, ()):
            missing[user] -= 1
            if missing[user] == 0:
                production = grammar.productions[user]
                total = sum(costs[part] for part in production.rhs)
                heapq.heappush(waiting, (total, user, terminals + production.lhs))
    return best
