"""The lexer follows one of two rule sets: AICI's, which is the default, or ``%lexer declared``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.grammars.yacc import (
    CompiledGrammar,
    GrammarError,
    Recognizer,
    check_text,
    compile_grammar,
)

AICI_C = Path(__file__).parent / "samples" / "aici"


def compiled(rules: str, *, declared: bool = False) -> CompiledGrammar:
    directive = "%lexer declared " if declared else ""
    return compile_grammar(f"%start s {directive}%% {rules}").grammar


def lexeme_of(grammar: CompiledGrammar, text: str) -> str:
    """The terminal that matches the whole text, or an empty string if no terminal matches."""
    state = grammar.lexer_start
    for byte in text.encode():
        state = grammar.transitions[state * grammar.num_classes + grammar.classes[byte]]
    terminal = grammar.accepted[state]
    return grammar.terminals[terminal] if terminal >= 0 else ""


# --- which lexeme wins ----------------------------------------------------------------------------

NAMES = 's: NAME | TYPE "t" | s ";" s; NAME: "/[a-z_]+/"; TYPE: "/[a-z_]+_t/";'


def test_of_two_regexes_the_one_written_with_more_characters_wins_wherever_it_stands() -> None:
    for rules in (NAMES, 's: TYPE | NAME; TYPE: "/[a-z_]+_t/"; NAME: "/[a-z_]+/";'):
        assert lexeme_of(compiled(rules), "size_t") == "TYPE"
        assert lexeme_of(compiled(rules), "size") == "NAME"


def test_under_declared_the_first_regex_wins_however_long_it_is() -> None:
    assert lexeme_of(compiled(NAMES, declared=True), "size_t") == "NAME"
    rules = 's: TYPE | NAME; TYPE: "/[ab]/"; NAME: "/[a-z][a-z]*/";'
    assert lexeme_of(compiled(rules, declared=True), "a") == "TYPE"
    assert lexeme_of(compiled(rules), "a") == "NAME"


def test_of_two_regexes_as_long_the_first_wins() -> None:
    rules = 's: A "1" | B "2"; A: "/[a-c]/"; B: "/[b-d]/";'
    for declared in (False, True):
        assert lexeme_of(compiled(rules, declared=declared), "b") == "A"
        assert lexeme_of(compiled(rules, declared=declared), "d") == "B"


def test_a_keyword_wins_over_every_regex_however_long_that_is() -> None:
    rules = 's: NAME | "if" "x"; NAME: "/[a-z][a-z][a-z]*|[a-z]/"; SKIP: " ";'
    for declared in (False, True):
        assert lexeme_of(compiled(rules, declared=declared), "if") == '"if"'
        assert lexeme_of(compiled(rules, declared=declared), "ifs") == "NAME"


def test_what_counts_is_the_pattern_as_written_escapes_and_all() -> None:
    # Both regexes match the same texts, and B is written with more characters.
    rules = r's: A | B; A: "/[a]|[b]/"; B: "/\x61|\x62/";'
    assert lexeme_of(compiled(rules), "a") == "B"
    # A character beyond ASCII counts as the number of its bytes in UTF-8.
    assert lexeme_of(compiled('s: A | B; A: "/[xé]z/"; B: "/[xyz]z/";'), "xz") == "A"
    assert lexeme_of(compiled('s: A | B; A: "/[xé]z/"; B: "/[wxyz]z/";'), "xz") == "B"


def test_skip_competes_by_the_same_rule() -> None:
    rules = 's: WORD; SKIP: "/#.*/"; WORD: "/#[a-z]+|[a-z]+/";'
    assert lexeme_of(compiled(rules), "#a") == "WORD"
    assert lexeme_of(compiled(rules, declared=True), "#a") == "SKIP"


@pytest.mark.parametrize("declared", [False, True])
def test_a_reserved_regex_wins_over_others_that_are_longer(declared: bool) -> None:
    rules = 'NAME: "/[a-z]+[a-z]*/"; s: NAME;'
    directive = "%lexer declared " if declared else ""
    text = f'%start s {directive}%reserved "/(?i:for)/" %% {rules}'
    assert lexeme_of(compile_grammar(text).grammar, "for") == "a reserved word"
    assert lexeme_of(compile_grammar(text).grammar, "fort") == "NAME"


@given(st.permutations(["[ab]+", "[abc]+", "a+", "[ab]+a", "b|a", "a(a|b)*"]), st.booleans())
def test_the_winner_is_the_longest_or_the_first_of_all_that_match(
    patterns: list[str], declared: bool
) -> None:
    rules = " ".join(f'L{at}: "/{one}/";' for at, one in enumerate(patterns))
    alternatives = " | ".join(f"L{at}" for at in range(len(patterns)))
    grammar = compiled(f"s: {alternatives}; {rules}", declared=declared)
    for text in ("a", "b", "aa", "ab", "ba", "abc", "aba", "c"):
        letters = set(text)
        matching = [
            at
            for at, one in enumerate(patterns)
            if {
                "[ab]+": letters <= {"a", "b"},
                "[abc]+": True,
                "a+": letters == {"a"},
                "[ab]+a": letters <= {"a", "b"} and len(text) > 1 and text[-1] == "a",
                "b|a": text in ("a", "b"),
                "a(a|b)*": letters <= {"a", "b"} and text[0] == "a",
            }[one]
        ]
        longest = max(len(patterns[at]) for at in matching)
        wins = matching[0]
        if not declared:
            wins = next(at for at in matching if len(patterns[at]) == longest)
        assert lexeme_of(grammar, text) == f"L{wins}"


# --- the newline before a text --------------------------------------------------------------------

LINES = r's: %empty | s "x"; SKIP: "/\n#.*/" | "/\n? */";'


def test_a_lexeme_that_begins_with_a_newline_matches_at_the_start_of_a_text_without_it() -> None:
    for text in (b"#a\nx", b"\n#a\nx", b"x\n#a", b"#", b"", b" x", b"\nx", b"x"):
        assert check_text(compiled(LINES), text) is None, text
    refusal = check_text(compiled(LINES), b"x#a")
    assert refusal is not None
    assert refusal.offset == 1
    # The implied newline and the blank are one lexeme, so no newline stands directly before ``#``.
    assert check_text(compiled(LINES), b" #a") is not None


def test_under_declared_a_text_begins_with_its_first_byte() -> None:
    grammar = compiled(LINES, declared=True)
    refusal = check_text(grammar, b"#a\nx")
    assert refusal is not None
    assert refusal.offset == 0
    assert check_text(grammar, b"\n#a\nx") is None
    assert grammar.lexer_first == grammar.lexer_start


def test_a_newline_that_is_a_lexeme_of_the_parser_is_the_first_of_the_text() -> None:
    rules = r's: NL WORD | s NL WORD; NL: "/\n/"; WORD: "/[a-z]+/";'
    assert check_text(compiled(rules), b"a\nb") is None
    assert check_text(compiled(rules), b"\na") is not None
    assert check_text(compiled(rules, declared=True), b"\na") is None
    assert check_text(compiled(rules, declared=True), b"a") is not None


def test_no_newline_is_read_where_no_text_could_begin_with_one() -> None:
    for rules, text in (
        ('s: "x"; SKIP: "/ +/";', b" x"),
        (r's: "x" NL | s "x" NL; NL: "/\n/";', b"x\nx\n"),
    ):
        grammar = compiled(rules)
        assert grammar.lexer_first == grammar.lexer_start
        assert check_text(grammar, text) is None


def test_a_text_that_is_empty_is_complete_where_the_newline_alone_is_skipped() -> None:
    assert check_text(compiled(LINES), b"") is None
    # Here the implied newline begins a lexeme, but does not complete it.
    assert check_text(compiled(r's: %empty | s "x"; SKIP: "/\n#.*/";'), b"") is not None


def test_an_anchor_knows_nothing_of_the_newline() -> None:
    rules = r's: WORD; WORD: "/^[a-z]+/"; SKIP: "/\n| /";'
    for text in (b"a", b" a", b"\na"):
        assert check_text(compiled(rules), text) is None


def test_what_may_come_first_is_named_as_if_nothing_was_read() -> None:
    refusal = check_text(compiled(LINES), b"?")
    assert str(refusal) == (
        "line 1, column 1: '?' cannot follow; expected \"x\", the end of the text"
    )


# --- warnings and errors --------------------------------------------------------------------------


def warnings(rules: str, *, declared: bool = False) -> tuple[str, ...]:
    directive = "%lexer declared\n" if declared else "\n"
    return compile_grammar(f"%start s {directive}%%\n{rules}").warnings


def test_a_lexeme_that_never_matches_is_a_warning_under_the_rules_in_force() -> None:
    rules = "s: A | B;\nA: '/[a-z]+/';\nB: '/[a-f]+/';"
    [warning] = warnings(rules, declared=True)
    assert warning.startswith("line 5, column 4: B can never match: all its texts match A too,")
    assert "the one that comes first" in warning
    # Both regexes have the same length, so the first one also wins under AICI's rules.
    [warning] = warnings(rules)
    assert "B can never match" in warning
    assert "written with more characters" in warning
    assert warnings("s: A | B;\nA: '/[a-z]+/';\nB: '/[a-f][a-f]*/';") == ()
    [warning] = warnings("s: A | B;\nA: '/[a-z]/';\nB: '/[a-z]+/';\n")
    assert warning.startswith("line 4, column 4: A can never match: all its texts match B too,")


def test_a_newline_that_keeps_texts_from_beginning_is_a_warning() -> None:
    [warning] = warnings(r's: W | s W; W: "/[a-z]+/"; SKIP: "/\n#.*/";')
    assert warning.startswith("a text can only begin with the rest of SKIP after a newline")
    assert warnings(r's: W | s W; W: "/[a-z]+/"; SKIP: "/\n#.*/";', declared=True) == ()
    assert warnings(LINES) == ()


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("%start s %lexer %%", 17, "expected 'declared' after %lexer, found '%%'"),
        ("%start s %lexer aici %%", 17, "expected 'declared' after %lexer, found 'aici'"),
        ("%lexer declared %lexer declared %%", 17, "%lexer is given a second time"),
    ],
)
def test_a_wrong_lexer_directive_is_refused(text: str, column: int, message: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(text)
    assert (caught.value.message, caught.value.column) == (message, column)


# --- a C grammar in the style of AICI -------------------------------------------------------------


def test_a_grammar_of_c_that_needs_both_rules_takes_a_c_file() -> None:
    text = (AICI_C / "c.y").read_text()
    sample = (AICI_C / "words.c").read_bytes()
    compilation = compile_grammar(text)
    assert compilation.warnings == compilation.conflicts == ()
    assert check_text(compilation.grammar, sample) is None
    declared = compile_grammar(text.replace("%start file", "%start file %lexer declared"))
    [warning] = declared.warnings
    assert "TYPE_NAME can never match" in warning
    refusal = check_text(declared.grammar, sample)
    assert refusal is not None
    assert refusal.offset == 0


def test_a_name_becomes_a_type_with_its_last_letter() -> None:
    grammar = compile_grammar((AICI_C / "c.y").read_text()).grammar
    recognizer = Recognizer(grammar)
    assert recognizer.read(b"size_") == 5
    assert not recognizer.byte(ord(" "))
    assert recognizer.byte(ord("t"))
    assert recognizer.byte(ord(" "))
    assert recognizer.read(b"size;") == 5
    assert recognizer.complete


PUBLISHED = r"""%start translation_unit
%%

