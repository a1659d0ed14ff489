"""Compiles the text of a grammar to its tables."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..regex import Lexeme, LexerDfa, RegexError, compile_lexer, compile_regex
from .checks import check_grammar
from .closing import find_rests, shortest_lexemes
from .compiled import CompiledGrammar
from .conflicts import Conflict, explain_conflicts
from .errors import GrammarError
from .grammar import SKIP, Grammar, GrammarLexeme, number_grammar
from .lr1 import Items, State, build_automaton
from .parser import Parser
from .source import LexerRules, read_source
from .tables import REDUCE, ParseTables, make_tables, set_bits

MAX_STATES = 1 << 14
MAX_PRODUCTIONS = 1 << 14
MAX_TERMINALS = 4096
MAX_LENGTH = 4096
"""Maximum number of symbols of one alternative."""
EXAMPLE_SECONDS = 2.0
"""Maximum CPU time in seconds for finding examples, for all conflicts together."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled grammar, with its conflicts and warnings."""

    grammar: CompiledGrammar
    conflicts: tuple[Conflict, ...]
    """Conflicts that precedences do not decide. In such a conflict, the parser prefers a shift to a
    reduction, and the earlier of two rules to the later."""
    warnings: tuple[str, ...]
    """Warnings about two faults: a lexeme can never match, because other lexemes are always
    preferred, or each text must begin inside a lexeme (``_begun``)."""


def compile_grammar(
    text: str, *, max_states: int = MAX_STATES, max_seconds: float = 20.0
) -> Compilation:
    """Compiles a grammar in AICI's format (docs/grammars.md).

    Raises GrammarError if the grammar cannot be parsed, fails a check, exceeds a bound, or needs
    more than ``max_states`` parser states or ``max_seconds`` seconds. Seconds are CPU time of this
    thread, so a grammar does not fail because the machine is busy. If the fault has a single place,
    the error has its line and column.
    """
    deadline = time.thread_time() + max_seconds
    grammar = number_grammar(read_source(text))
    for count, limit, what in (
        (len(grammar.productions), MAX_PRODUCTIONS, "alternatives"),
        (len(grammar.terminals), MAX_TERMINALS, "lexemes"),
        (max(len(p.rhs) for p in grammar.productions), MAX_LENGTH, "symbols in one alternative"),
    ):
        if count > limit:
            raise GrammarError(f"the grammar has {count:,} {what}; at most {limit:,} are allowed")
    check_grammar(grammar)
    if not grammar.lexemes:
        raise GrammarError("the grammar has no lexemes, so its only text is the empty one")
    items = Items(grammar)
    states = build_automaton(items, max_states=min(max_states, MAX_STATES), deadline=deadline)
    tables, choices = make_tables(grammar, states)
    lexemes = preferred_first(grammar)
    lexer = _lexer(grammar, lexemes, max(deadline - time.thread_time(), 0.1))
    until = min(time.thread_time() + EXAMPLE_SECONDS, deadline)
    conflicts = explain_conflicts(grammar, items, states, choices, until)
    joined = _join(grammar, items, states, tables, lexemes, lexer)
    if grammar.lexer_rules is LexerRules.AICI:
        joined = _after_newline(joined)
    warnings = (*_unmatched(grammar, lexemes, lexer), *_begun(joined))
    return Compilation(joined, conflicts, warnings)


def preferred_first(grammar: Grammar) -> list[GrammarLexeme]:
    """The lexemes in order of preference: keywords, then ``%reserved`` regular expressions, then
    the other lexemes by the grammar's lexer rules. If several lexemes match the same text, the
    lexer chooses the first of them.

    Under AICI's rules, a regular expression that is written with more bytes is preferred. If the
    numbers of bytes are equal, the regular expression that is used first is preferred.
    """
    by_length = grammar.lexer_rules is LexerRules.AICI

    def rank(lexeme: GrammarLexeme) -> tuple[bool, bool, int]:
        length = len(lexeme.pattern.encode()) if by_length and not lexeme.reserved else 0
        return not lexeme.literal, not lexeme.reserved, -length

    return sorted(grammar.lexemes, key=rank)


def _lexer(grammar: Grammar, lexemes: list[GrammarLexeme], max_seconds: float) -> LexerDfa:
    """One automaton for all lexemes. If a regular expression is not valid, raises GrammarError with
    its place."""
    for lexeme in grammar.lexemes:
        if lexeme.literal:
            continue
        try:
            alone = compile_regex(lexeme.pattern, max_seconds=max_seconds)
        except RegexError as error:
            # In the grammar's text, a quote and a slash precede the pattern.
            place = lexeme.offset + 2 + (error.position or 0)
            raise grammar.error(place, error.message) from error
        if lexeme.terminal != SKIP and alone.accepting[alone.start]:
            name = grammar.terminals[lexeme.terminal]
            raise grammar.error(
                lexeme.offset, f"{name} matches the empty text; it must need at least 1 character"
            )
    try:
        return compile_lexer(
            [
                Lexeme(grammar.terminals[lexeme.terminal], lexeme.pattern, lexeme.literal)
                for lexeme in lexemes
            ],
            max_seconds=max_seconds,
        )
    except RegexError as error:
        raise GrammarError(f"the lexer: {error.message}") from error


