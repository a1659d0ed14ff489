"""The LR(1) automaton, with states merged by Pager's method.

D. Pager, "A practical general method for constructing LR(k) parsers", Acta Informatica 7 (1977):
two states with the same items are merged if their lookaheads are weakly compatible. Such a merge
never causes a conflict that canonical LR(1) does not have. So the automaton has about as many
states as an LALR(1) automaton, and has no conflicts if the grammar is LR(1). A set of terminals is
a Python integer with a bit for each terminal.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from .checks import nullable_nonterminals
from .errors import GrammarError
from .grammar import END, Grammar

Kernel = tuple[int, ...]
"""The numbers of a state's kernel items, in ascending order."""


@dataclass(slots=True)
class State:
    """A state of the automaton: its kernel items, the lookahead set of each kernel item, and its
    transitions by symbol.

    ``reductions`` maps a production to the set of terminals at which it is reduced.
    """

    kernel: Kernel
    lookaheads: list[int]
    transitions: dict[int, int] = field(default_factory=dict)
    reductions: dict[int, int] = field(default_factory=dict)


class Items:
    """The items (productions with a dot) of a grammar by number, and the symbols after their
    dots."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.num_terminals = len(grammar.terminals)
        self.nullable = nullable_nonterminals(grammar)
        self.first = self._first_sets()
        self.start: list[int] = []
        """Item with the dot at the left, by production."""
        self.production: list[int] = []
        self.next: list[int] = []
        """Symbol after the dot; -1 at the right end."""
        self.follow_first: list[int] = []
        """The terminals that can follow the symbol ``next`` within the production."""
        self.follow_nullable: list[bool] = []
        """Whether all symbols after the symbol ``next`` can derive the empty text."""
        self.of_nonterminal: list[list[int]] = [[] for _ in grammar.nonterminals]
        """Items with the dot at the left, by nonterminal."""
        for number, production in enumerate(grammar.productions):
            self.start.append(len(self.next))
            self.of_nonterminal[production.lhs].append(len(self.next))
            rows: list[tuple[int, int, bool]] = [(-1, 0, True)]
            first, nullable = 0, True
            for symbol in reversed(production.rhs):
                rows.append((symbol, first, nullable))
                first = self.first[symbol] | (first if symbol in self.nullable else 0)
                nullable = nullable and symbol in self.nullable
            for symbol, first, nullable in reversed(rows):
                self.production.append(number)
                self.next.append(symbol)
                self.follow_first.append(first)
                self.follow_nullable.append(nullable)
        self._leftmost: dict[int, list[tuple[int, int, bool]]] = {}

    def _first_sets(self) -> list[int]:
        """For each symbol, the terminals with which its texts can begin (the set FIRST)."""
        terminals = self.num_terminals
        first = [1 << t for t in range(terminals)] + [0] * len(self.grammar.nonterminals)
        starts: dict[int, set[int]] = {}
        for production in self.grammar.productions:
            for symbol in production.rhs:
                starts.setdefault(symbol, set()).add(terminals + production.lhs)
                if symbol not in self.nullable:
                    break
        waiting = deque(range(terminals))
        while waiting:
            symbol = waiting.popleft()
            for target in starts.get(symbol, ()):
                if first[symbol] & ~first[target]:
                    first[target] |= first[symbol]
                    waiting.append(target)
        return first

    def leftmost(self, symbol: int) -> list[tuple[int, int, bool]]:
        """The nonterminals that can begin a derivation of ``symbol``, including ``symbol`` itself.
        For each nonterminal, returns three values: its number, the terminals that can follow it
        within these derivations, and whether the terminals that follow ``symbol`` can follow it as
        well."""
        known = self._leftmost.get(symbol)
        if known is not None:
            return known
        terminals = self.num_terminals
        found: dict[int, tuple[int, bool]] = {symbol - terminals: (0, True)}
        waiting = [symbol - terminals]
        while waiting:
            nonterminal = waiting.pop()
            follows, inherits = found[nonterminal]
            for item in self.of_nonterminal[nonterminal]:
                left = self.next[item] - terminals
                if left < 0:
                    continue
                nullable = self.follow_nullable[item]
                more = self.follow_first[item] | (follows if nullable else 0)
                old, old_inherits = found.get(left, (-1, False))
                new = (more | max(old, 0), old_inherits or (inherits and nullable))
                if new != (old, old_inherits):
                    found[left] = new
                    waiting.append(left)
        known = [(n, follows, inherits) for n, (follows, inherits) in found.items()]
        self._leftmost[symbol] = known
        return known


def build_automaton(items: Items, *, max_states: int, deadline: float) -> list[State]:
    """All states of the merged LR(1) automaton; state 0 is the start.

    Raises GrammarError if the automaton needs more than ``max_states`` states, or if
    ``time.thread_time()`` passes ``deadline``.
    """
    states = [State((items.start[0],), [1 << END])]
    same_items: dict[Kernel, list[int]] = {states[0].kernel: [0]}
    queue = deque([0])
    queued = {0}
    while queue:
        number = queue.popleft()
        queued.discard(number)
        state = states[number]
        moves, state.reductions = _expand(items, state)
        if time.thread_time() > deadline:
            raise GrammarError(f"compiling takes too long: {len(states):,} states so far")
        for symbol, lookahead_of in moves.items():
            kernel = tuple(sorted(lookahead_of))
            lookaheads = [lookahead_of[item] for item in kernel]
            before = state.transitions.get(symbol)
            others = same_items.setdefault(kernel, [])
            target = _choose(states, others, before, lookaheads)
            if target is None:
                target = len(states)
                if target >= max_states:
                    raise GrammarError(f"the grammar needs more than {max_states:,} states")
                states.append(State(kernel, lookaheads))
                others.append(target)
            elif not _merge(states[target], lookaheads):
                state.transitions[symbol] = target
                continue
            state.transitions[symbol] = target
            if target not in queued:
                queued.add(target)
                queue.append(target)
    return _reachable(states)


def _expand(items: Items, state: State) -> tuple[dict[int, dict[int, int]], dict[int, int]]:
    """A state's transitions (from symbol to kernel items with lookaheads), and its reductions."""
    terminals = items.num_terminals
    closure: dict[int, int] = {}
    moves: dict[int, dict[int, int]] = {}
    reductions: dict[int, int] = {}
    for item, lookahead in zip(state.kernel, state.lookaheads, strict=True):
        symbol = items.next[item]
        if symbol < 0:
            reductions[items.production[item]] = lookahead
            continue
        moves.setdefault(symbol, {})[item + 1] = lookahead
        if symbol >= terminals:
            after = items.follow_first[item] | (lookahead if items.follow_nullable[item] else 0)
            for nonterminal, follows, inherits in items.leftmost(symbol):
                follows |= after if inherits else 0
                closure[nonterminal] = closure.get(nonterminal, 0) | follows
    for nonterminal, lookahead in closure.items():
        for item in items.of_nonterminal[nonterminal]:
            symbol = items.next[item]
            if symbol < 0:
                reductions[items.production[item]] = lookahead
            else:
                moves.setdefault(symbol, {})[item + 1] = lookahead
    return moves, reductions


