"""The tables accept exactly the texts that the grammar derives, and allow each terminal that can
follow."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenbus.grammars.yacc import GrammarError, Recognizer, check_text, compile_grammar

from ..counts import examples
from .earley import Earley, Rules, is_lr1

ALPHABET = "abc"
LENGTH = 5


def written(rules: Rules, start: str) -> str:
    """The text of a grammar with these rules."""
    lines = [f"%start {start}", "%%"]
    for name, alternatives in rules.items():
        sides = (" ".join(s if s in rules else f'"{s}"' for s in a) for a in alternatives)
        lines.append(f"{name}: {' | '.join(side or '%empty' for side in sides)};")
    return "\n".join(lines)


@st.composite
def rule_sets(draw: st.DrawFn) -> Rules:
    names = ["S", "A", "B", "C"][: draw(st.integers(1, 4))]
    symbols = st.sampled_from([*names, *ALPHABET])
    side = st.lists(symbols, max_size=4).map(tuple)
    return {name: draw(st.lists(side, min_size=1, max_size=3, unique=True)) for name in names}


def compare(rules: Rules, start: str, *, exact: bool) -> None:
    """Compares the tables with Earley on all texts of up to LENGTH terminals that both allow. If
    ``exact`` is false, the tables may allow less than Earley."""
    compilation = compile_grammar(written(rules, start))
    earley = Earley(rules, start)
    waiting = [("", Recognizer(compilation.grammar), earley.begin())]
    while waiting:
        text, recognizer, sets = waiting.pop()
        ours = {chr(byte) for byte in recognizer.allowed_bytes()}
        theirs = earley.next(sets)
        if exact:
            # The recognizer pushes a lexeme when the next one begins, or at the end of the text.
            assert ours == theirs, text
            assert recognizer.complete == earley.complete(sets), text
        else:
            assert ours <= theirs, text
            assert earley.complete(sets) or not recognizer.complete, text
        if len(text) < LENGTH:
            for terminal in ours:
                further = recognizer.copy()
                assert further.byte(ord(terminal))
                waiting.append((text + terminal, further, earley.after(sets, terminal)))


@given(rule_sets())
@settings(max_examples=examples(40))
def test_any_grammar_is_recognized_as_earley_does(rules: Rules) -> None:
    try:
        compilation = compile_grammar(written(rules, "S"))
    except GrammarError:
        assume(False)
    compare(rules, "S", exact=not compilation.conflicts)


@given(rule_sets())
@settings(max_examples=examples(40))
def test_there_is_a_conflict_exactly_where_canonical_lr1_has_one(rules: Rules) -> None:
    try:
        compilation = compile_grammar(written(rules, "S"))
    except GrammarError:
        assume(False)
    assert bool(compilation.conflicts) == (not is_lr1(rules, "S"))


@given(rule_sets())
@settings(max_examples=examples(40))
def test_the_example_of_a_conflict_is_how_a_sentence_can_begin(rules: Rules) -> None:
    try:
        compilation = compile_grammar(written(rules, "S"))
    except GrammarError:
        assume(False)
    earley = Earley(rules, "S")

    def character(name: str) -> str:
        # The example has the name of a rule instead of its lexemes if the rule only lists lexemes.
        return rules[name][0][0] if name in rules else name.strip('"')

    for conflict in compilation.conflicts:
        before, _, ahead = conflict.example.partition("•")
        sets = earley.begin()
        for lexeme in before.split():
            sets = earley.after(sets, character(lexeme))
        if ahead == " the end of the text":
            assert earley.complete(sets)
        else:
            assert character(ahead.strip()) in earley.next(sets)


NOT_LALR: dict[str, Rules] = {
    "the classic": {
        "S": [("a", "A", "d"), ("b", "B", "d"), ("a", "B", "e"), ("b", "A", "e")],
        "A": [("c",)],
        "B": [("c",)],
    },
    "an assignment's sides": {
        "S": [("a", "A", "a"), ("b", "A", "b"), ("a", "B", "b"), ("b", "B", "a")],
        "A": [("c", "c")],
        "B": [("c", "c")],
    },
    "merged only deeper": {
        "S": [("a", "T", "a"), ("b", "T", "b"), ("a", "U", "b"), ("b", "U", "a")],
        "T": [("c", "T"), ("A",)],
        "U": [("c", "U"), ("B",)],
        "A": [("d",)],
        "B": [("d",)],
    },
}


@pytest.mark.parametrize("name", NOT_LALR)
def test_grammars_that_lalr_gets_wrong_work(name: str) -> None:
    rules = NOT_LALR[name]
    assert is_lr1(rules, "S")
    # Rules of single lexemes do not become terminals here, because several rules have c or d.
    assert compile_grammar(written(rules, "S")).conflicts == ()
    compare(rules, "S", exact=True)


def test_a_grammar_that_is_lalr_has_as_many_states_as_lalr() -> None:
    rules: Rules = {
        "S": [("E",)],
        "E": [("E", "a", "T"), ("T",)],
        "T": [("T", "b", "F"), ("F",)],
        "F": [("c", "E", "d"), ("e",)],
    }
    # The dragon book's expression grammar has 12 LALR states. The rule S adds one.
    assert compile_grammar(written(rules, "S")).grammar.num_states == 13


def test_two_thousand_nested_brackets_are_taken() -> None:
    grammar = compile_grammar('%start a %% a: "(" a ")" | "x";').grammar
    assert check_text(grammar, b"(" * 2000 + b"x" + b")" * 2000) is None
    assert check_text(grammar, b"(" * 2000 + b"x" + b")" * 1999) is not None
