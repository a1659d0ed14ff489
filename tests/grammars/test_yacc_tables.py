"""The sets of terminals in a compiled grammar are right, and its bytes give the same grammar."""

from __future__ import annotations

import struct

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.yacc import CompiledGrammar, Parser, compile_grammar
from tokenbus.grammars.yacc.tables import set_bits


@pytest.fixture(scope="module", params=library.names())
def grammar(request: pytest.FixtureRequest) -> CompiledGrammar:
    return compile_grammar(library.grammar(request.param)).grammar


def test_a_grammar_comes_back_from_its_bytes(grammar: CompiledGrammar) -> None:
    blob = grammar.to_bytes()
    assert CompiledGrammar.from_bytes(blob) == grammar
    assert CompiledGrammar.from_bytes(blob).to_bytes() == blob


def test_the_header_is_as_documented(grammar: CompiledGrammar) -> None:
    blob = grammar.to_bytes()
    magic, version, size, _, terminals, nonterminals = struct.unpack_from("<4s5I", blob)
    assert (magic, version, size) == (b"TBYG", 3, len(blob))
    assert (terminals, nonterminals) == (grammar.num_terminals, grammar.num_nonterminals)
    lexer = struct.unpack_from("<2H", blob, 40)
    assert lexer == (grammar.lexer_start, grammar.lexer_first)
    assert blob[64:320] == grammar.classes


def test_damaged_bytes_are_refused() -> None:
    blob = compile_grammar('%start s %% s: "a";').grammar.to_bytes()
    for wrong in (b"", blob[:40], blob[:-1], b"X" + blob[1:]):
        with pytest.raises(ValueError):
            CompiledGrammar.from_bytes(wrong)
    for place in range(64, len(blob), 7):
        with pytest.raises(ValueError, match="damaged"):
            CompiledGrammar.from_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])
    with pytest.raises(ValueError, match="version 9; this code reads version 3"):
        CompiledGrammar.from_bytes(blob[:4] + b"\x09" + blob[5:])


def test_the_lexer_never_comes_back_to_its_start(grammar: CompiledGrammar) -> None:
    assert grammar.lexer_start not in grammar.transitions
    assert grammar.accepted[grammar.lexer_start] == -1


def test_a_lexer_state_is_dead_exactly_when_nothing_is_reachable(grammar: CompiledGrammar) -> None:
    assert [not terminals for terminals in grammar.reachable].index(True) == 0
    assert sum(not terminals for terminals in grammar.reachable) == 1


def test_viable_is_what_can_be_pushed(grammar: CompiledGrammar) -> None:
    """Checks up to 400 stacks that the parser can reach."""
    parser = Parser(grammar)
    stacks = [parser.start]
    seen = set(stacks)
    for stack in stacks:
        pushed = 0
        for terminal in range(grammar.num_terminals):
            after = parser.push(stack, terminal)
            pushed |= (after is not None) << terminal
            if after is not None and terminal and after not in seen and len(seen) < 400:
                seen.add(after)
                stacks.append(after)
        assert parser.viable(stack) == pushed


def test_a_lexeme_rule_is_one_terminal() -> None:
    text = '%start s %% s: s OP N | N; OP: "+" | "-"; N: "/0/" | "/[1-9][0-9]*/";'
    grammar = compile_grammar(text).grammar
    assert grammar.terminals == ("the end of the text", "SKIP", "OP", "N")
    assert grammar.nonterminals == ("the whole text", "s")
    assert set_bits(Parser(grammar).viable(Parser.start)) == [3]


def test_the_same_grammar_gives_the_same_bytes() -> None:
    text = library.grammar("json")
    assert compile_grammar(text).grammar.to_bytes() == compile_grammar(text).grammar.to_bytes()
