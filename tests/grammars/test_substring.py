"""The automaton of a text accepts exactly the text's substrings. Texts that are too long are
refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenbus.grammars.regex import Dfa, compile_choice
from tokenbus.grammars.substring import (
    MAX_STATES,
    MAX_TEXT_BYTES,
    SubstringError,
    compile_substring,
)

from tests.grammars.patterns import LETTERS, prefixes
from tests.grammars.test_regex import spelled
from tests.grammars.test_regex_tables import is_trim, kinds

TEXTS = (
    st.text(st.sampled_from(LETTERS), max_size=30)
    | st.text("ab", max_size=40)
    # Characters that share their first bytes in UTF-8, or the bytes after the first ones.
    | st.text("aéèÉ漢漣\u0800\u0820\U0001f600\U0001f601\U0010f600", max_size=30)
    | st.text(max_size=20)
)


def substrings(text: str) -> set[str]:
    return {text[at:end] for at in range(len(text) + 1) for end in range(at, len(text) + 1)}


@given(TEXTS)
@example("")
@example("abbb")
@example("\u0800\u0800\u0820")
def test_it_accepts_each_substring_and_nothing_else(text: str) -> None:
    found = spelled(compile_substring(text))
    assert len(found) == len(set(found))
    assert set(found) == {one.encode() for one in substrings(text)}


@given(TEXTS)
def test_a_byte_is_allowed_exactly_where_a_substring_goes_on(text: str) -> None:
    automaton = compile_substring(text)
    assert is_trim(automaton)
    begun = prefixes(list(substrings(text)))
    for one in begun:
        state = automaton.walk(one)
        allowed = {byte for byte in range(256) if automaton.step(state, byte)}
        assert allowed == {byte for byte in range(256) if one + bytes((byte,)) in begun}


@given(TEXTS)
def test_its_table_is_read_back_and_is_small(text: str) -> None:
    automaton = compile_substring(text)
    assert Dfa.from_bytes(automaton.to_bytes()) == automaton
    assert automaton.num_states <= max(2 * len(text.encode()), 3)
    assert automaton.num_classes == len(set(text.encode())) + 1


@given(st.text("abcdé", min_size=1, max_size=40))
def test_it_is_the_smallest_where_the_end_of_the_text_stands_nowhere_else(text: str) -> None:
    automaton = compile_substring(text + "!")
    assert kinds(list(automaton.accepting), automaton) == automaton.num_states
    every = compile_choice(sorted(substrings(text + "!")))
    assert automaton.num_states == every.num_states


def test_a_substring_begins_and_ends_between_characters() -> None:
    automaton = compile_substring("x漢y")
    first, second, third = "漢".encode()
    assert automaton.step(automaton.start, first)
    assert not automaton.step(automaton.start, second)
    assert not automaton.step(automaton.start, third)
    assert automaton.is_live(automaton.walk(bytes((first, second))))
    assert not automaton.accepts(bytes((first, second)))
    assert automaton.accepts(bytes((first, second, third)))


def test_the_longest_texts_fit_where_their_states_do() -> None:
    words = random.Random(5)
    # This text has the most states: each byte except the first ones adds two.
    worst = compile_substring("a" + "b" * (MAX_STATES // 2 - 2) + "c")
    assert worst.num_states == 2 * (MAX_STATES // 2) - 1
    assert compile_substring("a" * (MAX_STATES - 2)).num_states == MAX_STATES
    anything = "".join(words.choices("ab", k=MAX_STATES // 2))
    assert compile_substring(anything).accepts(anything[999:31_000].encode())


def test_more_states_than_a_guest_can_number_are_refused_by_size() -> None:
    with pytest.raises(SubstringError) as refused:
        compile_substring("a" * (MAX_STATES - 1))
    assert str(refused.value).startswith(
        "the text of 65,534 bytes needs more than 65,535 states; its first 65,533 bytes fit, "
        "and so does every text of at most 32,767 bytes (text 'aaa"
    )


def test_a_text_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(SubstringError, match="has 65,538 bytes; at most 65,536 are allowed"):
        compile_substring("é" * (MAX_TEXT_BYTES // 2 + 1))


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(SubstringError, match="a lone surrogate at character 2,"):
        compile_substring("ab\ud800c")
