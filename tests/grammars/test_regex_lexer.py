"""After each text, a lexer's automaton reports the lexemes that match, the preferred lexeme, and
the lexemes that the text or a continuation of the text can become."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenbus.grammars.regex import Lexeme, LexerDfa, RegexError, compile_lexer
from tokenbus.grammars.regex.bounds import Budget
from tokenbus.grammars.regex.positions import spelled_out
from tokenbus.grammars.regex.tree import tree_of

from tests.grammars.patterns import PATTERNS, TEXTS, narrow_patterns, prefixes, texts_over


def source(lexeme: Lexeme) -> str:
    """The pattern of a lexeme for Python's re."""
    return re.escape(lexeme.pattern) if lexeme.literal else lexeme.pattern


def matching(lexemes: list[Lexeme], text: str) -> list[int]:
    """The indices of the lexemes that match the whole text according to Python's re, the preferred
    lexeme first."""
    found = [at for at, one in enumerate(lexemes) if re.fullmatch(source(one), text)]
    return sorted(found, key=lambda at: not lexemes[at].literal)


def bits(numbers: list[int]) -> int:
    return sum(1 << number for number in numbers)


PLAIN = st.builds(Lexeme, st.just("p"), PATTERNS, st.just(False))
LITERAL = st.builds(Lexeme, st.just("l"), TEXTS, st.just(True))


@given(st.lists(PLAIN | LITERAL, min_size=1, max_size=4), st.lists(TEXTS, min_size=1, max_size=6))
def test_a_text_is_the_lexemes_that_re_matches(lexemes: list[Lexeme], texts: list[str]) -> None:
    lexer = compile_lexer(lexemes)
    literals = [lexeme.pattern for lexeme in lexemes if lexeme.literal]
    for text in [*texts, *literals]:
        expected = matching(lexemes, text)
        state = lexer.walk(text.encode())
        assert lexer.accepts_all[state] == bits(expected)
        assert lexer.accepted[state] == (expected[0] if expected else -1)
        assert lexer.accepts(text.encode()) == bool(expected)


@given(st.lists(st.tuples(narrow_patterns("ab"), st.booleans()), min_size=2, max_size=3))
def test_a_lexeme_is_reachable_exactly_where_some_text_goes_on_to_it(
    some: list[tuple[str, bool]],
) -> None:
    lexemes = [
        Lexeme(str(at), re.sub("[^ab]", "", pattern) if literal else pattern, literal)
        for at, (pattern, literal) in enumerate(some)
    ]
    sizes = [spelled_out(tree_of(source(one), Budget(1000, 5))) for one in lexemes]
    assume(sum(sizes) <= 8)
    lexer = compile_lexer(lexemes)
    every = texts_over("ab", 2 + 8)
    match = {text: matching(lexemes, text) for text in every}
    wins = [
        prefixes([text for text in every if match[text][:1] == [at]]) for at in range(len(some))
    ]
    can = [prefixes([text for text in every if at in match[text]]) for at in range(len(some))]
    before = lexer.reaching(lexer.accepts_all)
    for prefix in prefixes(texts_over("ab", 2)):
        state = lexer.walk(prefix)
        assert lexer.reachable[state] == bits([at for at, one in enumerate(wins) if prefix in one])
        assert before[state] == bits([at for at, one in enumerate(can) if prefix in one])


@pytest.fixture(scope="module")
def language() -> LexerDfa:
    return compile_lexer(
        [
            Lexeme("NAME", "[a-z]+", False),
            Lexeme("int", "int", True),
            Lexeme("NUMBER", "[0-9]+", False),
            Lexeme("SHORT", "[a-z]", False),
            Lexeme("plus", "+", True),
        ]
    )


def test_a_keyword_is_preferred_to_a_pattern_and_an_earlier_pattern_to_a_later(
    language: LexerDfa,
) -> None:
    lexeme = {
        text: language.accepted[language.walk(text)] for text in (b"int", b"i", b"intx", b"7")
    }
    assert lexeme == {b"int": 1, b"i": 0, b"intx": 0, b"7": 2}
    assert language.accepts_all[language.walk(b"int")] == bits([0, 1])
    assert language.accepts_all[language.walk(b"i")] == bits([0, 3])


def test_what_can_follow_leaves_out_what_another_lexeme_always_takes(language: LexerDfa) -> None:
    assert language.reachable[language.start] == bits([0, 1, 2, 4])
    assert language.reachable[language.walk(b"in")] == bits([0, 1])
    assert language.reachable[language.walk(b"inx")] == bits([0])
    assert language.reachable[language.walk(b"1")] == bits([2])
    assert language.reachable[0] == 0
    assert language.reaching(language.accepts_all)[language.start] == bits([0, 1, 2, 3, 4])


def test_a_literal_is_taken_as_it_is() -> None:
    lexer = compile_lexer([Lexeme("dots", ".*", True), Lexeme("É", "É\U0001f600", True)])
    assert lexer.accepts(b".*")
    assert lexer.accepts("É\U0001f600".encode())
    assert not lexer.accepts(b"ab")


@pytest.mark.parametrize(
    ("wrong", "said", "position"),
    [
        (Lexeme("BAD", "a(?=b)", False), "lexeme BAD: the look-ahead .* is not supported", 1),
        (Lexeme("BAD", "[^\\s\\S]", False), "lexeme BAD: the language is empty", 0),
        (Lexeme("BAD", "x(a", False), "lexeme BAD: missing \\)", 1),
        (Lexeme("BAD", "a\ud800", True), "lexeme BAD: U\\+D800 is a surrogate", 1),
        (Lexeme("BAD", "x(a|b)*a(a|b){30}y", False), "lexeme BAD: the part '\\(a\\|b\\)\\*a", 1),
    ],
)
def test_the_error_names_the_lexeme_at_fault(wrong: Lexeme, said: str, position: int) -> None:
    with pytest.raises(RegexError, match=said) as error:
        compile_lexer([Lexeme("A", "a+", False), wrong, Lexeme("b", "b", True)])
    assert error.value.pattern == wrong.pattern
    assert error.value.position == position
