"""The error for a wrong grammar has the line and the column of the fault, and names the fault. A
grammar that is too large is refused within the bounds."""

from __future__ import annotations

import pytest
from tokenbus.grammars.yacc import GrammarError, compile_grammar

HEAD = "%start s\n%%\n"

WRONG: list[tuple[str, int, int, str]] = [
    ("", 1, 1, "expected one of %start"),
    (
        "s: 'a';",
        1,
        1,
        "expected one of %start, %left, %right, %nonassoc, %reserved, %lexer or %%, found 's'",
    ),
    ("%%\ns: 'a';", 1, 1, "missing '%start RULE' before %%"),
    ("%start\n%%", 2, 1, "expected the name of the start rule, found '%%'"),
    ("%start s\n%start t\n%%", 2, 1, "%start is given a second time"),
    ("%start s\n%token A\n%%", 2, 1, "found '%token'; lexemes are not declared"),
    ("%start s\n%left\n%%", 3, 1, "expected a lexeme or a name, found '%%'"),
    ("%start s\n%reserved x\n%%", 2, 11, "expected a lexeme in quotes, found 'x'"),
    ("%start s\n%left 'a' 'b' 'a'\n%%\ns: 'a' 'b';", 2, 15, "'a' is given a second precedence"),
    (HEAD, 3, 1, "expected a rule, found the end of the grammar"),
    (HEAD + "s 'a';", 3, 3, "expected ':' after 's', found 'a'"),
    (HEAD + "s: 'a'", 3, 7, "expected a lexeme, a rule, '|' or ';' in rule 's', found the end"),
    (HEAD + "s: 'a'\nt: 'b';", 4, 2, "expected ';' before the rule 't', found ':'"),
    (HEAD + "s: 'a\n;", 3, 4, "the quote ' is not closed on its line"),
    (HEAD + "s: '';", 3, 4, "the keyword is empty; write %empty for the empty text"),
    (HEAD + "s: 'a\\q';", 3, 6, "unknown escape \\q in a keyword"),
    (HEAD + "s: 'a' { act(); };", 3, 8, "actions in braces are not supported"),
    (HEAD + "s: 'a' /* never closed", 3, 8, "the comment '/*' is not closed with '*/'"),
    (HEAD + "s: 'a' + 'b';", 3, 8, "unexpected character '+'"),
    (HEAD + "s: 'a' %empty;", 3, 8, "%empty must be the only symbol of its alternative"),
    (HEAD + "s: 'a' %prec;", 3, 13, "expected a lexeme or a name after %prec, found ';'"),
    (HEAD + "s: 'a' %prec X;", 3, 14, "'X' has no %left, %right or %nonassoc"),
    (HEAD + "s: 'a' t;", 3, 8, "the rule 't' is not defined"),
    ("%start t\n%%\ns: 'a';", 1, 8, "the start rule 't' is not defined"),
    (HEAD + "s: 'a';\ns: 'b';", 4, 1, "the rule 's' is defined a second time"),
    (HEAD + "s: 'a';\nt: s 'b';", 4, 4, "the rule 't' is never used by the start rule"),
    (HEAD + "s: 'a';\nT: 'b';", 4, 4, "the rule 'T' is never used by the start rule"),
    (HEAD + "s: 'a' SKIP;\nSKIP: ' ';", 3, 8, "'SKIP' is used in a rule"),
    (HEAD + "s: 'a';\nSKIP: 'a';", 4, 7, '"a" is in SKIP, and is used in a rule as well'),
    (HEAD + "s: 'a';\nSKIP: ' ' s;", 4, 7, "an alternative of SKIP must be one lexeme"),
    ("%start s\n%reserved 'a'\n%%\ns: 'a';", 2, 11, '"a" is reserved, and is used in a rule'),
    ("%start s\n%left t\n%%\ns: t s | 'a';\nt: 'b' | s;", 2, 7, "only lexemes have a precedence"),
    (HEAD + "s: s 'a';", 3, 4, "'s' derives no finite text, so the language is empty"),
    (HEAD + "s: 'a' | t;\nt: 'b' u;\nu: t;", 4, 4, "'t' derives no finite text: each of its"),
    (HEAD + "s: s | 'a';", 3, 4, "'s' can derive exactly itself"),
    (HEAD + "s: 'a' | t;\nt: n t n;\nn: ;", 4, 4, "'t' derives no finite text"),
    (HEAD + "s: 'a' | t;\nt: n t n | 'b';\nn: ;", 4, 4, "'t' can derive exactly itself"),
    (HEAD + "s: A;\nA: '/[a-/';", 4, 6, ""),
    (HEAD + r"s: A; A: '/(b)\1/';", 3, 15, ""),
    (HEAD + "s: 'x' A;\nA: '/[a-z]*/';", 4, 4, "A matches the empty text"),
]


