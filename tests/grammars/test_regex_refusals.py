"""A construct that no automaton can match is refused, and the error has its name and position. A
pattern that grows too large is refused within the bounds."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tokenbus.grammars.regex import RegexError, compile_choice, compile_lexer, compile_regex
from tokenbus.grammars.regex.compile import Lexeme


@pytest.mark.parametrize(
    ("pattern", "name", "position"),
    [
        (r"(a)b\1", r"back-reference \1", 4),
        (r"(?P<n>a)(?P=n)", "back-reference (?P=n)", 8),
        ("ab(?=c)d", "look-ahead '(?=c)'", 2),
        ("ab(?!c)d", "look-ahead '(?!c)'", 2),
        ("x(?!)", "look-ahead '(?!)'", 1),
        ("(?<=a)b", "look-behind '(?<=a)'", 0),
        ("a(?<!a)b", "look-behind '(?<!a)'", 1),
        ("(a)?(?(1)b|c)", "conditional group '(?(1)b|c)'", 4),
        ("x(?>ab)c", "atomic group '(?>ab)'", 1),
        ("xa++", "possessive repetition 'a++'", 1),
        ("(?:ab)*+c", "possessive repetition '(?:ab)*+'", 0),
        ("a{1,2}+", "possessive repetition 'a{1,2}+'", 0),
        (r"a\bc", r"word boundary \b", 1),
        (r"a\B", r"word boundary \B", 1),
        ("a^b", "anchor ^", 1),
        ("(a|b^)c", "anchor ^", 4),
        ("a$b", "anchor $", 1),
        (r"a\Ab", r"anchor \A", 1),
        (r"a\Zb", r"anchor \Z", 1),
        ("(?:^a)+", "anchor ^", 3),
        ("(a$)*", "anchor $", 2),
        (r"x\p{L}", r"\p{...}", 1),
        (r"[\P{Lu}]", r"\p{...}", 1),
        ("(?x) a # (?=b)\n  (?# c )(?=d)", "look-ahead '(?=d)'", 24),
        ("é漢(?=c)", "look-ahead '(?=c)'", 2),
    ],
)
def test_a_refused_construct_is_named_with_its_place(
    pattern: str, name: str, position: int
) -> None:
    with pytest.raises(RegexError) as error:
        compile_regex(pattern)
    assert name in error.value.message
    assert error.value.position == position
    assert error.value.pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "position"),
    [
        ("a(b", 1),
        ("a)", 1),
        ("[a", 0),
        ("*a", 0),
        ("a**", 2),
        (r"a\q", 1),
        ("(?z)a", 1),
        ("a\\", 1),
    ],
)
def test_what_is_no_regular_expression_is_placed(pattern: str, position: int) -> None:
    with pytest.raises(RegexError) as error:
        compile_regex(pattern)
    assert abs((error.value.position or 0) - position) <= 1


@pytest.mark.parametrize(
    ("pattern", "part", "position"),
    [
        (r"[^\s\S]", r"[^\s\S]", 0),
        (r"a(b|c[^\w\W])[^\d\D]+", r"[^\d\D]", 13),
        ("ab\ud800", "\ud800", 2),
        (r"x(?:[^\s\S]|\ud800a)", r"(?:[^\s\S]|\ud800a)", 1),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(pattern: str, part: str, position: int) -> None:
    with pytest.raises(RegexError, match="the language is empty") as error:
        compile_regex(pattern)
    assert error.value.message.endswith(repr(part))
    assert error.value.position == position


def test_a_branch_that_matches_nothing_is_no_error_beside_one_that_does() -> None:
    assert compile_regex(r"a|b[^\s\S]c*|(?:[^\d\D])*") == compile_regex("a?")


EXPLOSIONS = [
    ("foo(a|b)*a(a|b){20}bar", "'(a|b)*a(a|b){20}'", 3),
    ("x{3}(?:x{1000}){1000}y", "'(?:x{1000}){1000}'", 4),
    (r"id: (?P<name>\w{1,200});", r"'\\w{1,200}'", 13),
    ("(x|y)(?:hello(?P<n>[ab]*a[ab]{16})world|z)", "'(?P<n>[ab]*a[ab]{16})'", 13),
    ("(a{1,200}){1,200}", "'(a{1,200}){1,200}'", 0),
    (".*a.{30}|b", "'.*a.{30}'", 0),
    ("x|" + "(?:" * 60 + "[ab]*a[ab]{25}" + ")" * 60, "'(?:(?:", 2),
]


@pytest.mark.parametrize(("pattern", "part", "position"), EXPLOSIONS)
def test_what_grows_too_large_is_named(pattern: str, part: str, position: int) -> None:
    with pytest.raises(RegexError) as error:
        compile_regex(pattern, max_seconds=600)  # The limit on states is reached sooner.
    assert part in error.value.message
    assert error.value.position == position


def test_what_grows_as_a_whole_is_named_within_the_time() -> None:
    """Each part of the pattern is small, so the search for the part at fault runs out of time."""
    with pytest.raises(RegexError, match=r"the part 'a\?a\?") as error:
        compile_regex("a?" * 20_000)
    assert error.value.position == 0


def test_time_bounds_what_states_do_not() -> None:
    with pytest.raises(RegexError, match=r"takes longer than 0\.16 s: the part .*a\[ab\]\{40\}'"):
        compile_regex("c[ab]*a[ab]{40}", max_states=10**9, max_seconds=0.2)


def test_unicode_categories_in_what_grew_are_pointed_out() -> None:
    with pytest.raises(RegexError, match=r"\(\?a\) restricts to ASCII"):
        compile_regex(r"\w{200}")
    assert compile_regex(r"(?a)\w{200}").num_states == 202


def test_a_pattern_of_ten_megabytes_is_refused_before_it_is_read() -> None:
    with pytest.raises(RegexError, match="10,000,000 characters; at most 200,000") as error:
        compile_regex("a" * 10_000_000, max_seconds=0.0)
    assert len(str(error.value)) < 300
    with pytest.raises(RegexError, match="10,000,000"):
        compile_lexer([Lexeme("A", "a" * 10_000_000, False)])
    with pytest.raises(RegexError, match="10,000,000"):
        compile_choice(["a" * 10_000_000])


@pytest.mark.parametrize(
    "pattern",
    ["a" * 200_000, "[" + "ab" * 99_000 + "]", "(" * 99_000 + ")" * 99_000, "(?:" * 60_000],
)
def test_the_longest_patterns_are_compiled_or_refused(pattern: str) -> None:
    with suppress(RegexError):
        compile_regex(pattern, max_seconds=1.0)


@pytest.mark.parametrize("levels", [*range(100, 500, 25), 2000, 20_000])
def test_deep_groups_are_compiled_or_refused(levels: int) -> None:
    pattern = "(?:x" * levels + ")*" * levels
    for compiled in (
        lambda: compile_regex(pattern),
        lambda: compile_lexer([Lexeme("A", pattern, False), Lexeme("b", "b", True)]),
    ):
        try:
            assert compiled().accepts(b"x" * levels)
        except RegexError as error:
            assert "nested too deeply" in error.message  # noqa: PT017
            assert levels > 100


def test_no_text_to_choose_from_is_an_error() -> None:
    with pytest.raises(RegexError, match="must have at least 1"):
        compile_choice([])
