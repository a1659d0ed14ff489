"""For each parser state, ``rests`` has the terminals that complete the state's unfinished rules at
the lowest cost."""

from __future__ import annotations

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.yacc import Parser, Recognizer, compile_grammar
from tokenbus.grammars.yacc.grammar import END, SKIP


@pytest.mark.parametrize("name", library.names())
def test_every_state_has_a_rest_and_the_shortest_texts_are_what_the_lexer_makes_of_them(
    name: str,
) -> None:
    grammar = compile_grammar(library.grammar(name)).grammar
    assert all(grammar.rests)
    for terminal, text in enumerate(grammar.shortest):
        assert bool(text) == (terminal != END and terminal in grammar.accepted)
        state = grammar.lexer_start
        for byte in text:
            state = grammar.transitions[state * grammar.num_classes + grammar.classes[byte]]
        assert not text or grammar.accepted[state] == terminal


def test_a_rest_is_the_cheapest_text_of_what_is_missing() -> None:
    grammar = compile_grammar(
        """%start s
        %%
        SKIP: "/ +/" ;
        s: "if" e "then" s | "{" list "}" | "go" ;
        list: s | list ";" s ;
        e: "longer" | "(" e ")" | "x" "y" ;
        """
    ).grammar
    named = {name: number for number, name in enumerate(grammar.terminals)}
    parser = Parser(grammar)
    stack = parser.start
    for word in ('"if"', '"("'):
        after = parser.push(stack, named[word])
        assert after is not None
        stack = after
    [rest] = grammar.rests[stack[-1]]
    assert [grammar.terminals[t] for t in rest.terminals] == ['"x"', '"y"', '")"']
    assert (rest.pops, rest.cost) == (1, 6)
    assert grammar.shortest[SKIP] == b" "


def test_a_rest_that_is_too_long_is_left_out() -> None:
    doubled = "\n".join(f"a{i}: a{i + 1} a{i + 1} ;" for i in range(12))
    grammar = compile_grammar(f'%start s\n%%\ns: "x" a0 | "y" ;\n{doubled}\na12: "b" ;').grammar
    named = {name: number for number, name in enumerate(grammar.terminals)}
    after = Parser(grammar).push(Parser.start, named['"x"'])
    assert after is not None
    assert grammar.rests[after[-1]] == ()
    assert Recognizer(grammar).read(b"x" + 4096 * b"b") == 4097
