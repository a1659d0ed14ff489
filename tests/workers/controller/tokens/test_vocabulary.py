"""A vocabulary has the bytes of every token, and writes every text in tokens exactly."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.workers.controller.tokens.trie import decode_trie
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.gpu import embedded
from tokenbus.workers.gpu.engine.text import WindowDetokenizer
from tokenizers import Tokenizer, normalizers, processors

from .real_tokenizers import (
    TEKKEN,
    TEKKEN_SIZE,
    sentencepiece,
    sentencepiece_json,
    sentencepiece_model,
    tekken,
    tekken_json,
    tekken_tokens,
)
from .small_tokenizers import CORPUS, byte_level, unigram, vocabulary

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.lists(
    st.sampled_from(
        ["the ", "fox", "  ", "\n", "é", "🦊", "▁", "<s>", "</s>", "<|end|>", "<0x41>", "ß"]
    ),
    max_size=8,
).map("".join)


class Kind(NamedTuple):
    """A tokenizer under test."""

    own: Tokenizer
    vocabulary: TokenizerVocabulary
    joins: bool
    """Whether the tokenizer's own decode removes a space at the beginning."""


MADE: dict[str, Callable[[], tuple[str, bool]]] = {
    "embedded": lambda: ((embedded.path() / "tokenizer.json").read_text(), False),
    "byte-level BPE": lambda: (byte_level().to_str(), False),
    "Unigram with Metaspace": lambda: (unigram().to_str(), True),
    "SentencePiece BPE": lambda: (sentencepiece_json(), True),
    "Tekken": lambda: (tekken_json(), False),
}


@pytest.fixture(scope="module", params=MADE)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Each kind of tokenizer, unless a test names some kinds."""
    text, joins = MADE[request.param]()
    shared = {"SentencePiece BPE": sentencepiece, "Tekken": tekken}.get(request.param)
    known = vocabulary(text) if shared is None else shared()
    return Kind(Tokenizer.from_str(text), known, joins)


def of_kinds(*names: str) -> pytest.MarkDecorator:
    """Runs a test with these kinds of tokenizers only."""
    return pytest.mark.parametrize("kind", names, indirect=True)


@pytest.fixture(scope="module")
def tekken_library() -> Any:
    """Tekken in the library mistral-common, which reads the same file."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    return Tekkenizer.from_file(TEKKEN)


# --- every kind -----------------------------------------------------------------------------------


@given(text=TEXT)
def test_a_text_in_tokens_is_that_text(kind: Kind, text: str) -> None:
    vocabulary = kind.vocabulary
    tokens = vocabulary.tokenize(text.encode())
    assert vocabulary.bytes_of(tokens) == text.encode()
    assert all(vocabulary.token(token) for token in tokens)


@given(text=st.binary(max_size=30))
def test_bytes_that_are_no_text_go_byte_by_byte(kind: Kind, text: bytes) -> None:
    vocabulary = kind.vocabulary
    tokens = vocabulary.tokenize(text)
    assert vocabulary.bytes_of(tokens) == text
    broken = b"\xff" + text[:4] + b"\xc3"
    pieces = [vocabulary.token(token) for token in vocabulary.tokenize(broken)]
    assert (pieces[0], pieces[-1]) == (b"\xff", b"\xc3")


@given(seed=st.integers(0, 2**32), count=st.integers(0, 12))
def test_the_bytes_of_tokens_are_what_the_tokenizer_decodes(
    kind: Kind, seed: int, count: int
) -> None:
    own, vocabulary, joins = kind
    tokens = random.Random(seed).choices(range(vocabulary.size), k=count)
    before = vocabulary.tokenize(b"the") if joins else []
    written = vocabulary.bytes_of([*before, *tokens])
    try:
        text = written.decode()
    except UnicodeDecodeError:
        if joins:
            return  # Decoders differ in the number of replacement characters.
        text = written.decode("utf-8", "replace")
    assert text == own.decode([*before, *tokens], skip_special_tokens=True)


@given(text=TEXT)
def test_what_a_client_is_shown_token_by_token_is_the_text(kind: Kind, text: str) -> None:
    own, vocabulary, joins = kind
    prompt = vocabulary.tokenize(b"the") if joins else []
    shown = WindowDetokenizer(own, prompt)
    tokens = vocabulary.tokenize(text.encode())
    assert "".join(map(shown.push, tokens)) + shown.finish() == text


