"""The window of a detokenizer stays short with any tokens. Its text is that of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.workers.gpu.embedded import path
from tokenbus.workers.gpu.engine.text import (
    CONTEXT_TOKENS,
    MAX_PENDING_TOKENS,
    REPLACEMENT,
    WindowDetokenizer,
    detokenizers,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ..controller.tokens.real_tokenizers import sentencepiece_json

AFTER_BYTES = 1027
"""The tokenizer with byte fallback has its 256 byte tokens before this token."""
MAX_WINDOW = CONTEXT_TOKENS + MAX_PENDING_TOKENS + 1


class Recorded:
    """A tokenizer that records the greatest number of tokens that it decodes at once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.longest = 0

    def decode(self, tokens: Sequence[int], **options: bool) -> str:
        self.longest = max(self.longest, len(tokens))
        text: str = self.tokenizer.decode(tokens, **options)
        return text


class Unbounded:
    """A detokenizer that decodes all tokens since the last complete character."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.context, self.pending = list(prompt), list[int]()

    def push(self, token: int) -> str:
        self.pending.append(token)
        before = self.tokenizer.decode(self.context)
        now = self.tokenizer.decode(self.context + self.pending)
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self.context, self.pending = self.pending, []
        return now[len(before) :]


@cache
def byte_fallback() -> Tokenizer:
    return Tokenizer.from_str(sentencepiece_json())


@cache
def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(path() / "tokenizer.json"))


def special(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token for token, described in added.items() if described.special)


def one_byte(byte: int) -> int:
    """The byte's token in the tokenizer with byte fallback."""
    token = byte_fallback().token_to_id(f"<0x{byte:02X}>")
    assert token is not None
    return token


CHARACTER = st.characters(exclude_categories=["Cs"]) | st.sampled_from([REPLACEMENT, "é", "🦊"])


@given(st.lists(st.integers(0, 4999), max_size=40), st.integers(0, 40))
def test_any_tokens_of_a_byte_level_vocabulary_have_the_text_of_the_whole(
    tokens: list[int], at: int
) -> None:
    """The first 256 tokens after the special tokens are bytes."""
    tokenizer = byte_level()
    tokens = [token % (300 if token % 2 else tokenizer.get_vocab_size()) for token in tokens]
    detokenizer = WindowDetokenizer(tokenizer, [], special(tokenizer))
    text = ""
    for i, token in enumerate(tokens):
        if i == at:
            left, detokenizer = detokenizer, detokenizer.fork()
            left.push(tokens[0])
        text += detokenizer.push(token)
    assert text + detokenizer.finish() == tokenizer.decode(tokens)


@given(
    st.lists(
        st.integers(AFTER_BYTES, 32_767).map(lambda token: [token])
        | CHARACTER.map(lambda character: [one_byte(byte) for byte in character.encode()])
        | st.integers(0, 12).map(lambda count: [2] * count),
        max_size=20,
    )
)
def test_characters_in_bytes_and_tokens_without_text_have_the_text_of_the_whole(
    parts: list[list[int]],
) -> None:
    tokenizer = byte_fallback()
    prompt = tokenizer.encode("the").ids
    tokens = [token for part in parts for token in part]
    detokenizer = WindowDetokenizer(tokenizer, prompt, special(tokenizer))
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + tokens)


@given(st.lists(st.integers(AFTER_BYTES - 257, AFTER_BYTES) | st.integers(0, 32_767), max_size=40))
def test_any_tokens_have_the_text_of_an_unbounded_window_while_it_is_short(
    tokens: list[int],
) -> None:
    """Tokens are often bytes, which may not be UTF-8."""
    tokenizer = byte_fallback()
    prompt, skipped = tokenizer.encode("the").ids, special(tokenizer)
    detokenizer = WindowDetokenizer(tokenizer, prompt, skipped)
    reference = Unbounded(tokenizer, prompt)
    for token in tokens:
        if token in skipped:
            assert detokenizer.push(token) == ""
            continue
        expected = reference.push(token)
        if len(reference.pending) > MAX_PENDING_TOKENS:
            break
        assert detokenizer.push(token) == expected


@pytest.mark.parametrize(
    "name", ["special token", "continuation byte", "first byte", "replacement character", "no text"]
)
def test_the_window_stays_short(name: str) -> None:
    tokenizer = byte_fallback()
    tokens = {
        "special token": [2],
        "continuation byte": [one_byte(0x80)],
        "first byte": [one_byte(0xF0)],
        "replacement character": [one_byte(byte) for byte in REPLACEMENT.encode()],
        # Models may have more tokens than their tokenizer.
        "no text": [tokenizer.get_vocab_size() + 1],
    }[name] * 60
    recorded, prompt = Recorded(tokenizer), tokenizer.encode("the").ids
    detokenizer = WindowDetokenizer(recorded, prompt)
    rest = tokenizer.encode(" quick").ids[1:] + [one_byte(byte) for byte in "🦊".encode()]
    text = "".join(map(detokenizer.push, [*tokens, *rest])) + detokenizer.finish()
    assert recorded.longest <= MAX_WINDOW
    if name in ("special token", "no text"):
        assert "the" + text == tokenizer.decode([*prompt, *rest])
    if name == "replacement character":
        assert text.count(REPLACEMENT) == 60


def test_special_tokens_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_fallback(), eos_token="</s>")
    detokenizer = detokenizers(tokenizer)(tokenizer.encode("the"))
    assert isinstance(detokenizer, WindowDetokenizer)
    monkeypatch.setattr(tokenizer, "decode", lambda *_, **__: pytest.fail("decoded"))
    assert detokenizer.push(tokenizer.eos_token_id) == ""
