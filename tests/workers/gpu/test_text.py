"""Text is sent when later tokens cannot change it. Until the end, incomplete characters and parts
of stop strings are held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenbus.workers.gpu.embedded import path
from tokenbus.workers.gpu.engine.stop_strings import StopStrings
from tokenbus.workers.gpu.engine.text import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    TextStream,
    WindowDetokenizer,
    detokenizers,
)
from transformers import AutoTokenizer

TABLE = [bytes([b]) for b in range(256)]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def pieces(text: str, stop: Sequence[str] = (), least: int = 0) -> tuple[list[str], bool]:
    """The new text after each byte and at the end, and whether a stop string has ended the text."""
    strings = StopStrings(stop) if stop else None
    stream = TextStream(ByteDetokenizer(ByteTable.of(TABLE)), strings, min_tokens=least)
    output = []
    for byte in text.encode():
        piece = stream.push(byte)
        output.append(piece.certain)
        if piece.stopped:
            return output, True
    rest = stream.finish()
    return [*output, rest.certain], rest.stopped


@given(TEXT)
def test_bytes_become_whole_characters(text: str) -> None:
    output, _ = pieces(text)
    assert "".join(output) == text
    assert all(len(piece) <= 1 for piece in output)


@given(TEXT, st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    output, stopped = pieces(text, stop)
    places = [at for at in (text.find(s) for s in stop) if at >= 0]
    assert stopped == bool(places)
    if not places:
        assert "".join(output) == text
    else:
        # If stop strings overlap, the one that is complete first ends the text.
        ends = [text.find(s) + len(s) for s in stop if s in text]
        cut = text[: min(ends)]
        assert "".join(output) == cut[: min(at for at in (cut.find(s) for s in stop) if at >= 0)]


@given(
    st.text("abc", max_size=14),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 8),
)
@example("abc", ["aba", "b"], 2)
def test_a_stop_string_is_completed_after_the_minimum(
    text: str, stop: list[str], least: int
) -> None:
    output, stopped = pieces(text, stop, least)
    found = [
        (end, end - len(s))
        for end in range(least + 1, len(text) + 1)
        for s in stop
        if text[:end].endswith(s)
    ]
    assert stopped == bool(found)
    assert "".join(output) == (text[: min(found)[1]] if found else text)


def test_what_could_begin_a_stop_string_is_held_back() -> None:
    output, stopped = pieces("abcabd", ["abd"])
    assert output == ["", "", "abc", "", "", ""]
    assert stopped


def test_a_character_that_stays_incomplete_is_shown_as_a_replacement() -> None:
    stream = TextStream(ByteDetokenizer(ByteTable.of(TABLE)))
    assert stream.push("é".encode()[0]).certain == ""
    assert stream.finish().certain == "�"


PARTS = [*TABLE, "é".encode(), b"ab", b"\xff\xfe", b"", b"a\xc3", b"\xa9b"]


@given(st.lists(st.integers(0, len(PARTS)), max_size=30), st.integers(0, 30))
def test_any_bytes_are_decoded_as_a_decoder_of_the_whole_does(tokens: list[int], at: int) -> None:
    """A fork continues from its parent's state. A token beyond the table has no text."""
    detokenizer: Detokenizer = ByteDetokenizer(ByteTable.of(PARTS))
    found = ""
    for i, token in enumerate(tokens):
        if i == at:
            left, detokenizer = detokenizer, detokenizer.fork()
            left.push(0xF0)
        found += detokenizer.push(token)
    whole = b"".join(PARTS[token] for token in tokens if token < len(PARTS))
    assert found + detokenizer.finish() == whole.decode(errors="replace")
    assert detokenizer.push(ord("a")) == "a"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(path())


@given(text=TEXT)
def test_both_detokenizers_give_the_tokenizers_own_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for detokenizer in (detokenizers(tokenizer)([]), WindowDetokenizer(tokenizer, [])):
        output = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
        assert output == text


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    detokenizer = detokenizers(tokenizer)([])
    for token in tokenizer.all_special_ids:
        assert detokenizer.push(token) == ""