def test_the_trie_has_every_token_but_the_special_ones(kind: Kind) -> None:
    own, vocabulary, _ = kind
    trie = decode_trie(vocabulary.trie)
    special = {number for number, token in own.get_added_tokens_decoder().items() if token.special}
    assert trie.tokens == [vocabulary.token(number) for number in range(vocabulary.size)]
    assert set(trie.spelled) == set(range(vocabulary.size)) - special


def test_the_tokens_with_a_byte_are_those_that_contain_it(kind: Kind) -> None:
    vocabulary = kind.vocabulary
    for byte in b"\ne\xff":
        mask = vocabulary.tokens_with(byte)
        assert len(mask) == 4 * -(-vocabulary.size // 32)
        for number in range(vocabulary.size):
            has = bool(mask[number >> 3] >> (number & 7) & 1)
            assert has == (byte in vocabulary.token(number))


def test_an_empty_text_has_no_tokens(kind: Kind) -> None:
    assert kind.vocabulary.tokenize(b"") == []


# --- the tokens are the tokenizer's own -----------------------------------------------------------


@of_kinds("embedded", "Tekken")
@given(text=TEXT)
def test_the_tokens_are_those_of_the_tokenizer(kind: Kind, text: str) -> None:
    own, vocabulary, _ = kind
    if not any(token in text for token in ("<|endoftext|>", "<SPECIAL_")):
        assert vocabulary.tokenize(text.encode()) == own.encode(text, add_special_tokens=False).ids


@of_kinds("Tekken")
@given(text=TEXT)
def test_tekkens_tokens_are_those_of_its_own_library(
    kind: Kind, tekken_library: Any, text: str
) -> None:
    tokens = kind.vocabulary.tokenize(text.encode())
    assert tokens == tekken_library.encode(text, bos=False, eos=False)


@of_kinds("SentencePiece BPE")
@given(text=TEXT.filter(lambda text: "▁" not in text))
def test_sentencepieces_tokens_are_those_of_its_own_library(kind: Kind, text: str) -> None:
    # The library adds a space before a text. Here the space is part of the text.
    model = sentencepiece_model()
    if text and not any(piece in text for piece in ("<s>", "</s>", "<unk>", "[")):
        tokens = kind.vocabulary.tokenize(b" " + text.encode())
        assert tokens == model.encode(text)


@of_kinds("Unigram with Metaspace")
@given(text=TEXT.filter(lambda text: "<" not in text and "▁" not in text))
def test_text_that_a_normalizer_leaves_alone_has_the_tokens_that_it_had(
    kind: Kind, text: str
) -> None:
    own, vocabulary, _ = kind
    normal = normalizers.NFKC().normalize_str(text).lstrip(" ")
    if normal:
        tokens = vocabulary.tokenize(b" " + normal.encode())
        assert tokens == own.encode(normal, add_special_tokens=False).ids


def test_raw_tekken_tokens_and_its_json_are_the_same_vocabulary() -> None:
    raw = TokenizerVocabulary.from_tokens(tekken_tokens(), eos=[2], fingerprint="raw")
    assert raw.size == tekken().size == TEKKEN_SIZE
    assert raw.trie == tekken().trie


# --- nothing is added, nothing is special ---------------------------------------------------------


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_puts_no_space_before_a_text(scheme: str) -> None:
    known = vocabulary(unigram(scheme))
    assert known.bytes_of(known.tokenize(b"fox")) == b"fox"
    assert known.bytes_of(known.tokenize(b" fox")) == b" fox"


def test_the_text_of_a_special_token_is_text(kind: Kind) -> None:
    for text in ("<|endoftext|>", "a<|end|>b", "</s>", "[INST] x </s>", "<SPECIAL_2>"):
        tokens = kind.vocabulary.tokenize(text.encode())
        assert len(tokens) > 1
        assert kind.vocabulary.bytes_of(tokens) == text.encode()


def test_neither_a_beginning_of_sequence_nor_truncation_nor_padding_nor_dropout_is_applied() -> (
    None
):
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", end)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50, pad_token="<|end|>", pad_id=end)
    tokenizer.model.dropout = 0.5
    known = vocabulary(tokenizer)
    text = CORPUS[0].encode()
    assert known.bytes_of(known.tokenize(text)) == text
    assert len({tuple(known.tokenize(text)) for _ in range(20)}) == 1


def test_what_a_normalizer_would_change_stays_as_it_is() -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Strip()]
    )
    known = vocabulary(tokenizer)
    text = "  The FOX, cafe\u0301 ".encode()
    assert known.bytes_of(known.tokenize(text)) == text