@pytest.mark.parametrize(("text", "line", "column", "message"), WRONG)
def test_a_wrong_grammar_is_refused_with_its_place(
    text: str, line: int, column: int, message: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(text)
    assert message in caught.value.message
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"line {line}, column {column}: ")


def test_an_empty_rule_before_itself_is_refused_when_it_would_be_reduced_without_end() -> None:
    text = "%start s\n%nonassoc 'x'\n%nonassoc HIGH\n%%\ns: n s 'y' | 'x';\nn: %empty %prec HIGH;"
    with pytest.raises(GrammarError) as caught:
        compile_grammar(text)
    assert "'n: %empty' would be reduced forever before \"x\"" in caught.value.message
    assert caught.value.line == 6


NO_LIMIT_S = 3600.0
"""A time limit that no test reaches, in seconds, so that a grammar is refused for its size."""


def refused(text: str, max_seconds: float = NO_LIMIT_S) -> str:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(text, max_seconds=max_seconds)
    return caught.value.message


def test_a_grammar_of_ten_megabytes_is_refused_before_it_is_read() -> None:
    text = HEAD + "s: 'a';\n" + "// more\n" * (10 * 1024 * 1024 // 8)
    assert "at most 1,048,576 are allowed" in refused(text, 0.0)


def test_a_grammar_of_very_many_rules_is_refused_before_tables_are_made() -> None:
    rules = "".join(f"r{i}: r{i + 1} 'a' | 'b';\n" for i in range(8_200))
    text = f"%start r0\n%%\n{rules}r8200: 'c';\n"
    assert "alternatives; at most 16,384 are allowed" in refused(text, 0.0)


def test_an_alternative_of_very_many_symbols_is_refused_before_tables_are_made() -> None:
    text = HEAD + "s: " + "'a' " * 4_100 + ";"
    assert "symbols in one alternative; at most 4,096" in refused(text, 0.0)


def test_a_grammar_with_too_large_tables_is_refused() -> None:
    rules = "".join(f"r{i}: r{i + 1} 'a' | 'b';\n" for i in range(7_000))
    text = f"%start r0\n%%\n{rules}r7000: 'c';\n"
    assert "entries (14,003 states); at most 8,388,608" in refused(text)


def test_a_grammar_whose_states_explode_is_refused() -> None:
    # Only the last lexeme shows which rule `w0`, `w1`, … the text follows. So a state contains the
    # set of all rules that are still possible.
    ways = 40
    rules = [f"s: {' | '.join(f'w{i}' for i in range(ways))};"]
    for i in range(ways):
        steps = " | ".join(f'"{j}." w{i}' for j in range(ways) if j != i)
        rules.append(f'w{i}: {steps} | "end{i}";')
    text = HEAD + "\n".join(rules)
    assert "needs more than 16,384 states" in refused(text)
    assert "compiling takes too long: 1 states so far" in refused(text, 0.0)


def test_a_regex_that_explodes_is_refused_by_its_place() -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(HEAD + "s: 'x'\n A; A: '/(a|b)*a(a|b){30}/';", max_seconds=3)
    assert caught.value.line == 4
