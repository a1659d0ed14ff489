"""Precedences resolve conflicts of a grammar. Yacc's rules resolve the other conflicts, and each of
these is reported with an example."""

from __future__ import annotations

import pytest
from tokenbus.grammars.yacc import CompiledGrammar, Parser, check_text, compile_grammar
from tokenbus.grammars.yacc.tables import REDUCE

IF = '%start s %% s: "if" "x" s | "if" "x" s "else" s | "go";SKIP: " ";'


def bracketed(grammar: CompiledGrammar, text: str) -> str:
    """Shows how the parser groups a text of one-character lexemes, with a pair of brackets for each
    production of several symbols."""
    names = {name.strip('"'): number for number, name in enumerate(grammar.terminals)}
    parser = Parser(grammar)
    stack = parser.start
    values = [""]
    for character in [*text, "the end of the text"]:
        terminal = names[character]
        while True:
            action = grammar.actions[stack[-1] * grammar.num_terminals + terminal]
            if action & 3 != REDUCE:
                break
            length = grammar.length[action >> 2]
            taken = values[len(values) - length :]
            values[len(values) - length :] = [f"({''.join(taken)})" if length > 1 else taken[0]]
            rest = stack[: len(stack) - length]
            goto = grammar.gotos[rest[-1] * grammar.num_nonterminals + grammar.lhs[action >> 2]]
            stack = (*rest, goto)
        if terminal:
            following = parser.push(stack, terminal)
            assert following is not None
            stack = following
            values.append(character)
    return values[-1]


OPERATORS = """
%start e
%nonassoc "<"
%left "+" "-"
%left "*"
%right SIGN
%right "^"
%%
e: e "<" e | e "+" e | e "-" e | e "*" e | e "^" e | "-" e %prec SIGN | "1";
"""


@pytest.mark.parametrize(
    ("text", "grouped"),
    [
        ("1+1*1", "(1+(1*1))"),
        ("1*1+1", "((1*1)+1)"),
        ("1-1-1", "((1-1)-1)"),
        ("1^1^1", "(1^(1^1))"),
        ("-1^1", "(-(1^1))"),
        ("-1*1", "((-1)*1)"),
        ("1^-1+1", "((1^(-1))+1)"),
        ("1+1<1*1", "((1+1)<(1*1))"),
    ],
)
def test_precedence_and_associativity_decide_as_in_yacc(text: str, grouped: str) -> None:
    compilation = compile_grammar(OPERATORS)
    assert compilation.conflicts == ()
    assert bracketed(compilation.grammar, text) == grouped


def test_what_is_not_associative_does_not_stand_twice() -> None:
    grammar = compile_grammar(OPERATORS).grammar
    assert check_text(grammar, b"1<1") is None
    refusal = check_text(grammar, b"1<1<1")
    assert refusal is not None
    assert refusal.offset == 3


def test_a_shift_goes_before_a_reduction_and_is_reported_with_an_example() -> None:
    compilation = compile_grammar(IF)
    (conflict,) = compilation.conflicts
    assert conflict.kind == "shift/reduce"
    assert conflict.terminal == '"else"'
    assert conflict.example == '"if" "x" "if" "x" "go" • "else"'
    assert conflict.kept == "read on"
    assert conflict.dropped == 'reduce by `s: "if" "x" s`'
    assert check_text(compilation.grammar, b"if x if x go else go else go") is None


def test_the_earlier_rule_goes_first_and_is_reported_with_an_example() -> None:
    compilation = compile_grammar('%start s %% s: "(" a "." | "(" b "." | b "!"; a: "x"; b: "x";')
    (conflict,) = compilation.conflicts
    assert conflict.kind == "reduce/reduce"
    assert conflict.example == '"(" "x" • "."'
    assert (conflict.kept, conflict.dropped) == ('reduce by `a: "x"`', 'reduce by `b: "x"`')
    assert str(conflict) == (
        'reduce/reduce conflict at "." after `"(" "x" • "."`: the parser chooses to reduce by '
        '`a: "x"`, not to reduce by `b: "x"`'
    )


def test_an_example_follows_the_lookahead_and_not_only_the_states() -> None:
    # `a y` is the shortest text that leads to the state, but "z" is a conflict only after `b b y`.
    text = '%start s %% s: "a" t "q" | "b" "b" t "z"; t: "y" | "y" u; u: "z" | %empty;'
    examples = [conflict.example for conflict in compile_grammar(text).conflicts]
    assert all(example.startswith(('"a" "y"', '"b" "b" "y"')) for example in examples)
    assert '"b" "b" "y" • "z"' in examples


def test_an_example_of_a_grammar_with_very_long_texts_is_cut() -> None:
    doubling = "".join(f"r{i}: r{i + 1} r{i + 1};" for i in range(40)) + 'r40: "x";'
    compilation = compile_grammar(f'%start s %% s: r0 s "e" s | r0 s | "e";{doubling}')
    assert compilation.conflicts
    assert all(len(conflict.example) < 2000 for conflict in compilation.conflicts)
    assert any("…" in conflict.example for conflict in compilation.conflicts)


def test_a_prec_without_conflict_changes_nothing() -> None:
    text = '%start s %left A %% s: "x" %prec A | s "y";'
    assert compile_grammar(text).conflicts == ()


def test_a_rule_of_lexemes_does_not_hide_the_precedence_of_the_lexeme_before_it() -> None:
    text = '%start s %left "+" %% s: s "+" N s | "x"; N: "/[0-9]+/" | "/[A-F]+/";'
    assert compile_grammar(text).conflicts == ()