def _unmatched(grammar: Grammar, lexemes: list[GrammarLexeme], lexer: LexerDfa) -> Iterable[str]:
    """Yields a warning for each terminal that never matches, because preferred lexemes match all
    its texts."""
    matched = {lexemes[number].terminal for number in set(lexer.accepted) if number >= 0}
    chosen: dict[int, set[int]] = {}
    """For each terminal that never matches: the terminals that are preferred to it."""
    for preferred, matching in set(zip(lexer.accepted, lexer.accepts_all, strict=True)):
        for number in set_bits(matching):
            terminal = lexemes[number].terminal
            if terminal not in matched:
                chosen.setdefault(terminal, set()).add(lexemes[preferred].terminal)
    for terminal, others in sorted(chosen.items()):
        first = next(lexeme for lexeme in grammar.lexemes if lexeme.terminal == terminal)
        place = grammar.error(first.offset, "")
        names = " and ".join(grammar.terminals[other] for other in sorted(others))
        yield (
            f"line {place.line}, column {place.column}: {grammar.terminals[terminal]} can never "
            f"match: all its texts match {names} too, which is preferred; keywords are preferred "
            f"to regular expressions, and of two regular expressions, {_ORDER[grammar.lexer_rules]}"
        )


_ORDER = {
    LexerRules.AICI: "the one that is written with more characters (unless '%lexer declared')",
    LexerRules.DECLARED: "the one that comes first ('%lexer declared')",
}


def _after_newline(grammar: CompiledGrammar) -> CompiledGrammar:
    """Changes a grammar so that its lexer begins a text as if it had just read a newline. AICI's
    lexer does the same.

    If no text of the grammar can begin with a lexeme whose first byte is a newline, the lexer
    begins at its start state instead.
    """
    first = grammar.transitions[
        grammar.lexer_start * grammar.num_classes + grammar.classes[ord("\n")]
    ]
    viable = Parser(grammar).viable(Parser.start) | 1 << SKIP
    return replace(grammar, lexer_first=first) if grammar.reachable[first] & viable else grammar


def _begun(grammar: CompiledGrammar) -> Iterable[str]:
    """Yields a warning if each text of the grammar must begin inside a lexeme. ``_after_newline``
    assumes a newline before the text. This newline may begin a lexeme, which the text then has to
    complete."""
    first = grammar.lexer_first
    viable = Parser(grammar).viable(Parser.start) | 1 << SKIP
    if first == grammar.lexer_start or (
        grammar.accepted[first] >= 0 and viable >> grammar.accepted[first] & 1
    ):
        return
    names = " or ".join(grammar.terminals[t] for t in set_bits(grammar.reachable[first] & viable))
    yield (
        f"a text can only begin with the rest of {names} after a newline: the lexer begins as if "
        "it had just read a newline, and no text can begin with a newline alone; add the newline "
        "to SKIP, or write '%lexer declared'"
    )


def _with_start(lexer: LexerDfa) -> tuple[list[int], list[int], list[int], int]:
    """Returns the transitions, the matched lexeme and the reachable lexemes of each state, and the
    start state. No transition leads to the start state, and no lexeme ends in it, so an empty text
    is never a lexeme. If necessary, a new start state is added."""
    transitions = list(lexer.transitions)
    accepted = list(lexer.accepted)
    reachable = list(lexer.reachable)
    start = lexer.start
    if accepted[start] >= 0 or start in transitions:
        width = lexer.num_classes
        transitions += transitions[start * width : (start + 1) * width]
        accepted.append(-1)
        reachable.append(reachable[start])
        start = len(accepted) - 1
    return transitions, accepted, reachable, start


def _join(
    grammar: Grammar,
    items: Items,
    states: list[State],
    tables: ParseTables,
    lexemes: list[GrammarLexeme],
    lexer: LexerDfa,
) -> CompiledGrammar:
    terminal_of = [lexeme.terminal for lexeme in lexemes]
    transitions, matched, reachable, start = _with_start(lexer)
    accepted = [terminal_of[lexeme] if lexeme >= 0 else -1 for lexeme in matched]
    classes = bytes(lexer.classes)
    shortest = shortest_lexemes(classes, lexer.num_classes, transitions, accepted, start)
    sets: dict[int, int] = {}
    for matching in reachable:
        if matching not in sets:
            sets[matching] = sum({1 << terminal_of[lexeme] for lexeme in set_bits(matching)})
    shifted: list[int] = []
    reduced: list[tuple[tuple[int, int], ...]] = []
    for state in range(tables.num_states):
        first = state * tables.num_terminals
        shifts = 0
        reductions: dict[int, int] = {}
        for terminal, action in enumerate(tables.actions[first : first + tables.num_terminals]):
            if action & 3 == REDUCE:
                reductions[action >> 2] = reductions.get(action >> 2, 0) | 1 << terminal
            elif action:
                shifts |= 1 << terminal
        shifted.append(shifts)
        reduced.append(tuple(sorted(reductions.items())))
    return CompiledGrammar(
        terminals=grammar.terminals,
        nonterminals=grammar.nonterminals,
        classes=classes,
        num_classes=lexer.num_classes,
        lexer_start=start,
        lexer_first=start,
        transitions=tuple(transitions),
        accepted=tuple(accepted),
        reachable=tuple(sets[matching] for matching in reachable),
        num_states=tables.num_states,
        actions=tuple(tables.actions),
        gotos=tuple(tables.gotos),
        lhs=tuple(tables.lhs),
        length=tuple(tables.length),
        shifted=tuple(shifted),
        reduced=tuple(reduced),
        rests=find_rests(grammar, items, states, shortest),
        shortest=tuple(shortest.get(t, b"") for t in range(len(grammar.terminals))),
    )