SKIP
    : "//\*[^*]*\*+([^/*][^*]*\*+)*//"  // block comment
    | "///.*/"                          // line comment
    | "/\n[ \t\v\f]*#(.*\\\n)*.*/"      // pre-processor
    | "/\n?[ \t\v\f]*/"                 // white-space
    ;

IDENTIFIER: "/[a-zA-Z_][0-9a-zA-Z_]*/" ;

CONSTANT
        : "/0[xX][0-9a-fA-F]+[uUlL]*?/"
        | "/0[0-9]+[uUlL]*?/"
        ;

STRING_LITERAL: '/"(\\.|[^\\"])*"/' ;

primary_expression
    : IDENTIFIER
    | CONSTANT
    | STRING_LITERAL
    | "(" expression ")"
    ;

// ...

enum_specifier
    : "enum" "{" enumerator_list "}"
    | "enum" IDENTIFIER "{" enumerator_list "}"
    | "enum" IDENTIFIER
    ;

// ...

translation_unit
    : external_declaration
    | translation_unit external_declaration
    ;
"""
"""The unchanged fragment of a C grammar in AICI's README."""
MISSING = """
expression: primary_expression ;
enumerator_list: IDENTIFIER | enumerator_list "," IDENTIFIER ;
external_declaration: enum_specifier ";" | expression ";" ;
"""
"""The rules that the fragment leaves out."""


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        (b'#define A \\\n 1\nenum e { a, b };\n/* c */ ("x\\"y"); // d\n0x1FuL;\n012;', None),
        (b"enumerate;", None),
        (b"enum enum;", 9),
        (b"enum { a b };", 9),
    ],
)
def test_the_published_fragment_of_c_compiles_and_takes_its_texts(
    text: bytes, offset: int | None
) -> None:
    compilation = compile_grammar(PUBLISHED + MISSING)
    assert compilation.conflicts == ()
    refusal = check_text(compilation.grammar, text)
    assert (None if refusal is None else refusal.offset) == offset


def test_a_regex_may_have_both_quotes_if_one_is_escaped() -> None:
    for rule in (r"""s: "/a\"b'/";""", r"""s: '/a"b\'/';"""):
        grammar = compile_grammar("%start s %%\n" + rule).grammar
        assert check_text(grammar, b"a\"b'") is None
