"""Every mask of the grammar backend equals the mask by brute force, which tries each token's bytes
in Python's ``re``, or in AICI's lexer and an Earley parser. Neither uses the backend's tables."""

from __future__ import annotations

import re
from contextlib import closing
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.yacc import compile_grammar
from tokenbus.workers.controller.backends.grammar.grammar_instance import COMPLETE

from tests.grammars.patterns import LETTERS, PATTERNS, texts_over

from ....counts import examples
from .grammar_cases import (
    Case,
    Lexed,
    Lexeme,
    Matches,
    grammar_cases,
    raw_vocabulary,
    regex_cases,
    written,
)
from .grammars import Oracle, guest_of, look, walk

MANY = settings(
    max_examples=examples(20),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def compare(case: Case) -> None:
    """Compares the masks of a case: with a new instance, again with this instance, and with another
    instance that begins with the memory of the first one."""
    oracle = Oracle(case)
    with closing(guest_of(case.vocabulary, case.tables)) as guest:
        texts = walk(guest, oracle)
        found = guest.found
        assert walk(guest, oracle) == texts
        assert guest.found == found
        memory = guest.memory()
    with closing(guest_of(case.vocabulary, case.tables, memory)) as later:
        assert walk(later, oracle) == texts
        assert later.found == found


@MANY
@given(regex_cases())
def test_every_mask_of_a_regex_is_what_re_says_of_each_token(case: Case) -> None:
    compare(case)


@MANY
@given(grammar_cases())
def test_every_mask_of_a_grammar_is_what_earley_says_of_each_token(case: Case) -> None:
    compare(case)


@pytest.mark.parametrize("declared", [False, True])
def test_a_language_of_brackets_names_and_comments_has_exact_masks(declared: bool) -> None:
    """A grammar with parts that hypothesis may miss: names that begin like keywords, a keyword with
    a space in it, nesting, and tokens of up to five lexemes."""
    rules = {"S": [("S", "c"), ("c",)], "A": [("a", "A", "a"), ("b",)]}
    rules["S"] += [("S", "A"), ("A",)]
    lexemes = {"a": Lexeme("a b", True), "b": Lexeme("b", True), "c": Lexeme("[ab][ab]+", False)}
    tokens = [b"a", b"b", b" ", b"", b"a b", b" b ", b"b b a", b"ab a ", b" a b ", b"b a b", b"ba"]
    case = Case(
        "brackets",
        (
            compiled := compile_grammar(written(rules, lexemes, " +", declared=declared))
        ).grammar.to_bytes(),
        raw_vocabulary(tokens, (3,)),
        Lexed(rules, lexemes, " +", "ab ", 10, declared),
        5,
    )
    assert not compiled.conflicts
    compare(case)


@pytest.mark.parametrize("declared", [False, True])
def test_lexemes_that_differ_in_length_and_begin_with_newlines_have_exact_masks(
    declared: bool,
) -> None:
    """As in AICI's C grammar, a directive begins with the newline before it. The terminal of type
    names comes after the terminal of names, which matches type names too."""
    rules = {"S": [("S", "n", "e"), ("S", "t", "e"), ("n", "e"), ("t", "e")]}
    lexemes = {
        "n": Lexeme("[ab]+", False),
        "e": Lexeme("ba", True),
        "t": Lexeme("[ab]*[b][b]", False),
    }
    skip = "\n(?:ab*a)?"
    source = written(rules, lexemes, skip, declared=declared)
    compiled = compile_grammar(source)
    assert bool(compiled.warnings) == declared
    tokens = [b"", b"a", b"b", b"\n", b"b\nb", b"bb", b"abb", b"a\n", b"\nba", b"\nab", b"b\nba"]
    reference = Lexed(rules, lexemes, skip, "ab\n", 9, declared)
    compare(Case(source, compiled.grammar.to_bytes(), raw_vocabulary(tokens), reference, 5))


@pytest.mark.parametrize(
    ("source", "pattern", "letters"),
    [
        # ``<`` is not associative. A second ``<`` is refused after two reductions.
        ('%start e %nonassoc "<" %% e: t; t: e "<" e | "x";', "x(?:<x)?", "x<"),
        ('%start s %% s: "a" | s "b" "a";', "a(?:ba)*", "ab"),
        ('%start s %% s: "a" s | "b";', "a*b", "ab"),
        ('%start s %% s: o "a" o; o: %empty | "b";', "b?ab?", "ab"),
        ('%start s %% s: N ";" | s N ";"; N: "/[ab]+/";', "(?:[ab]+;)+", "ab;"),
        ('%start s %% s: s "a" | %empty; SKIP: "/b+/";', "[ab]*", "ab"),
    ],
)
def test_a_grammar_of_a_regular_language_has_the_masks_of_re(
    source: str, pattern: str, letters: str
) -> None:
    pieces = [text.encode() for text in texts_over(letters, 3)]
    case = Case(
        source,
        compile_grammar(source).grammar.to_bytes(),
        raw_vocabulary([b"", *pieces]),
        Matches(pattern, letters, 8),
        5,
    )
    compare(case)


@MANY
@given(regex_cases() | grammar_cases(), st.data())
def test_append_takes_tokens_up_to_the_first_that_cannot_follow(
    case: Case, data: st.DataObject
) -> None:
    oracle = Oracle(case)
    vocabulary = case.vocabulary
    with closing(guest_of(vocabulary, case.tables)) as guest:
        place = guest.start()
        text = b""
        while len(text) <= case.depth:
            likely = sorted(oracle.expected(text).tokens) or [0]
            number = st.sampled_from(likely) | st.integers(0, vocabulary.size + 1)
            tokens = data.draw(st.lists(number, min_size=1, max_size=4))
            taken = 0
            for token in tokens:
                if len(text) > case.depth or not oracle.fits(text, token):
                    break
                text += vocabulary.token(token)
                taken += 1
            # The reference cannot answer for longer texts.
            asked = tokens[:taken] if len(text) > case.depth else tokens
            assert guest.append(place, asked) == taken
            if len(text) <= case.depth:
                assert look(guest, place) == oracle.expected(text)
            if taken < len(tokens):
                break


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_what_re_matches_can_be_written_however_it_is_split(data: st.DataObject) -> None:
    pattern = data.draw(PATTERNS)
    text = data.draw(st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) < 20))
    assume(re.fullmatch(pattern, text) and not any("\ud800" <= c <= "\udfff" for c in text))
    whole = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)) | {0, len(whole)})
    parts = [whole[one:other] for one, other in pairwise(cuts)]
    others = [letter.encode() for letter in LETTERS] + [bytes((b,)) for b in range(256)]
    vocabulary = raw_vocabulary([b"", *parts, *others])
    with closing(guest_of(vocabulary, compile_regex(pattern).to_bytes())) as guest:
        place = guest.start()
        for count, part in enumerate(parts):
            _, allowed = look(guest, place)
            numbers = [n for n in range(vocabulary.size) if vocabulary.token(n) == part]
            assert allowed >= set(numbers)
            assert guest.append(place, [numbers[-1]]) == 1
            before = b"".join(parts[: count + 1])
            if before.decode(errors="ignore").encode() == before:
                is_match = re.fullmatch(pattern, before.decode()) is not None
                flags, allowed = look(guest, place)
                assert bool(flags & COMPLETE) == (0 in allowed) == is_match


@given(PATTERNS, st.randoms(use_true_random=False))
def test_what_tokens_write_is_complete_exactly_where_re_matches_it(
    pattern: str, random: Random
) -> None:
    letters = [letter.encode() for letter in LETTERS]
    tokens = [b"", *letters, *(one + other for one in letters[:6] for other in letters[:6])]
    vocabulary = raw_vocabulary([*tokens, *(one[:-1] for one in letters if len(one) > 1)])
    with closing(guest_of(vocabulary, compile_regex(pattern).to_bytes())) as guest:
        place = guest.start()
        text = b""
        for _ in range(8):
            flags, allowed = look(guest, place)
            if text.decode(errors="ignore").encode() == text:
                is_match = re.fullmatch(pattern, text.decode()) is not None
                assert bool(flags & COMPLETE) == (0 in allowed) == is_match
            else:
                assert not flags & COMPLETE
            if not allowed - {0}:
                break
            number = random.choice(sorted(allowed - {0}))
            assert guest.append(place, [number]) == 1
            text += vocabulary.token(number)
