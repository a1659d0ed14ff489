"""A compiled pattern accepts the UTF-8 of a text exactly if ``re.fullmatch`` matches the text."""

from __future__ import annotations

import functools
import re
import sys
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenbus.grammars.regex import Dfa, compile_choice, compile_regex
from tokenbus.grammars.regex.bounds import Budget
from tokenbus.grammars.regex.positions import spelled_out
from tokenbus.grammars.regex.tree import tree_of

from tests.grammars.patterns import PATTERNS, TEXTS, narrow_patterns, prefixes, texts_over

EVERY = "".join(map(chr, [*range(0xD800), *range(0xE000, sys.maxunicode + 1)]))


def spelled(dfa: Dfa) -> list[bytes]:
    """All byte strings that an automaton without cycles accepts."""
    found = []
    pending = [(dfa.start, b"")]
    after = functools.cache(
        lambda state: [(to, bytes((byte,))) for byte in range(256) if (to := dfa.step(state, byte))]
    )
    while pending:
        state, text = pending.pop()
        if dfa.accepting[state]:
            found.append(text)
        pending += [(target, text + byte) for target, byte in after(state)]
    return found


def count(dfa: Dfa) -> int:
    """The number of byte strings that an automaton without cycles accepts."""
    ways = {0: 0}

    def of(state: int) -> int:
        if state not in ways:
            after = sum(of(dfa.step(state, byte)) for byte in range(256))
            ways[state] = dfa.accepting[state] + after
        return ways[state]

    return of(dfa.start)


@given(PATTERNS, st.lists(TEXTS, min_size=1, max_size=8))
@example("(?i)[^k]", ["K", "\u212a", "k", "s"])
@example("(?:a?)*?b", ["b", "aab"])
@example("(?i)\u0130|[^\u0130]", ["i", "\u0130", "I", "\u0131"])
@example("(?a)(?u:\\w)\\w", ["éa", "aé"])
@example("(?s:.).", ["\n\n", "\na"])
def test_a_match_is_what_re_matches_whole(pattern: str, texts: list[str]) -> None:
    automaton = compile_regex(pattern)
    for text in texts:
        expected = re.fullmatch(pattern, text) is not None
        assert automaton.accepts(text.encode()) == expected, (pattern, text)


@given(st.data())
def test_what_re_matches_at_random_is_accepted(data: st.DataObject) -> None:
    pattern = data.draw(PATTERNS)
    text = data.draw(st.from_regex(pattern, fullmatch=True))
    if re.fullmatch(pattern, text) and not any("\ud800" <= char <= "\udfff" for char in text):
        automaton = compile_regex(pattern)
        assert automaton.accepts(text.encode())
        assert all(automaton.walk(prefix) for prefix in prefixes([text]))


@pytest.mark.parametrize("letters", ["ab", "é\u00ea漢", "a\U0001f600\U0001f601"])
def test_a_prefix_is_live_exactly_where_some_text_goes_on_from_it(letters: str) -> None:
    longest_prefix = 2

    @given(narrow_patterns(letters))
    def judge(pattern: str) -> None:
        # A shortest path to a match passes each position of the pattern at most once.
        positions = spelled_out(tree_of(pattern, Budget(1000, 5)))
        assume(positions <= (7 if len(letters) == 2 else 4))
        automaton = compile_regex(pattern)
        every = texts_over(letters, longest_prefix + positions)
        matched = prefixes([text for text in every if re.fullmatch(pattern, text)])
        for prefix in prefixes(texts_over(letters, longest_prefix)):
            assert automaton.is_live(automaton.walk(prefix)) == (prefix in matched), prefix

    judge()


@pytest.mark.parametrize("name", ["w", "d", "s"])
def test_a_category_has_the_characters_that_re_gives_it(name: str) -> None:
    expected = re.findall(rf"\{name}", EVERY)
    found = spelled(compile_regex(rf"\{name}"))
    assert sorted(found) == [char.encode() for char in expected]
    assert count(compile_regex(rf"\{name.upper()}")) == len(EVERY) - len(expected)
    inside = compile_regex(rf"(?a)[^\{name}]")
    assert count(inside) == len(re.findall(rf"(?a)[^\{name}]", EVERY))


