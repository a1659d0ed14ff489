"""Parse tables: the action of each state at each terminal. Conflicts are resolved as in yacc."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import GrammarError
from .grammar import Grammar
from .lr1 import State

SHIFT = 1
REDUCE = 2
ACCEPT = 3

MAX_ENTRIES = 1 << 23
"""Maximum number of entries of ``actions`` and ``gotos`` together."""


@dataclass(frozen=True, slots=True)
class ParseTables:
    """The tables of a parser.

    ``actions`` [num_states * num_terminals]: 0 is an error. Any other action is ``number << 2 |
    kind``, where kind is SHIFT (to a state), REDUCE (a production) or ACCEPT. ``gotos`` [num_states
    * num_nonterminals]: the state after a nonterminal, 0 if there is none. The tables do not have
    default reductions: each reduction is entered only at the terminals that can follow it.
    """

    num_terminals: int
    num_nonterminals: int
    num_states: int
    actions: list[int]
    gotos: list[int]
    lhs: list[int]
    """Nonterminal of each production."""
    length: list[int]
    """Number of symbols of each production."""


@dataclass(frozen=True, slots=True)
class ConflictChoice:
    """A conflict and its resolution: two actions of one state at one terminal.

    ``kept`` and ``dropped`` are productions; None is the shift.
    """

    state: int
    terminal: int
    kept: int | None
    dropped: int | None


def make_tables(grammar: Grammar, states: list[State]) -> tuple[ParseTables, list[ConflictChoice]]:
    """The tables of an automaton, and the conflicts that precedences do not decide.

    In such a conflict, a shift is preferred to a reduction, and an earlier rule to a later rule.
    Raises GrammarError if the tables have more than ``MAX_ENTRIES`` entries, or if the parser could
    reduce without end.
    """
    num_terminals = len(grammar.terminals)
    num_nonterminals = len(grammar.nonterminals)
    entries = len(states) * (num_terminals + num_nonterminals)
    if entries > MAX_ENTRIES:
        raise GrammarError(
            f"the grammar's tables have {entries:,} entries ({len(states):,} states); "
            f"at most {MAX_ENTRIES:,} are allowed"
        )
    actions = [0] * (len(states) * num_terminals)
    gotos = [0] * (len(states) * num_nonterminals)
    choices: list[ConflictChoice] = []
    for number, state in enumerate(states):
        row = number * num_terminals
        for symbol, target in state.transitions.items():
            if symbol < num_terminals:
                actions[row + symbol] = target << 2 | SHIFT
            else:
                gotos[number * num_nonterminals + symbol - num_terminals] = target
        refused: set[int] = set()
        for production, lookahead in sorted(state.reductions.items()):
            for terminal in set_bits(lookahead):
                if terminal in refused:
                    continue
                action = actions[row + terminal]
                reduce = production << 2 | REDUCE if production else ACCEPT
                if action == 0:
                    actions[row + terminal] = reduce
                elif action & 3 == SHIFT:
                    decided = _by_precedence(grammar, production, terminal)
                    if decided == "reduce":
                        actions[row + terminal] = reduce
                    elif decided == "error":
                        actions[row + terminal] = 0
                        refused.add(terminal)
                    elif decided is None:
                        choices.append(ConflictChoice(number, terminal, None, production))
                else:
                    choices.append(ConflictChoice(number, terminal, action >> 2, production))
    tables = ParseTables(
        num_terminals,
        num_nonterminals,
        len(states),
        actions,
        gotos,
        [production.lhs for production in grammar.productions],
        [len(production.rhs) for production in grammar.productions],
    )
    _check_reductions_end(grammar, tables)
    return tables, choices


def _by_precedence(grammar: Grammar, production: int, terminal: int) -> str | None:
    """The action that the precedences choose: reduce, shift or error; None if they do not
    decide."""
    level = grammar.productions[production].precedence
    against = grammar.precedence[terminal]
    if not level or not against:
        return None
    if level != against:
        return "reduce" if level > against else "shift"
    return {"left": "reduce", "right": "shift"}.get(grammar.associativity[terminal], "error")


def set_bits(bits: int) -> list[int]:
    """The numbers of the bits that are set, in order."""
    found = []
    while bits:
        low = bits & -bits
        found.append(low.bit_length() - 1)
        bits ^= low
    return found


def _check_reductions_end(grammar: Grammar, tables: ParseTables) -> None:
    """Raises GrammarError if there are a state and a terminal at which the parser would reduce
    empty rules forever.

    Endless reductions are possible only if the grammar is not LR(1) and a conflict was decided in
    favour of the empty rule. They never pop the state in which they began. So it is sufficient to
    check each state alone.
    """
    terminals = tables.num_terminals
    for state in range(tables.num_states):
        row = state * terminals
        for terminal in range(terminals):
            action = tables.actions[row + terminal]
            if action & 3 != REDUCE or tables.length[action >> 2]:
                continue
            production = action >> 2
            stack = [state]
            for _ in range(4 * tables.num_states + 4):
                reduced = tables.actions[stack[-1] * terminals + terminal]
                if reduced & 3 != REDUCE:
                    break
                length = tables.length[reduced >> 2]
                if length >= len(stack):
                    break
                if length:
                    del stack[-length:]
                lhs = tables.lhs[reduced >> 2]
                stack.append(tables.gotos[stack[-1] * tables.num_nonterminals + lhs])
            else:
                raise grammar.error(
                    grammar.productions[production].offset,
                    f"'{grammar.production_text(production)}' would be reduced forever before "
                    f"{grammar.terminals[terminal]}; "
                    "a rule must not begin with an empty rule that the rule itself follows",
                )
