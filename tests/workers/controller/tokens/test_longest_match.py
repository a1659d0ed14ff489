"""A text is divided into tokens by longest match, if the vocabulary can write it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.tokens.longest_match import LongestMatch


def test_the_longest_token_is_taken_from_each_place_on() -> None:
    match = LongestMatch([b"", b"a", b"ab", b"abc", b"b", b"c"])
    assert match(b"abcaba") == [3, 2, 1]
    assert match(b"") == []


def test_of_tokens_with_the_same_bytes_the_last_is_taken() -> None:
    assert LongestMatch([b"a", b"b", b"a"])(b"ab") == [2, 1]


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=6),
    st.text("ab", max_size=14),
)
def test_a_way_is_found_wherever_there_is_one(tokens: list[str], text: str) -> None:
    match = LongestMatch([token.encode() for token in tokens])
    if re.fullmatch(f"({'|'.join(tokens)})*", text):
        assert "".join(tokens[number] for number in match(text.encode())) == text
    else:
        with pytest.raises(ControllerError, match="the model's vocabulary does not have a token"):
            match(text.encode())


def test_a_text_with_many_ways_that_end_nowhere_takes_no_longer() -> None:
    match = LongestMatch([b"a" * length for length in range(1, 20)])
    with pytest.raises(ControllerError, match="at byte 5000 of"):
        match(b"a" * 5000 + b"b")
