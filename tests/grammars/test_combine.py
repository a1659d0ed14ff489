"""A combination of automata accepts exactly the texts that its parts form.

Its table equals the table of the pattern that accepts the same texts.
"""

from __future__ import annotations

import re
from functools import reduce
from itertools import product

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tokenbus.grammars.combine import (
    CombinationError,
    alternation,
    repetition,
    sequence,
    stop_at,
)
from tokenbus.grammars.combine.operations import MAX_STOP_BYTES
from tokenbus.grammars.regex import Dfa, compile_choice, compile_regex
from tokenbus.grammars.substring import compile_substring

from tests.grammars.patterns import TEXTS, narrow_patterns, texts_over
from tests.grammars.test_regex_tables import is_trim, kinds

LETTERS = "aé"
"""A letter of one byte and a letter of two bytes."""
PATTERNS = narrow_patterns(LETTERS)
SOME = st.lists(PATTERNS, min_size=1, max_size=4)
SHORT = texts_over(LETTERS, 6)
COUNTS = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)).filter(
    lambda counts: counts[1] is None or counts[0] <= counts[1]
)


def taken(automaton: Dfa, texts: list[str] = SHORT) -> set[str]:
    return {text for text in texts if automaton.accepts(text.encode())}


def matched(pattern: str) -> set[str]:
    return {text for text in SHORT if re.fullmatch(pattern, text)}


def is_well_formed(automaton: Dfa) -> bool:
    return is_trim(automaton) and Dfa.from_bytes(automaton.to_bytes()) == automaton


@given(SOME)
def test_a_sequence_takes_a_text_of_each_part_and_has_the_table_of_its_pattern(
    patterns: list[str],
) -> None:
    automaton = sequence([compile_regex(one) for one in patterns])
    whole = "".join(f"(?:{one})" for one in patterns)
    assert taken(automaton) == matched(whole)
    assert automaton == compile_regex(whole)
    assert is_well_formed(automaton)


@given(SOME)
def test_an_alternation_takes_a_text_of_any_part_and_has_the_table_of_its_pattern(
    patterns: list[str],
) -> None:
    automaton = alternation([compile_regex(one) for one in patterns])
    whole = "|".join(f"(?:{one})" for one in patterns)
    assert taken(automaton) == matched(whole)
    assert automaton == compile_regex(whole)
    assert is_well_formed(automaton)


@given(PATTERNS, COUNTS)
@example("(?:a?é?)", (2, 3))
@example("(?:aé|a|é)", (2, 3))
@example("a*", (3, None))
@example("(?:aa|a)", (3, None))
def test_a_repetition_takes_its_counts_of_texts_and_has_the_table_of_its_pattern(
    pattern: str, counts: tuple[int, int | None]
) -> None:
    least, most = counts
    automaton = repetition(compile_regex(pattern), least, most)
    whole = f"(?:{pattern}){{{least},{'' if most is None else most}}}"
    assert taken(automaton) == matched(whole)
    assert automaton == compile_regex(whole)
    assert is_well_formed(automaton)


@given(PATTERNS, st.text(LETTERS, min_size=1, max_size=3))
@example("[aé]*", "aa")
@example("[aé]*", "aéa")
@example("(?:aa)*", "a")
def test_a_text_that_stops_is_of_the_part_and_ends_with_its_first_stop(
    pattern: str, stop: str
) -> None:
    wanted = {text for text in matched(pattern) if text.find(stop) == len(text) - len(stop) >= 0}
    try:
        automaton = stop_at(compile_regex(pattern), stop)
    except CombinationError:
        # The only possible error: no text of the part has its first stop at its end.
        assert not wanted
        return
    assert taken(automaton) == wanted
    assert is_well_formed(automaton)
    assume(automaton.num_states < 100)
    assert kinds(list(automaton.accepting), automaton) == automaton.num_states


@given(TEXTS.filter(bool), st.lists(TEXTS, max_size=4))
def test_any_text_may_come_before_a_stop(stop: str, texts: list[str]) -> None:
    automaton = stop_at(None, stop)
    for text in (stop.join(texts), stop.join(texts) + stop, *(one + stop for one in texts)):
        assert automaton.accepts(text.encode()) == (text.find(stop) == len(text) - len(stop) >= 0)
    assert automaton.accepts("\U0010ffff\0".encode() + stop.encode())
    assert not automaton.is_live(automaton.walk(b"\xff"))
    assert not automaton.is_live(automaton.walk(stop.encode() + b"a"))


def test_a_stop_that_overlaps_itself_ends_the_text_the_first_time() -> None:
    automaton = stop_at(None, "aba")
    assert automaton.accepts(b"xababa"[:4])
    assert not automaton.accepts(b"xababa")
    assert automaton.accepts(b"abcabba" + b"ba")


def test_a_stop_may_follow_a_part_that_does_not_have_it() -> None:
    line = compile_regex(".*")
    with pytest.raises(CombinationError, match=r"never end with their first '\\n'"):
        stop_at(line, "\n")
    ended = stop_at(sequence([line, compile_choice(["\n"])]), "\n")
    assert ended == compile_regex(".*\n")


