"""The table of a pattern has as few states as possible, and the reader of tables checks them."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenbus.grammars.regex import (
    Dfa,
    Lexeme,
    LexerDfa,
    RegexError,
    compile_lexer,
    compile_regex,
)

from tests.grammars.patterns import PATTERNS

LEXER = [
    Lexeme("if", "if", True),
    Lexeme("NAME", r"[^\W\d]\w*", False),
    Lexeme("NUMBER", "[0-9]+", False),
]


def kinds(marks: list[int], dfa: Dfa) -> int:
    """The number of classes of equivalent states, by Moore's algorithm. ``marks`` has the first
    partition of the states."""
    block = dict(enumerate(marks))
    while True:
        seen: dict[tuple[int, ...], int] = {}
        refined = {}
        for state in range(dfa.num_states):
            row = dfa.transitions[state * dfa.num_classes : (state + 1) * dfa.num_classes]
            key = (block[state], *(block[target] for target in row))
            refined[state] = seen.setdefault(key, len(seen))
        if len(seen) == len(set(block.values())):
            return len(seen)
        block = refined


def is_trim(dfa: Dfa) -> bool:
    """Whether every state except the dead state can be reached and leads to a match."""
    after: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for at, target in enumerate(dfa.transitions):
        if target:
            after.setdefault(at // dfa.num_classes, set()).add(target)
            before.setdefault(target, set()).add(at // dfa.num_classes)

    def closure(states: set[int], edges: dict[int, set[int]]) -> set[int]:
        seen, pending = set(states), deque(states)
        while pending:
            more = edges.get(pending.popleft(), set()) - seen
            seen |= more
            pending.extend(more)
        return seen

    every = set(range(1, dfa.num_states))
    accepting = {state for state in every if dfa.accepting[state]}
    return closure({dfa.start}, after) == every == closure(accepting, before)


@given(PATTERNS)
def test_no_two_states_are_equivalent_and_each_goes_on_to_a_match(pattern: str) -> None:
    automaton = compile_regex(pattern)
    assume(automaton.num_states < 700)
    assert kinds(list(automaton.accepting), automaton) == automaton.num_states
    assert is_trim(automaton)
    columns = [
        automaton.transitions[one :: automaton.num_classes] for one in range(automaton.num_classes)
    ]
    assert len({column.tobytes() for column in columns}) == automaton.num_classes


@given(PATTERNS, PATTERNS)
def test_a_lexer_is_the_smallest_that_distinguishes_its_lexemes(one: str, other: str) -> None:
    lexer = compile_lexer(
        [Lexeme("a", "a", True), Lexeme("x", one, False), Lexeme("y", other, False)]
    )
    assume(lexer.num_states < 700)
    assert kinds(lexer.accepts_all, lexer) == lexer.num_states
    assert is_trim(lexer)


def test_the_dead_state_is_dead() -> None:
    automaton = compile_regex("[a-z]+")
    assert not any(automaton.step(0, byte) for byte in range(256))
    assert not automaton.accepting[0]
    assert automaton.step(automaton.start, ord("A")) == 0
    assert automaton.num_states == 3
    assert automaton.num_classes == 2


@given(PATTERNS)
def test_the_binary_form_gives_the_table_back(pattern: str) -> None:
    automaton = compile_regex(pattern)
    assert Dfa.from_bytes(automaton.to_bytes()) == automaton


def test_the_binary_form_of_a_lexer_gives_it_back() -> None:
    lexer = compile_lexer(LEXER)
    assert LexerDfa.from_bytes(lexer.to_bytes()) == lexer
    with pytest.raises(ValueError, match="of kind 1, not a plain automaton"):
        Dfa.from_bytes(lexer.to_bytes())
    with pytest.raises(ValueError, match="of kind 0, not a lexer"):
        LexerDfa.from_bytes(compile_regex("a").to_bytes())


@given(st.data())
def test_a_changed_or_cut_binary_form_is_refused(data: st.DataObject) -> None:
    form = bytearray(compile_lexer(LEXER[:1] + LEXER[2:]).to_bytes())
    at = data.draw(st.integers(0, len(form) - 1))
    form[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ValueError):
        LexerDfa.from_bytes(bytes(form))
    with pytest.raises(ValueError):
        LexerDfa.from_bytes(bytes(form[:at]))


@given(st.binary(max_size=400))
def test_other_bytes_are_no_binary_form(form: bytes) -> None:
    with pytest.raises(ValueError):
        Dfa.from_bytes(form)


def test_a_lexer_needs_a_lexeme() -> None:
    with pytest.raises(RegexError, match="at least 1 lexeme"):
        compile_lexer([])
