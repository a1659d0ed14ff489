"""The token trie contains exactly the tokens of a vocabulary, in the form that AICI's guests
check."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.tokens.trie import LONGEST, NO_TOKEN, decode_trie, encode_trie

FEW_BYTES = st.lists(st.sampled_from([0, 1, 0x41, 0xFE, 0xFF]), max_size=5).map(bytes)
TOKENS = st.lists(FEW_BYTES | st.binary(max_size=12), max_size=40)


@given(TOKENS, st.integers(-1, 50))
@example([], -1)
@example([b"", b""], 0)
@example([b"a", b"a\xff", b"a\xff\xff", b"a", b"a\xff", b"a"], 2)
@example([b"a", b"a\0", b"a\0\0", b"a\0b"], 2)
def test_a_walk_over_the_trie_spells_every_token_once(tokens: list[bytes], eos: int) -> None:
    trie = decode_trie(encode_trie(tokens, eos))
    assert trie.eos == eos
    assert trie.tokens == tokens
    assert trie.spelled == {number: token for number, token in enumerate(tokens) if token}


@given(TOKENS)
def test_the_walk_goes_by_ascending_bytes(tokens: list[bytes]) -> None:
    spelled = decode_trie(encode_trie(tokens, 0)).spelled
    found = list(dict.fromkeys(spelled.values()))
    assert found == sorted(found)


def test_the_words_are_those_of_the_specification() -> None:
    blob = encode_trie([b"ab", b"", b"a", b"c"], eos=1)
    words = struct.unpack("<19I", blob[:76])
    assert words[:7] == (0x558B6FD3, 28, 32, 16, 4, 4, 1)
    assert words[7:15] == (
        *(NO_TOKEN << 8 | 0xFF, 4 << 8 | 0),
        *(2 << 8 | ord("a"), 2 << 8 | 1),
        *(0 << 8 | ord("b"), 1 << 8 | 2),
        *(3 << 8 | ord("c"), 1 << 8 | 1),
    )
    assert words[15:] == (0 << 8 | 2, 0, 2 << 8 | 1, 3 << 8 | 1)
    assert blob[76:] == b"abac"


def test_a_last_leaf_ends_all_levels_down_to_the_next_sibling() -> None:
    blob = encode_trie([b"abc", b"d"], eos=0)
    nodes = [struct.unpack_from("<BxxxBxxx", blob, at) for at in range(28, 68, 8)]
    assert nodes == [(0xFF, 0), (ord("a"), 1), (ord("b"), 2), (ord("c"), 3), (ord("d"), 1)]


def test_of_tokens_with_the_same_bytes_the_last_is_the_one_that_goes_on() -> None:
    trie = decode_trie(encode_trie([b"a", b"a", b"ab", b"a"], eos=-1))
    assert list(trie.spelled) == [3, 2, 0, 1]


def test_a_token_that_is_too_long_has_no_place_and_no_bytes() -> None:
    tokens = [b"x" * LONGEST, b"x" * (LONGEST + 1), b"y"]
    trie = decode_trie(encode_trie(tokens, eos=-1))
    assert trie.tokens == [tokens[0], b"", b"y"]
    assert trie.spelled == {0: tokens[0], 2: b"y"}


def test_a_vocabulary_beyond_24_bits_of_data_is_refused() -> None:
    tokens = [struct.pack("<I", number) * 60 for number in range(70_000)]
    with pytest.raises(
        ControllerError, match="would have 16800000 bytes of tokens; its format allows 16777214"
    ):
        encode_trie(tokens, eos=-1)


@given(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=8), st.data())
def test_a_changed_word_of_the_nodes_does_not_pass(
    tokens: list[bytes], data: st.DataObject
) -> None:
    blob = bytearray(encode_trie(tokens, eos=0))
    (node_bytes,) = struct.unpack_from("<I", blob, 8)
    at = data.draw(st.integers(28, 28 + node_bytes - 1))
    blob[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        trie = decode_trie(bytes(blob))
    except ValueError:
        return
    # The changed trie is valid, but a token has other bytes or another id.
    assert trie.spelled != dict(enumerate(tokens))


@pytest.mark.parametrize("size", [0, 27, 40])
def test_a_blob_that_is_cut_does_not_pass(size: int) -> None:
    with pytest.raises(ValueError, match=r"header|bytes of"):
        decode_trie(encode_trie([b"a", b"b"], eos=0)[:size])
