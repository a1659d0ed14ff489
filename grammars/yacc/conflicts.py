"""Explains the conflicts of a grammar. For each conflict, finds a shortest example of input that
leads to it.

Source: C. Isradisaikul and A. Myers, "Finding counterexamples from parsing conflicts", PLDI 2015.
The search finds a shortest path over items. Each step records whether the terminal of the conflict
can follow the item's production.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass

from .grammar import END, Grammar
from .lr1 import Items, State
from .tables import ConflictChoice

MAX_EXAMPLE = 200
"""Maximum number of lexemes of an example."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two actions of the parser in one state at one terminal.

    ``kind``: shift/reduce or reduce/reduce. ``terminal``: the next lexeme when the parser must
    decide. ``kept``: the action that the parser takes, in words. ``dropped``: the action that the
    parser does not take. ``example``: a shortest sequence of lexemes from the beginning of a text
    to the conflict; "" if the search did not find a sequence in time.
    """

    kind: str
    terminal: str
    kept: str
    dropped: str
    example: str

    def __str__(self) -> str:
        place = f" after `{self.example}`" if self.example else ""
        choice = f"the parser chooses to {self.kept}, not to {self.dropped}"
        return f"{self.kind} conflict at {self.terminal}{place}: {choice}"


def explain_conflicts(
    grammar: Grammar,
    items: Items,
    states: list[State],
    choices: list[ConflictChoice],
    deadline: float,
) -> tuple[Conflict, ...]:
    """Describes the conflicts as text, in the order of the states. After ``deadline`` (a value of
    ``time.thread_time()``), no more examples are searched."""
    shortest = _Shortest(grammar) if choices else None
    found: list[Conflict] = []
    seen: set[tuple[int, int | None, int | None]] = set()
    for choice in choices:
        # If the same two rules have a conflict at the same lexeme in an earlier state, the later
        # conflict is left out.
        key = (choice.terminal, choice.kept, choice.dropped)
        if key in seen:
            continue
        seen.add(key)
        reduced = choice.dropped if choice.dropped is not None else choice.kept
        path = None
        if reduced is not None and time.thread_time() < deadline:
            path = _path(items, states, choice.state, reduced, choice.terminal, shortest, deadline)
        terminal = grammar.terminals[choice.terminal]
        example = " ".join([*_spelled(grammar, shortest, path), "•", terminal]) if path else ""
        if path == []:
            example = f"• {terminal}"
        kind = "shift/reduce" if choice.kept is None else "reduce/reduce"
        found.append(
            Conflict(
                kind,
                terminal,
                _action(grammar, choice.kept),
                _action(grammar, choice.dropped),
                example,
            )
        )
    return tuple(found)


def _action(grammar: Grammar, production: int | None) -> str:
    if production is None:
        return "read on"
    return f"reduce by `{grammar.production_text(production)}`" if production else "accept"


class _Shortest:
    """The length of a shortest text of each symbol, and the production that derives it (D. Knuth,
    "A generalization of Dijkstra's algorithm", 1977)."""

    def __init__(self, grammar: Grammar) -> None:
        terminals = len(grammar.terminals)
        self.length: list[int] = [1] * terminals + [-1] * len(grammar.nonterminals)
        self.by: dict[int, int] = {}
        missing = []
        stands_in: dict[int, list[int]] = {}
        cost = [0] * len(grammar.productions)
        ready: list[tuple[int, int]] = []
        for number, production in enumerate(grammar.productions):
            nonterminals = [s for s in production.rhs if s >= terminals]
            cost[number] = len(production.rhs) - len(nonterminals)
            missing.append(len(nonterminals))
            for symbol in nonterminals:
                stands_in.setdefault(symbol, []).append(number)
            if not nonterminals:
                ready.append((cost[number], number))
        heapq.heapify(ready)
        while ready:
            length, number = heapq.heappop(ready)
            symbol = grammar.productions[number].lhs + terminals
            if self.length[symbol] >= 0:
                continue
            self.length[symbol] = length
            self.by[symbol] = number
            for other in stands_in.get(symbol, ()):
                cost[other] += length
                missing[other] -= 1
                if missing[other] == 0:
                    heapq.heappush(ready, (cost[other], other))


def _spelled(grammar: Grammar, shortest: _Shortest | None, symbols: list[int] | None) -> list[str]:
    """Writes symbols as lexemes. Each nonterminal becomes one of its shortest texts. If the result
    is long, only its end is kept."""
    words: list[str] = []
    waiting = list(symbols or ())
    # The last symbols are spelled first, so that the lexemes next to the conflict are kept.
    while waiting and len(words) < MAX_EXAMPLE:
        symbol = waiting.pop()
        if symbol < len(grammar.terminals):
            words.append(grammar.terminals[symbol])
        elif shortest is not None:
            waiting.extend(grammar.productions[shortest.by[symbol]].rhs)
    if waiting:
        words.append("…")
    return words[::-1]


def _path(
    items: Items,
    states: list[State],
    state: int,
    production: int,
    terminal: int,
    shortest: _Shortest | None,
    deadline: float,
) -> list[int] | None:
    """The symbols of a shortest path to a place where ``production`` is reduced and ``terminal``
    follows. None if the search does not find a path before ``deadline``."""
    assert shortest is not None
    bit = 1 << terminal
    length = shortest.length
    at_end = items.start[production] + len(items.grammar.productions[production].rhs)
    goal = (state, at_end, True)
    start = (0, items.start[0], terminal == END)
    best = {start: 0}
    came: dict[tuple[int, int, bool], tuple[tuple[int, int, bool], int]] = {}
    queue = [(0, start)]
    while queue:
        cost, place = heapq.heappop(queue)
        if place == goal:
            symbols = []
            while place != start:
                place, symbol = came[place]
                if symbol >= 0:
                    symbols.append(symbol)
            return symbols[::-1]
        if cost > best[place]:
            continue
        if len(best) % 4096 == 0 and time.thread_time() > deadline:
            return None
        at, item, follows = place
        symbol = items.next[item]
        if symbol < 0:
            continue
        steps = [
            ((states[at].transitions[symbol], item + 1, follows), cost + length[symbol], symbol)
        ]
        if symbol >= items.num_terminals:
            inner = bool(items.follow_first[item] & bit) or (
                items.follow_nullable[item] and follows
            )
            nonterminal = symbol - items.num_terminals
            steps += [((at, first, inner), cost, -1) for first in items.of_nonterminal[nonterminal]]
        for target, total, read in steps:
            if total < best.get(target, 1 << 60):
                best[target] = total
                came[target] = (place, read)
                heapq.heappush(queue, (total, target))
    return None