@given(st.text(LETTERS, max_size=6), st.text(LETTERS, max_size=6), st.integers(1, 3))
def test_substrings_combine_as_any_part_does(one: str, other: str, most: int) -> None:
    def pieces(text: str) -> set[str]:
        return {text[at:end] for at in range(len(text) + 1) for end in range(at, len(text) + 1)}

    both = sequence([compile_substring(one), compile_substring(other)])
    assert taken(both) == {a + b for a, b in product(pieces(one), pieces(other))} & set(SHORT)
    either = alternation([compile_substring(one), compile_substring(other)])
    assert taken(either) == (pieces(one) | pieces(other)) & set(SHORT)
    several = repetition(compile_substring(one), 1, most)
    wanted = reduce(
        lambda made, _: {a + b for a in made for b in pieces(one)}, range(most - 1), pieces(one)
    )
    assert taken(several) == wanted & set(SHORT)


@given(PATTERNS, PATTERNS, PATTERNS)
def test_a_combination_is_a_part_of_another(one: str, other: str, third: str) -> None:
    inner = alternation([compile_regex(one), compile_regex(other)])
    nested = sequence([repetition(inner, 1, None), compile_regex(third)])
    assert nested == compile_regex(f"(?:(?:{one})|(?:{other}))+(?:{third})")


def test_quoted_pieces_of_a_text() -> None:
    text = "the quick brown fox"
    line = sequence([compile_regex('- "'), compile_substring(text), compile_regex('"\n')])
    answer = repetition(line, 1, 3)
    assert answer.accepts(b'- "quick"\n- "the q"\n')
    assert not answer.accepts(b'- "fast"\n')
    assert not answer.accepts(b'- "q"\n' * 4)
    assert not answer.is_live(answer.walk(b'- "quick f'))


def test_a_large_combination_that_is_not_minimised_is_right() -> None:
    word = repetition(compile_regex(r"\w"), 1, 20)
    assert word.num_states == compile_regex(r"\w{1,20}").num_states
    ended = stop_at(word, "漢")
    assert is_trim(ended)
    texts = ["漢", "a" * 19 + "漢", "a" * 20 + "漢", "éa漢", "漢漢", "a", "漢" * 20, "-漢"]
    assert taken(ended, texts) == {"漢", "a" * 19 + "漢", "éa漢"}


def test_without_a_part_there_is_nothing_to_combine() -> None:
    with pytest.raises(CombinationError, match="the sequence has 0 parts; expected at least 1"):
        sequence([])
    with pytest.raises(CombinationError, match="the alternation has 0 parts; expected at least 1"):
        alternation([])


def test_counts_that_cannot_be_are_refused() -> None:
    part = compile_regex("a")
    assert repetition(part, 0, 0) == compile_regex("")
    with pytest.raises(CombinationError, match="cannot repeat a part 3 to 2 times: the counts"):
        repetition(part, 3, 2)
    with pytest.raises(CombinationError, match="cannot repeat a part -1 times or more"):
        repetition(part, -1, None)
    with pytest.raises(CombinationError, match="0 to 1,000,000 times: at most 65,535 times"):
        repetition(part, 0, 1_000_000)


def test_stops_that_cannot_be_are_refused() -> None:
    for stop in ("", "é" * (MAX_STOP_BYTES // 2 + 1)):
        with pytest.raises(CombinationError, match="1 to 1,024 are allowed"):
            stop_at(None, stop)
    with pytest.raises(CombinationError, match="a lone surrogate"):
        stop_at(None, "\ud800")
    assert stop_at(None, "é" * (MAX_STOP_BYTES // 2)).accepts(b"a" + "é".encode() * 512)


def test_a_combination_that_explodes_names_the_part_that_grew() -> None:
    parts = [compile_regex("x"), compile_regex("[ab]*a"), compile_regex("[ab]{20}")]
    with pytest.raises(CombinationError) as refused:
        sequence(parts, max_states=2_000)
    assert str(refused.value) == (
        "the sequence needs more than 2,000 states: part 3 of 3, which alone has 22 states, needs "
        "the most"
    )
    with pytest.raises(CombinationError) as refused:
        repetition(compile_regex("abc"), 1, 100, max_states=200)
    assert str(refused.value) == (
        "the repetition, 1 to 100 times, needs more than 200 states: its part alone has 5 states"
    )


def test_the_seconds_are_bounded() -> None:
    parts = [compile_regex("(?s).*a"), compile_regex("(?s).{30}")]
    with pytest.raises(CombinationError, match=r"the sequence takes longer than 0\.05 s: part 2"):
        sequence(parts, max_seconds=0.05)
    with pytest.raises(CombinationError, match=r"up to the stop 'end' takes longer than 0 s"):
        stop_at(compile_regex(r"\w+"), "end", max_seconds=0)