@of_kinds("SentencePiece BPE", "Unigram with Metaspace")
def test_a_literal_metaspace_is_not_a_space(kind: Kind) -> None:
    known = kind.vocabulary
    pieces = [known.token(token) for token in known.tokenize("▁".encode())]
    assert pieces == [b"\xe2", b"\x96", b"\x81"]


@of_kinds("SentencePiece BPE")
def test_a_sentencepiece_tokenizer_without_a_decoder_is_known_by_its_other_parts(
    kind: Kind,
) -> None:
    content = json.loads(sentencepiece_json())
    content["decoder"] = None
    known = vocabulary(json.dumps(content), eos=[2])
    assert known.trie == kind.vocabulary.trie


# --- sizes and the end of a sequence --------------------------------------------------------------


def test_ids_beyond_the_tokenizer_are_padding() -> None:
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    known = vocabulary(tokenizer, size=size + 24)
    assert known.size == size + 24
    assert {known.token(number) for number in range(size, size + 24)} == {b""}
    assert known.token(size + 24) == known.token(-1) == b""


def test_tokens_beyond_the_model_are_never_used() -> None:
    known = vocabulary(byte_level(), size=300)
    tokens = known.tokenize(CORPUS[2].encode())
    assert max(tokens) < 300
    assert known.bytes_of(tokens) == CORPUS[2].encode()


def test_a_token_that_ends_a_sequence_is_no_text() -> None:
    tokenizer = byte_level()
    fox = tokenizer.token_to_id("Ġfox") or tokenizer.token_to_id("Ġthe")
    assert fox is not None
    known = vocabulary(tokenizer, eos=[fox, 0])
    assert (known.eos, known.eos_ids) == (fox, (fox, 0))
    assert known.token(fox) == b""
    assert fox not in known.tokenize(b" the fox")
    assert decode_trie(known.trie).eos == fox


def test_a_model_may_have_no_end_of_sequence() -> None:
    for eos in ([], [5000]):
        known = TokenizerVocabulary.from_tokens([b"a"], eos, "raw")
        assert (known.eos, known.eos_ids) == (-1, ())
        assert decode_trie(known.trie).eos == -1


# --- tokenizers and texts that are refused --------------------------------------------------------


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "{}", '{"model": {"type": "Magic"}}'])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    with pytest.raises(ControllerError, match="the tokenizer abcdef cannot be read") as caught:
        TokenizerVocabulary.from_json(text, size=10, eos=[], fingerprint="abcdef")
    assert caught.value.code == Code.CONTROLLER_FAILED


def test_a_text_beyond_the_vocabulary_is_refused_with_its_place() -> None:
    known = TokenizerVocabulary.from_tokens([b"a", b"b"], eos=[], fingerprint="raw")
    with pytest.raises(
        ControllerError, match=r"does not have a token for b'cab', at byte 2 of b'abcab'"
    ) as caught:
        known.tokenize(b"abcab")
    assert caught.value.code == Code.CONTROLLER_FAILED
    with pytest.raises(ControllerError, match=r"b'\\xff'"):
        known.tokenize(b"a\xffa")


# --- imports and time -----------------------------------------------------------------------------


@pytest.mark.process
def test_it_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, tokenbus.workers.controller.tokens.vocabulary\n"
        "assert not {'torch', 'transformers', 'sentencepiece'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


@pytest.mark.parametrize(
    "text", [b"a\xff" * 2000, b"\xff" * 2000, b"ab" * 2000], ids=["mixed", "bytes", "longest match"]
)
def test_a_long_text_is_stopped_by_its_check(text: bytes) -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ControllerError(Code.CONTROLLER_TIMEOUT, "enough")

    tokens = [bytes([byte]) for byte in range(256)]
    raw = TokenizerVocabulary.from_tokens([b"", *tokens], eos=[0], fingerprint="f")
    with pytest.raises(ControllerError, match="enough"):
        raw.tokenize(text, check)
