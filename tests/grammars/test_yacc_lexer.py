"""The lexer takes the longest match, prefers keywords and allows SKIP between all lexemes. A text
is refused at its first wrong byte."""

from __future__ import annotations

import pytest
from tokenbus.grammars.yacc import (
    CompiledGrammar,
    Recognizer,
    check_text,
    compile_grammar,
)

DECLARATIONS = r"""
%start declarations
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
    | "/[0-9]+[uUlL]*?/"
    ;
STRING_LITERAL: '/"(\\.|[^\\"])*"/' ;
declarations: declaration | declarations declaration ;
declaration
    : "int" IDENTIFIER ";"
    | "int" IDENTIFIER "=" value ";"
    ;
value: CONSTANT | STRING_LITERAL | IDENTIFIER ;
"""


@pytest.fixture(scope="module")
def declarations() -> CompiledGrammar:
    return compile_grammar(DECLARATIONS).grammar


def refused_at(grammar: CompiledGrammar, text: str) -> int | None:
    """The offset in bytes at which a text is refused, or None if it is a sentence."""
    refusal = check_text(grammar, text.encode())
    return None if refusal is None else refusal.offset


@pytest.mark.parametrize(
    "text",
    [
        "int x;",
        "int interest;",
        'int x = "a\\"b";int y=0x1Ful;',
        "  int x;",
        "int x;  \n",
        "/* first */int/**/x//last\n;",
        "int x;// no line end",
        "\n#define A \\\n  b\nint x;",
        "#define A\nint x;",
        "int x; /* a * b ** c */",
    ],
)
def test_a_sentence_is_taken(declarations: CompiledGrammar, text: str) -> None:
    assert refused_at(declarations, text) is None


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("int 123456;", 4),
        ("int int;", 7),
        ("intx;", 3),
        ("int x y;", 6),
        ("int x = ;", 8),
        ("int x = 0x;", 10),
        ("int x = 12ab;", 10),
        ("int x /", 7),
        ("int x / 2;", 7),
        ("int x = 'a';", 8),
        ("int x; #define A", 7),
    ],
)
def test_a_wrong_text_is_refused_at_its_first_wrong_byte(
    declarations: CompiledGrammar, text: str, offset: int
) -> None:
    assert refused_at(declarations, text) == offset


def test_the_1_of_int_123456_is_not_allowed(declarations: CompiledGrammar) -> None:
    recognizer = Recognizer(declarations)
    recognizer.read(b"int ")
    allowed = recognizer.allowed_bytes()
    assert b"1" not in allowed
    assert not recognizer.byte(ord("1"))
    # Only a name, a comment, white space or a directive may follow.
    names = bytes(range(ord("a"), ord("z") + 1)) + bytes(range(ord("A"), ord("Z") + 1)) + b"_"
    assert set(allowed) == set(names + b"/\n \t\v\f")


def test_a_keyword_that_begins_a_name_may_become_the_name(declarations: CompiledGrammar) -> None:
    recognizer = Recognizer(declarations)
    assert recognizer.read(b"int int") == 7
    # `int` is a keyword and not a name, so only the rest of a longer name can follow.
    assert b";" not in recognizer.allowed_bytes()
    assert b" " not in recognizer.allowed_bytes()
    assert recognizer.read(b"eger;") == 5
    assert recognizer.complete


def test_keywords_go_before_regexes_wherever_they_stand() -> None:
    grammar = compile_grammar('%start s %% s: NAME "x" | "if" "y"; NAME: "/[a-z]+/"; SKIP: " ";')
    assert check_text(grammar.grammar, b"if y") is None
    assert check_text(grammar.grammar, b"if x") is not None
    assert check_text(grammar.grammar, b"ifs x") is None


def test_the_longest_match_goes_back_one_byte_and_no_further() -> None:
    # AICI's lexer goes back at most one byte. In `1..`, only the second dot shows that the number
    # has no fraction. The number `1` ends two bytes earlier.
    grammar = compile_grammar(r'%start s %% s: N | N ".." N; N: "/[0-9]+(\.[0-9]+)?/";').grammar
    assert check_text(grammar, b"1.5..2") is None
    refusal = check_text(grammar, b"1..2")
    assert refusal is not None
    assert refusal.offset == 2


def test_only_skip_is_no_sentence(declarations: CompiledGrammar) -> None:
    recognizer = Recognizer(declarations)
    assert not recognizer.complete
    recognizer.read(b" /* nothing */ ")
    assert not recognizer.complete


def test_an_empty_text_is_a_sentence_where_the_grammar_says_so() -> None:
    grammar = compile_grammar('%start s %% s: %empty | s "a"; SKIP: "/ */";').grammar
    for text in (b"", b" ", b"a", b" a a "):
        assert check_text(grammar, text) is None


def test_a_text_may_end_inside_skip_only_where_skip_is_whole(
    declarations: CompiledGrammar,
) -> None:
    recognizer = Recognizer(declarations)
    recognizer.read(b"int x; /* open")
    assert not recognizer.complete
    recognizer.read(b" */")
    assert recognizer.complete


def test_characters_of_several_bytes_are_split_anywhere() -> None:
    grammar = compile_grammar(
        '%start s %% s: "größe" NAME; NAME: "/[\u03b1-\u03c9]+/"; SKIP: " ";'
    ).grammar
    recognizer = Recognizer(grammar)
    for byte in "größe αβγ".encode():
        assert byte in recognizer.allowed_bytes()
        assert recognizer.byte(byte)
    assert recognizer.complete
    recognizer.byte("δ".encode()[0])
    assert not recognizer.complete


def test_reserved_words_are_no_names() -> None:
    text = '%start s %reserved "for" "while" %% s: NAME; NAME: "/[a-z]+/";'
    grammar = compile_grammar(text).grammar
    assert check_text(grammar, b"fort") is None
    refusal = check_text(grammar, b"for")
    assert refusal is not None
    assert refusal.offset == 3


def test_a_refused_byte_changes_nothing(declarations: CompiledGrammar) -> None:
    recognizer = Recognizer(declarations)
    recognizer.read(b"int x")
    before = recognizer.allowed_bytes()
    assert not recognizer.byte(ord("?"))
    assert recognizer.allowed_bytes() == before
    assert recognizer.read(b";") == 1
    assert recognizer.complete


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int\n  5", "line 2, column 3: '5' cannot follow; expected IDENTIFIER"),
        ("int ä", "line 1, column 5: 'ä' cannot follow; expected IDENTIFIER"),
        ("int x", 'line 1, column 6: the text ends here; expected ";", "="'),
        (
            'int x = "ä";5',
            "line 1, column 13: '5' cannot follow; expected \"int\", the end of the text",
        ),
        ('int x = "a', "line 1, column 11: the text ends here; expected STRING_LITERAL"),
    ],
)
def test_a_refusal_says_where_and_what_was_expected(
    declarations: CompiledGrammar, text: str, message: str
) -> None:
    assert str(check_text(declarations, text.encode())) == message
