"""The bound on the length of a text, by its bytes and by the tokens of its segments."""

from __future__ import annotations

import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.text_bounds import (
    MAX_SHORTENING,
    SEGMENT_CHARS,
    TextBound,
    TokenSize,
    size_of_tokenizer,
)

BYTE_LEVEL = {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}]}


def test_the_longest_token_of_a_byte_level_vocabulary_counts_its_characters() -> None:
    model = {"vocab": {"a": 0, "\u0120\u0120\u0120": 1}}
    size = size_of_tokenizer({"model": model, "pre_tokenizer": BYTE_LEVEL})
    assert size == TokenSize(3, shortens=False)
    added = [{"content": "<|end|>"}]
    size = size_of_tokenizer(
        {"model": model, "pre_tokenizer": BYTE_LEVEL, "added_tokens": added, "normalizer": None}
    )
    assert size == TokenSize(7, shortens=False)


def test_a_tokenizer_that_normalizes_or_has_other_letters_may_shorten_text() -> None:
    vocabulary = [["a", 0.0], ["\u2581\u2581", -1.0]]
    assert size_of_tokenizer({"model": {"vocab": vocabulary}}) == TokenSize(6)
    normalized = {"model": {"vocab": {"ab": 0}}, "pre_tokenizer": BYTE_LEVEL}
    assert size_of_tokenizer({**normalized, "normalizer": {"type": "NFC"}}) == TokenSize(2)
    assert size_of_tokenizer({}) == TokenSize(1)


@pytest.mark.parametrize(("shortens", "most"), [(False, 30), (True, 30 * MAX_SHORTENING)])
def test_all_texts_of_a_request_together_have_a_bound_in_bytes(shortens: bool, most: int) -> None:
    bound = TextBound("m", 10, TokenSize(3, shortens))
    assert bound.check(["\u00e9" * (most // 2 - 1), "ab"]) == most
    with pytest.raises(RequestError, match=rf"{most + 1} bytes .* \(10 tokens of at most 3 bytes"):
        bound.check(["\u00e9" * (most // 2), "a"])


def test_a_long_text_is_counted_until_it_has_twice_as_many_tokens() -> None:
    counted: list[int] = []

    def count(segment: str) -> int:
        counted.append(len(segment))
        return len(segment)

    bound = TextBound("m", SEGMENT_CHARS, TokenSize(100))
    bound.check_count("x" * 2 * SEGMENT_CHARS, count)
    bound.check_count("x" * SEGMENT_CHARS, count)
    assert counted == [SEGMENT_CHARS] * 2
    with pytest.raises(RequestError, match=f"have {3 * SEGMENT_CHARS} tokens"):
        bound.check_count("x" * 50 * SEGMENT_CHARS, count)
    assert len(counted) == 5
