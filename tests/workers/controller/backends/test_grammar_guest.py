"""The grammar backend at its bounds: deep nesting, full memory, too many sequences, and
vocabularies without the tokens that a grammar needs. It refuses a token or reports an error, and
other sequences continue."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import chain, product

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.regex import compile_choice, compile_regex
from tokenbus.grammars.yacc import Recognizer, compile_grammar
from tokenbus.protocol.errors import ControllerError
from tokenbus.workers.controller.backends.grammar import grammar_instance
from tokenbus.workers.controller.backends.grammar.grammar_instance import (
    ANY,
    COMPLETE,
    FORCED,
    SINGLE,
    GrammarInstance,
)
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from .grammar_cases import raw_vocabulary
from .grammars import by_bytes, guest_of, look

BRACKETS = '%start a %% a: "(" a ")" | "[" a "]" | "x";'
BRACKET_TOKENS = [b"", b"(", b")", b"[", b"]", b"x", b"(" * 64, b"x)"]
SIGNS = """%start e %%
e: a; a: b; b: c; c: d; d: f; f: h; h: i; i: j; j: k; k: "-" e | "+" e | "x";"""
"""The parser makes ten reductions for each sign, all of them at the end of the text."""
SIGN_TOKENS = [b"", b"-", b"+", b"x", b"-" * 8]
DEEPEST = 8192
MB = 1 << 20


def tables(text: str) -> bytes:
    """The compiled tables of a grammar."""
    return compile_grammar(text).grammar.to_bytes()


@cache
def byte_vocabulary() -> TokenizerVocabulary:
    """Tokens of single bytes, the end of the text as token 256, and words."""
    words = [b"int ", b"();", b"x=", b"  ", b"return ", b"){", b"}\n", b"\xc3\xa9", b"//", b"x;"]
    return raw_vocabulary([*(bytes((byte,)) for byte in range(256)), b"", *words], (256,))


@pytest.fixture
def signs() -> Iterator[GrammarInstance]:
    with closing(guest_of(raw_vocabulary(SIGN_TOKENS), tables(SIGNS))) as guest:
        yield guest


# --- depth --------------------------------------------------------------------------------------


def test_nesting_is_followed_to_the_bound_and_refused_beyond_it() -> None:
    with closing(guest_of(raw_vocabulary(BRACKET_TOKENS), tables(BRACKETS))) as guest:
        other, place = guest.start(), guest.start()
        # The start state takes one place of the stack. The last bracket takes a place only when the
        # next one begins.
        assert guest.append(place, [6] * 200) == DEEPEST // 64
        assert look(guest, place) == (ANY, {1, 3, 5, 6, 7})
        assert guest.append(place, [1]) == 0
        assert look(guest, place) == (ANY, {1, 3, 5, 6, 7})
        assert not guest.complete(place)
        assert guest.forced(place) == []
        # Other sequences do not change, and a text of less depth can be completed.
        assert guest.append(other, [1, 3, 5, 4]) == 4
        assert look(guest, other) == (ANY | FORCED | SINGLE, {2})
        deep = guest.start()
        depth = DEEPEST - 3
        assert guest.append(deep, [1] * depth + [5] + [2] * depth) == 2 * depth + 1
        assert look(guest, deep) == (COMPLETE, {0})


def test_a_chain_of_reductions_to_the_bottom_of_a_deep_stack_is_followed(
    signs: GrammarInstance,
) -> None:
    place = signs.start()
    assert signs.append(place, [4] * 1000) == 1000
    assert look(signs, place) == (ANY, {1, 2, 3, 4})
    assert signs.append(place, [3]) == 1
    assert look(signs, place) == (COMPLETE, {0})


@pytest.mark.parametrize("sign", [b"- ", b"(", b"!", b"*"])
def test_c_nested_eight_thousand_deep_has_masks(sign: bytes) -> None:
    vocabulary = byte_vocabulary()
    with closing(guest_of(vocabulary, tables(library.grammar("c")))) as guest:
        place = guest.start()
        text = b"int f(void) { return " + sign * 8000 + b"x"
        assert guest.append(place, list(text)) == len(text)
        flags, allowed = look(guest, place)
        assert flags == ANY
        assert ord(";") in allowed or sign == b"("
        assert (ord(")") in allowed) == (sign == b"(")
        assert 256 not in allowed


def test_stacks_that_have_nothing_in_common_are_forgotten_and_found_again(
    signs: GrammarInstance,
) -> None:
    """Each text has its own path of 8,000 parser states. There is room for twelve such paths."""
    chance = random.Random(5)
    texts = [[chance.choice([1, 2]) for _ in range(8000)] + [3] for _ in range(20)]
    for text in texts * 2:
        place = signs.start()
        assert signs.append(place, text) == len(text)
        assert look(signs, place) == (COMPLETE, {0})
        signs.end(place)
    assert signs.found >= 2 * len(texts)


# --- texts that a vocabulary cannot write -------------------------------------------------------


@pytest.mark.parametrize(
    "compiled",
    [
        tables('%start a %% a: "(" a ")" | "x"; SKIP: "/ +/";'),
        compile_regex(r"\(x\)").to_bytes(),
    ],
    ids=["grammar", "regex"],
)
def test_where_no_token_can_go_on_the_mask_is_empty_and_says_so(compiled: bytes) -> None:
    with closing(guest_of(raw_vocabulary([b"", b"(", b"x", b"y)"]), compiled)) as guest:
        place = guest.start()
        assert guest.append(place, [1, 2]) == 2
        flags, allowed = look(guest, place)
        assert not flags & (ANY | COMPLETE)
        assert allowed == frozenset()
        assert guest.forced(place) == []


def test_a_vocabulary_without_any_token_of_use_is_served() -> None:
    for compiled in (tables(BRACKETS), compile_regex("a*").to_bytes()):
        for tokens in ([b""], [b"", b"\xff"], [b"q"] * 40):
            with closing(guest_of(raw_vocabulary(tokens, ()), compiled)) as guest:
                place = guest.start()
                flags, allowed = look(guest, place)
                assert not flags & ANY
                assert allowed == frozenset()
                assert guest.append(place, [0]) == 0


def test_forced_bytes_that_the_vocabulary_writes_only_with_more_are_left_to_the_mask() -> None:
    vocabulary = raw_vocabulary([b"", b"a", b"b", b"cd", b"ce"])
    with closing(guest_of(vocabulary, compile_regex("abc[de]").to_bytes())) as guest:
        place = guest.start()
        assert look(guest, place) == (ANY | FORCED | SINGLE, {1})
        assert guest.forced(place) == []


def test_a_forced_text_of_one_token_runs_in_a_batch_and_a_longer_one_does_not() -> None:
    vocabulary = raw_vocabulary([b"", b"a", b"b", b"c", b"d"])
    with closing(guest_of(vocabulary, compile_regex("(ab[cd]|bcd)*").to_bytes())) as guest:
        one, several = guest.start(), guest.start()
        # After ``a`` comes ``b``, and then a choice. After ``b`` comes ``cd``.
        for place, token in ((one, 1), (several, 2)):
            copy = guest.fork(place)
            guest.append(copy, [token])
            look(guest, copy)
            guest.end(copy)
        masks = [memoryview(bytearray(4)) for _ in range(2)]
        assert guest.rounds([(one, 1), (several, 2)], masks) == [True, False]
        assert masks[0].tolist() == [1 << 2, 0, 0, 0]
        assert guest.append(several, [2]) == 1
        assert guest.forced(several) == [3, 4]


def test_tokens_that_differ_leave_a_choice_although_a_byte_is_forced() -> None:
    vocabulary = raw_vocabulary([b"", b"a", b" ", b" a", b" b"])
    with closing(guest_of(vocabulary, compile_regex("(a [ab])*").to_bytes())) as guest:
        place = guest.start()
        assert guest.append(place, [1]) == 1
        assert look(guest, place) == (ANY, {2, 3, 4})
        assert guest.forced(place) == []


def test_forced_tokens_stop_before_the_first_that_a_longer_token_could_begin_with() -> None:
    tokens = [b"", b"a", b"b", b"c", b"d", b"e", b"ab", b"bcd", b"abcd", b"xab"]
    with closing(guest_of(raw_vocabulary(tokens), compile_regex("xyabc[de]").to_bytes())) as guest:
        place = guest.start()
        assert guest.forced(place) == []
    tokens += [b"x", b"y"]
    with closing(guest_of(raw_vocabulary(tokens), compile_regex("xyabc[de]").to_bytes())) as guest:
        place = guest.start()
        # After ``xy``, no token is forced, because ``ab`` and ``abcd`` are allowed.
        assert guest.forced(place) == [10, 11]
    without = [*tokens[:8], b"", *tokens[9:]]
    with closing(guest_of(raw_vocabulary(without), compile_regex("xyabc[de]").to_bytes())) as guest:
        place = guest.start()
        assert guest.forced(place) == [10, 11, 6, 3]


def test_tokens_of_254_bytes_are_allowed_and_longer_ones_are_not() -> None:
    tokens = [b"", b"a" * 253, b"a" * 254, b"a" * 255, b"a" * 300, b"a", b"b" + b" a" * 126]
    for compiled, allowed in (
        (compile_regex("a+").to_bytes(), {1, 2, 5}),
        (tables('%start s %% s: s "a" | "a" | "b" s;'), {1, 2, 5}),
        (tables('%start s %% s: s "a" | "a" | "b" s; SKIP: " ";'), {1, 2, 5, 6}),
    ):
        with closing(guest_of(raw_vocabulary(tokens), compiled)) as guest:
            place = guest.start()
            assert look(guest, place)[1] == allowed
            assert guest.append(place, [1, 2, 3]) == 2
            assert guest.complete(place)


def test_tokens_that_are_none_cannot_follow() -> None:
    with closing(guest_of(raw_vocabulary(BRACKET_TOKENS), tables(BRACKETS))) as guest:
        place = guest.start()
        for number in (0, len(BRACKET_TOKENS), 1 << 24, (1 << 32) - 1):
            assert guest.append(place, [1, number, 1]) == 1
        assert look(guest, place) == (ANY, {1, 3, 5, 6, 7})


# --- many sequences, little memory --------------------------------------------------------------


def test_the_4097th_sequence_is_an_error_and_the_others_go_on() -> None:
    with closing(guest_of(raw_vocabulary(BRACKET_TOKENS), tables(BRACKETS))) as guest:
        places = [guest.start()]
        assert guest.append(places[0], [1, 5]) == 2
        places += [guest.fork(places[0]) for _ in range(4095)]
        assert len(set(places)) == 4096
        for make in (guest.start, lambda: guest.fork(places[7])):
            with pytest.raises(ControllerError, match="try again"):
                make()
        assert all(look(guest, place) == (ANY | FORCED | SINGLE, {2}) for place in places[::100])
        guest.end(places[17])
        again = guest.start()
        assert again == places[17]
        assert look(guest, again) == (ANY, {1, 3, 5, 6})


LETTERS = b"abcdefgh"


@cache
def letter_vocabulary() -> TokenizerVocabulary:
    """All texts of one to four letters, and special tokens, so that a mask has 16 kB."""
    texts = (product(LETTERS, repeat=size) for size in range(1, 5))
    tokens = [b"", *map(bytes, chain(*texts))]
    return raw_vocabulary(tokens + [b""] * (131_072 - len(tokens)))


@pytest.fixture(scope="module")
def words() -> list[bytes]:
    """A thousand words of eight letters each."""
    chance = random.Random(3)
    return [bytes(chance.choices(LETTERS, k=8)) for _ in range(1000)]


@pytest.fixture(scope="module")
def choice(words: list[bytes]) -> bytes:
    """The tables of a choice among the words."""
    return compile_choice([word.decode() for word in words]).to_bytes()


def spell(guest: GrammarInstance, words: list[bytes]) -> list[tuple[int, int]]:
    """The flags and the hash of the mask before and after each letter of some words."""
    seen = []
    for word in words:
        place = guest.start()
        for letter in word:
            seen.append(hashed(guest, place))
            assert guest.append(place, [1 + LETTERS.index(letter)]) == 1
        seen.append(hashed(guest, place))
        guest.end(place)
    return seen


def hashed(guest: GrammarInstance, place: int) -> tuple[int, int]:
    """The flags and the hash of a sequence's mask."""
    mask = bytearray(guest.vocabulary.size // 8)
    flags = guest.mask(place, memoryview(mask))
    return flags, hash(bytes(mask))


def test_masks_that_were_forgotten_for_want_of_memory_are_the_same_again(
    monkeypatch: pytest.MonkeyPatch, words: list[bytes], choice: bytes
) -> None:
    with closing(guest_of(letter_vocabulary(), choice)) as large:
        size = large.size
        expected = spell(large, words)
        found = large.found
        assert spell(large, words) == expected
        assert large.found == found
    monkeypatch.setattr(grammar_instance, "MEMORY_BYTES", size)
    with closing(guest_of(letter_vocabulary(), choice)) as small:
        assert spell(small, words) == expected
        assert spell(small, words) == expected
        assert small.found > found
        assert small.size == size
        memory = small.memory()
    with closing(guest_of(letter_vocabulary(), choice, memory)) as later:
        assert spell(later, words) == expected


def test_new_sequences_are_served_when_masks_have_taken_all_the_memory(
    monkeypatch: pytest.MonkeyPatch, words: list[bytes], choice: bytes
) -> None:
    with closing(guest_of(letter_vocabulary(), choice)) as large:
        size = large.size
        expected = spell(large, words)
        assert large.size > size + 16 * MB
    monkeypatch.setattr(grammar_instance, "MEMORY_BYTES", size + 16 * MB)
    with closing(guest_of(letter_vocabulary(), choice)) as small:
        first = small.start()
        assert small.append(first, [1 + LETTERS.index(words[0][0])]) == 1
        assert spell(small, words) == expected
        # Three hundred sequences need five megabytes.
        places = [small.start() for _ in range(300)] + [small.fork(first)]
        assert {hashed(small, place) for place in places[:-1]} == {expected[0]}
        assert hashed(small, places[-1]) == hashed(small, first) == expected[1]
        with pytest.raises(ControllerError, match="try again"):
            places.extend(small.start() for _ in range(4096))
        for place in places[1:]:
            small.end(place)
        assert spell(small, words) == expected
        assert hashed(small, first) == expected[1]


def test_a_guest_that_has_anothers_memory_knows_its_masks_and_none_of_its_sequences() -> None:
    vocabulary, compiled = raw_vocabulary(BRACKET_TOKENS), tables(BRACKETS)
    with closing(guest_of(vocabulary, compiled)) as guest:
        places = [guest.start() for _ in range(5)]
        assert guest.append(places[2], [1, 5]) == 2
        expected = look(guest, places[2])
        found, memory = guest.found, guest.memory()
    with closing(guest_of(vocabulary, compiled, memory)) as later:
        assert later.start() == places[0]
        place = later.start()
        assert later.append(place, [1, 5]) == 2
        assert look(later, place) == expected
        assert later.found == found


def test_threads_share_a_guest() -> None:
    vocabulary = byte_vocabulary()
    compilation = compile_grammar(library.grammar("json"))
    text = b'{"a": [1, -2.5e3, true], "b": {"c": "\\u00e9"}} '
    reference = Recognizer(compilation.grammar)
    expected = []
    for byte in text:
        expected.append(by_bytes(reference, vocabulary))
        assert reference.byte(byte)
    wrong: list[int] = []
    with closing(guest_of(vocabulary, compilation.grammar.to_bytes())) as guest:

        def follow() -> None:
            for _ in range(20):
                place = guest.start()
                for at, byte in enumerate(text):
                    if look(guest, place)[1] - {256} != expected[at]:
                        wrong.append(at)
                    guest.append(place, [byte])
                guest.end(place)

        threads = [threading.Thread(target=follow) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    "damaged", [b"", b"TBYG", b"X" * 200, b"TBYG" + bytes(200), b"TBDF" + bytes(200)]
)
def test_tables_that_are_none_are_refused(damaged: bytes) -> None:
    with pytest.raises(ControllerError, match=r"grammar|automaton|expression"):
        guest_of(raw_vocabulary(BRACKET_TOKENS), damaged)


def test_a_sequence_that_is_none_is_an_error_that_every_later_call_tells() -> None:
    with closing(guest_of(raw_vocabulary(BRACKET_TOKENS), tables(BRACKETS))) as guest:
        place = guest.start()
        with pytest.raises(ControllerError, match="no such sequence"):
            guest.append(place + 1, [1])
        with pytest.raises(ControllerError, match="try again"):
            look(guest, place)