def _choose(
    states: list[State], others: list[int], before: int | None, lookaheads: list[int]
) -> int | None:
    """Chooses the target of a transition. ``lookaheads``: the lookaheads of the target's kernel
    items. The first choice is the former target ``before``, if it is compatible. The second choice
    is a state of ``others`` that has all lookaheads. The third choice is a compatible state of
    ``others``. None if a new state is needed."""
    if before is not None and _compatible(states[before].lookaheads, lookaheads):
        return before
    compatible = None
    for other in others:
        known = states[other].lookaheads
        if all(not new & ~old for old, new in zip(known, lookaheads, strict=True)):
            return other
        if compatible is None and _compatible(known, lookaheads):
            compatible = other
    return compatible


def _compatible(known: list[int], new: list[int]) -> bool:
    """Whether two states with the same items are weakly compatible, as Pager defines it. ``known``
    and ``new``: the lookaheads of the states. If two items do not have a common lookahead in either
    state, they must not have one in the merged state."""
    for i in range(len(known)):
        for j in range(i):
            if (known[i] & new[j] or known[j] & new[i]) and not (
                known[i] & known[j] or new[i] & new[j]
            ):
                return False
    return True


def _merge(state: State, lookaheads: list[int]) -> bool:
    """Adds lookaheads to a state. Returns whether at least one of them is new in the state."""
    grown = False
    for place, lookahead in enumerate(lookaheads):
        if lookahead & ~state.lookaheads[place]:
            state.lookaheads[place] |= lookahead
            grown = True
    return grown


def _reachable(states: list[State]) -> list[State]:
    """The states that can be reached from the start, with new numbers. Merges make some states
    unreachable."""
    numbers = {0: 0}
    order = [0]
    for number in order:
        for target in states[number].transitions.values():
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
    kept = [states[number] for number in order]
    for state in kept:
        state.transitions = {s: numbers[t] for s, t in state.transitions.items()}
    return kept
