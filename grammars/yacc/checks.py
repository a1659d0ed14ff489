"""Finds errors in a grammar whose text can be parsed. A rule is faulty if it is not used, derives
no finite text, or derives itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .grammar import RESERVED, SKIP_RULE, Grammar, Production


def check_grammar(grammar: Grammar) -> None:
    """Raises GrammarError for a rule that is not used, derives no finite text, or derives
    itself."""
    _check_used(grammar)
    _check_ends(grammar)
    _check_cycles(grammar)


def nullable_nonterminals(grammar: Grammar) -> frozenset[int]:
    """The symbols of the nonterminals that can derive the empty text."""
    terminals = len(grammar.terminals)
    return frozenset(
        terminals + lhs for lhs in _fixpoint(grammar, lambda symbol: symbol >= terminals)
    )


def _fixpoint(grammar: Grammar, may_stand: Callable[[int], bool]) -> set[int]:
    """The smallest set that contains each nonterminal with a suitable alternative. An alternative
    is suitable if all of its nonterminals are in the set, and ``may_stand`` is true for all of its
    symbols."""
    terminals = len(grammar.terminals)
    found: set[int] = set()
    waiting = [0] * len(grammar.productions)
    stands_in: dict[int, list[int]] = {}
    ready: list[int] = []
    for number, production in enumerate(grammar.productions):
        if not all(map(may_stand, production.rhs)):
            continue
        needed = [symbol - terminals for symbol in production.rhs if symbol >= terminals]
        waiting[number] = len(needed)
        for nonterminal in needed:
            stands_in.setdefault(nonterminal, []).append(number)
        if not needed:
            ready.append(production.lhs)
    while ready:
        nonterminal = ready.pop()
        if nonterminal in found:
            continue
        found.add(nonterminal)
        for number in stands_in.get(nonterminal, ()):
            waiting[number] -= 1
            if waiting[number] == 0:
                ready.append(grammar.productions[number].lhs)
    return found


def _first_production(grammar: Grammar, nonterminals: Iterable[int]) -> Production:
    chosen = set(nonterminals)
    return next(p for p in grammar.productions[1:] if p.lhs in chosen)


def _check_used(grammar: Grammar) -> None:
    terminals = len(grammar.terminals)
    alternatives: dict[int, list[Production]] = {}
    for production in grammar.productions:
        alternatives.setdefault(production.lhs, []).append(production)
    used = {0}
    waiting = [0]
    used_terminals: set[int] = set()
    while waiting:
        for production in alternatives[waiting.pop()]:
            for symbol in production.rhs:
                if symbol < terminals:
                    used_terminals.add(symbol)
                elif symbol - terminals not in used:
                    used.add(symbol - terminals)
                    waiting.append(symbol - terminals)
    unused = set(range(len(grammar.nonterminals))) - used
    if unused:
        production = _first_production(grammar, unused)
        name = grammar.nonterminals[production.lhs]
        raise grammar.error(production.offset, f"the rule '{name}' is never used by the start rule")
    for lexeme in grammar.lexemes:
        name = grammar.terminals[lexeme.terminal]
        if name not in (SKIP_RULE, RESERVED) and lexeme.terminal not in used_terminals:
            raise grammar.error(lexeme.offset, f"the rule '{name}' is never used by the start rule")


def _check_ends(grammar: Grammar) -> None:
    ends = _fixpoint(grammar, lambda symbol: True)
    endless = set(range(1, len(grammar.nonterminals))) - ends
    if not endless:
        return
    terminals = len(grammar.terminals)
    production = _first_production(grammar, endless)
    for candidate in grammar.productions[1:]:
        if candidate.lhs in endless and candidate.lhs + terminals in candidate.rhs:
            production = candidate
            break
    name = grammar.nonterminals[production.lhs]
    again = next(s for s in production.rhs if s >= terminals and s - terminals in endless)
    needs = (
        f"'{grammar.symbol_name(again)}' again"
        if again - terminals == production.lhs
        else f"'{grammar.symbol_name(again)}'"
    )
    empty = ", so the language is empty" if 0 not in ends else ""
    raise grammar.error(
        production.offset,
        f"the rule '{name}' derives no finite text{empty}: each of its alternatives contains a "
        f"rule with this fault; this alternative contains {needs}",
    )


def _check_cycles(grammar: Grammar) -> None:
    """Raises GrammarError if a rule can derive exactly itself, because its texts then have
    infinitely many parse trees."""
    terminals = len(grammar.terminals)
    nullable = nullable_nonterminals(grammar)
    becomes: dict[int, set[int]] = {}
    for production in grammar.productions:
        solid = [symbol for symbol in production.rhs if symbol not in nullable]
        alone = solid if solid else production.rhs
        if len(solid) < 2:
            targets = {symbol - terminals for symbol in alone if symbol >= terminals}
            if targets:
                becomes.setdefault(production.lhs, set()).update(targets)
    into: dict[int, list[int]] = {}
    for nonterminal, others in becomes.items():
        for other in others:
            into.setdefault(other, []).append(nonterminal)
    left = {nonterminal: len(others) for nonterminal, others in becomes.items()}
    ready = [n for n in range(len(grammar.nonterminals)) if n not in left]
    while ready:
        for nonterminal in into.get(ready.pop(), ()):
            left[nonterminal] -= 1
            if left[nonterminal] == 0:
                del left[nonterminal]
                ready.append(nonterminal)
    if not left:
        return
    # Each remaining rule derives a remaining rule. The search follows these derivations until a
    # rule occurs for the second time.
    nonterminal = next(iter(left))
    seen: set[int] = set()
    while nonterminal not in seen:
        seen.add(nonterminal)
        nonterminal = next(other for other in becomes[nonterminal] if other in left)
    name = grammar.nonterminals[nonterminal]
    raise grammar.error(
        _first_production(grammar, [nonterminal]).offset,
        f"the rule '{name}' can derive exactly itself: its texts have infinitely many parse trees",
    )
