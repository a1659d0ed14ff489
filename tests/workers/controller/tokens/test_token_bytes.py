"""The bytes of tokens are found for every kind of tokenizer, or the tokenizer is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from .small_tokenizers import byte_level, vocabulary


def test_added_tokens_that_are_not_special_are_their_text() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool é>", AddedToken("  indent", normalized=False)])
    known = vocabulary(tokenizer)
    tokens = known.tokenize("x<tool é>  indent".encode())
    assert [known.token(token) for token in tokens[-2:]] == ["<tool é>".encode(), b"  indent"]
    assert known.bytes_of(tokens) == "x<tool é>  indent".encode()


def test_an_added_token_that_eats_spaces_does_not() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True)])
    known = vocabulary(tokenizer)
    assert known.bytes_of(known.tokenize(b"a  <tool>  b")) == b"a  <tool>  b"


def test_added_tokens_of_spaces_in_a_sentencepiece_vocabulary_are_spaces() -> None:
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1, "▁▁": 2}, []))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken("▁▁", normalized=False)])
    known = vocabulary(tokenizer)
    assert known.token(2) == b"  "
    assert known.bytes_of(known.tokenize(b"a   a")) == b"a   a"


def test_characters_without_a_decoder_are_themselves() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "é": 1, " ": 2, "[UNK]": 3}, [], unk_token="[UNK]"))
    known = vocabulary(tokenizer)
    assert known.tokenize("é a".encode()) == [1, 2, 0]
    assert known.token(3) == b""


def test_a_byte_level_tokenizer_without_a_decoder_is_known_by_its_other_parts() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = None
    assert vocabulary(tokenizer).trie == vocabulary(byte_level()).trie


def test_word_pieces_begin_words_with_a_space() -> None:
    numbers = {"[UNK]": 0, "fox": 1, "##es": 2, "##f": 3, "##ox": 4}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    known = vocabulary(tokenizer)
    assert known.tokenize(b" foxes fox") == [1, 2, 1]
    assert known.tokenize(b"foxes") == [3, 4, 2]


def test_an_end_of_word_is_a_space() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "b</w>": 1, "b": 2}, [], end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder()
    known = vocabulary(tokenizer)
    assert known.token(1) == b"b "
    assert known.tokenize(b"ab a") == [0, 1, 0]


@pytest.mark.parametrize(
    ("decoder", "why"),
    [
        (decoders.WordPiece(), "cleans up the text"),
        (decoders.CTC(), "its decoder has the unknown step CTC; known are BPEDecoder, Byte"),
        (
            decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
            "which may span tokens",
        ),
    ],
)
def test_a_decoder_that_writes_more_than_the_tokens_is_refused(decoder: Any, why: str) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoder
    with pytest.raises(ControllerError, match="tokens cannot be determined: .*" + re.escape(why)):
        vocabulary(tokenizer)


def test_a_word_without_a_token_for_the_unknown_is_written_in_other_tokens() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "ab": 2}))
    tokenizer.decoder = decoders.Fuse()
    assert vocabulary(tokenizer).tokenize(b"aba") == [2, 0]