def test_any_character_is_valid_utf_8_and_nothing_else() -> None:
    automaton = compile_regex("(?s).")
    assert count(automaton) == len(EVERY)
    assert count(compile_regex(".")) == len(EVERY) - 1
    edges = [0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF]
    for code in [*edges, 0x10000, 0x3FFFF, 0x40000, 0xFFFFF, 0x100000, 0x10FFFF]:
        assert automaton.accepts(chr(code).encode())
    surrogates = [b"\xed\xa0\x80", b"\xed\xbf\xbf"]
    overlong = [b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xf0\x8f\xbf\xbf"]
    beyond = [b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\x80"]
    for wrong in [*surrogates, *overlong, *beyond]:
        assert not automaton.accepts(wrong)
        assert not automaton.is_live(automaton.walk(wrong))


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF)), max_size=4))
def test_a_class_of_ranges_has_every_character_between_their_ends(
    pairs: list[tuple[int, int]],
) -> None:
    ranges = [(min(pair), max(pair)) for pair in pairs]
    body = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
    automaton = compile_regex(f"[\\x00{body}]")

    def is_inside(code: int) -> bool:
        return code == 0 or any(low <= code <= high for low, high in ranges)

    cuts = sorted({0, 1, 0xD800, 0xE000} | {cut for low, high in ranges for cut in (low, high + 1)})
    pieces = [
        end - begin
        for begin, end in pairwise(cuts)
        if is_inside(begin) and not 0xD800 <= begin < 0xE000
    ]
    assert count(automaton) == sum(pieces)
    for code in {end + step for pair in ranges for end in pair for step in (-1, 0, 1)}:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            assert automaton.accepts(chr(code).encode()) == is_inside(code)


def test_a_letter_in_any_case_matches_what_re_matches() -> None:
    cased = [char for char in EVERY if len({char, char.lower(), char.upper(), char.title()}) > 1]
    some = "".join(cased)
    for char in [*cased[::7], *"iIkKsSµ\u0130\u0131\u017f\u212a\u03c2\u1e9eß\u1fbe\u0345"]:
        for pattern in (f"(?i){char}", f"(?i)[{char}-{char}]", f"(?ai){char}"):
            expected = re.findall(pattern, some)
            assert sorted(spelled(compile_regex(pattern))) == [one.encode() for one in expected]


@pytest.mark.parametrize(
    "patterns",
    [
        ["(a|b)*", "[ab]*", "(a*b*)*", "(?:a|b)*?", "(?P<name>a|b)*", "^[ab]*$", r"\A(a|b)*\Z"],
        ["a{2,4}", "aaa?a?", "a{1}a(a{0,2})", "(?x) a{2} # two\n a{,2}", "(aa|aaa|aaaa)$"],
        ["(?i)ab", "[aA][bB]", "(?i:a)(?i:B)", "(?i:a(?-i:b|B))"],
        ["^(a|^b)$", "a|b", "(?:a$|b)", "(?m)^(?:a|b)$", "(^a)?(^b)?(?<!x)"[:0] + "[ab]"],
        ["", "()", "a{0}", "^$", "(?:)*"],
        [
            r"[\u00e9-\u00eb]",
            "é|ê|ë",
            r"[\xe9\xea\xeb]",
            r"\N{LATIN SMALL LETTER E WITH ACUTE}|[êë]",
        ],
        [r"\.\*\[\\", r"[.][*]\x5b\\", re.escape(".*[\\")],
    ],
)
def test_the_same_language_gives_the_same_table(patterns: list[str]) -> None:
    first, *others = map(compile_regex, patterns)
    for pattern, other in zip(patterns[1:], others, strict=True):
        assert other == first, pattern


@given(st.lists(TEXTS, min_size=1, max_size=6))
def test_a_choice_of_texts_is_the_pattern_of_their_escapes(texts: list[str]) -> None:
    assert compile_choice(texts) == compile_regex("|".join(map(re.escape, texts)))
