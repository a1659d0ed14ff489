"""Difficult cases of grammars, each with two real vocabularies.

In these cases, a token spans several lexemes, a keyword is also the beginning of a name, SKIP is at
the start or end of a text, or a character is split over tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.regex import Dfa, compile_regex
from tokenbus.grammars.yacc import CompiledGrammar, Recognizer, compile_grammar
from tokenbus.workers.controller.backends.grammar.grammar_instance import ANY, COMPLETE, FORCED
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..tokens.real_tokenizers import sentencepiece, tekken
from .grammars import allows, by_bytes, guest_of, look

SAMPLES = Path(__file__).parents[3] / "grammars" / "samples"
EOS = 2
VOCABULARIES = ["Tekken", "SentencePiece"]


def real(name: str) -> TokenizerVocabulary:
    """A real vocabulary by its name, from the tokenizer JSON of a checkpoint."""
    return tekken() if name == "Tekken" else sentencepiece()


AICI_C = "C as AICI's grammars are written"


@cache
def compiled(name: str) -> CompiledGrammar:
    """A grammar of the library, or ``AICI_C``."""
    if name == AICI_C:
        return compile_grammar((SAMPLES / "aici" / "c.y").read_text()).grammar
    return compile_grammar(library.grammar(name)).grammar


class Text:
    """A text in the grammar backend and, byte by byte, in the reference."""

    def __init__(self, grammar: str, vocabulary: TokenizerVocabulary) -> None:
        self.vocabulary = vocabulary
        self.reference = Recognizer(compiled(grammar))
        self.guest = guest_of(vocabulary, compiled(grammar).to_bytes())
        self.place = self.guest.start()

    def write(self, text: str | bytes) -> None:
        """Adds the tokenizer's tokens of a text. Fails unless each of them is allowed."""
        self.add(*self.vocabulary.tokenize(text.encode() if isinstance(text, str) else text))

    def add(self, *tokens: int) -> None:
        """Adds tokens. Fails unless each of them is allowed."""
        for token in tokens:
            assert allows(self.guest, self.place, token), self.vocabulary.token(token)
            assert self.guest.append(self.place, [token]) == 1
            written = self.vocabulary.token(token)
            assert self.reference.read(written) == len(written)

    def allowed(self) -> Set[int]:
        """The allowed tokens. Fails unless these are exactly the tokens that the reference accepts,
        and the end of the text if the text is complete."""
        flags, tokens = look(self.guest, self.place)
        complete = self.reference.complete
        assert tokens - {EOS} == by_bytes(self.reference, self.vocabulary)
        assert (EOS in tokens) == bool(flags & COMPLETE) == complete
        assert bool(flags & ANY) == bool(tokens - {EOS})
        following = self.reference.allowed_bytes()
        texts = {self.vocabulary.token(token) for token in tokens - {EOS}}
        longest = max(texts, key=len, default=b"")
        chain = all(longest.startswith(text) for text in texts)
        assert bool(flags & FORCED) == (len(following) == 1 and not complete and chain)
        return tokens

    def texts(self) -> set[bytes]:
        """The bytes of the allowed tokens."""
        return {self.vocabulary.token(number) for number in self.allowed()} - {b""}

    def can_end(self) -> bool:
        """Whether the end of the text is allowed."""
        return allows(self.guest, self.place, EOS)


@pytest.fixture(params=VOCABULARIES)
def vocabulary(request: pytest.FixtureRequest) -> TokenizerVocabulary:
    return real(request.param)


@pytest.fixture
def c(vocabulary: TokenizerVocabulary) -> Iterator[Text]:
    text = Text("c", vocabulary)
    with closing(text.guest):
        yield text


@pytest.fixture
def json_text(vocabulary: TokenizerVocabulary) -> Iterator[Text]:
    text = Text("json", vocabulary)
    with closing(text.guest):
        yield text


def number_of(vocabulary: TokenizerVocabulary, token: bytes) -> int:
    """The id of the token with these bytes."""
    return next(n for n in range(vocabulary.size) if vocabulary.token(n) == token)


# --- a token that spans three lexemes, and more ---------------------------------------------------


def test_a_token_that_spans_several_lexemes_is_allowed_where_the_parser_takes_them_all(
    c: Text,
) -> None:
    c.write("int f(void) { return (g")
    inside = c.texts()
    # The name ends here. `();` after it would leave a parenthesis open.
    assert {b"());", b"()", b"(", b")"} <= inside
    assert not {b"();", b"];"} & inside
    c.add(number_of(c.vocabulary, b"());"))
    assert b"}" in c.texts()
    c.write("\n  return g")
    after = c.texts()
    assert {b"();", b"()", b";"} <= after
    assert b"());" not in after


def test_a_token_that_closes_brackets_is_allowed_as_deep_as_they_are_open(json_text: Text) -> None:
    brackets = [b"]", b"]]", b"]]]", b"}}", b"}", b"]}", b'"]', b'"}']
    there = {token for token in brackets if token in _tokens(json_text.vocabulary)}
    assert len(there) >= 4
    json_text.write('{"a": [[1')
    assert there & json_text.texts() == there & {b"]", b"]]"}
    json_text.write("]")
    assert there & json_text.texts() == there & {b"]", b"]}"}
    json_text.write("]")
    assert there & json_text.texts() == there & {b"}"}
    json_text.write("}")
    assert there & json_text.texts() == set()
    assert json_text.can_end()


@cache
def _tokens(vocabulary: TokenizerVocabulary) -> frozenset[bytes]:
    return frozenset(vocabulary.token(number) for number in range(vocabulary.size))


# --- a keyword that is also the beginning of a name -----------------------------------------------


def test_a_keyword_may_come_where_only_a_name_can_if_a_name_may_begin_like_it(c: Text) -> None:
    c.write("int ")
    # `return` is not a name, but `returned` is.
    assert {b"return", b"int", b"while", b"x"} <= c.texts()
    c.write("return")
    following = c.texts()
    assert all(re.match(rb"[A-Za-z0-9_\\]", token) for token in following)
    assert {b"ed", b"s", b"_", b"1"} <= following
    assert not c.can_end()
    c.write("ed")
    assert {b";", b" =", b",", b"("} <= c.texts()
    c.write(";")
    assert c.can_end()


def test_a_keyword_is_the_keyword_where_it_ends_and_no_name(c: Text) -> None:
    c.write("int f(void) { if")
    following = c.texts()
    assert b"(" in following
    assert b" =" not in following
    assert b";" not in following
    # `iffy` is a name.
    c.write("fy")
    assert {b" =", b";", b"("} <= c.texts()


def test_a_reserved_word_of_any_case_is_no_name(vocabulary: TokenizerVocabulary) -> None:
    text = Text("sql_select", vocabulary)
    with closing(text.guest):
        text.write("select a fro")
        assert {b"m", b"zen", b","} <= text.texts()
        text.write("M")
        # `froM` is the keyword FROM, or the beginning of an alias.
        following = text.texts()
        assert b" t" in following
        assert b"," not in following
        assert not text.can_end()


# --- SKIP at the very start and end ---------------------------------------------------------------


def test_skip_may_stand_before_all_else_and_is_no_text_by_itself(c: Text) -> None:
    for part in ("\n", "  ", "/* a * b */", "\n#include <a.h>\n", "// c", "\n\t"):
        c.write(part)
        assert not c.can_end()
    assert {b"int", b" ", b"/*", b"//"} <= c.texts()
    c.write("int x;")
    assert c.can_end()


def test_skip_may_stand_after_all_else_and_the_text_ends_only_where_it_is_whole(c: Text) -> None:
    c.write("int x;")
    for part, can_end in (
        (" ", True),
        ("\n\n", True),
        (" /* open", False),
        (" *", False),
        ("/", True),
        (" // not closed", True),
        ("\n", True),
        ("/", False),
    ):
        c.write(part)
        assert c.can_end() == can_end, part
    assert {b"*", b"/"} <= c.texts()


def test_white_space_around_json_is_bounded_and_whole_at_once(json_text: Text) -> None:
    for part in ("\n", "\t\t"):
        json_text.write(part)
        assert not json_text.can_end()
    assert {b"[", b"{", b"1", b"\t"} <= json_text.texts()
    assert b" " not in json_text.texts()
    json_text.write("12")
    assert json_text.can_end()
    json_text.write("\n")
    assert json_text.can_end()
    assert not json_text.texts()


# --- a character split over tokens ----------------------------------------------------------------


@pytest.mark.parametrize("character", ["\u00e9", "\u6f22", "\U0001f600", "\U0010ffff"])
def test_a_character_is_split_over_tokens_of_a_byte_each(json_text: Text, character: str) -> None:
    json_text.write('["a')
    written = character.encode()
    for at, byte in enumerate(written):
        if at:
            following = json_text.texts()
            assert all(0x80 <= token[0] < 0xC0 for token in following)
        json_text.add(number_of(json_text.vocabulary, bytes((byte,))))
    assert {b'"', b"a", b'"]'} & json_text.texts() >= {b'"', b"a"}
    json_text.write('"]')
    assert json_text.can_end()


def test_no_tokens_together_write_what_is_not_utf_8(json_text: Text) -> None:
    json_text.write('"')
    single = {n: json_text.vocabulary.token(n) for n in range(json_text.vocabulary.size)}
    bytes_of = {token: n for n, token in single.items() if len(token) == 1}
    for wrong in (b"\x80", b"\xc0", b"\xe0\x80", b"\xed\xa0", b"\xf4\x90", b"\xf5", b"\xff"):
        numbers = [bytes_of[bytes((byte,))] for byte in wrong]
        child = json_text.guest.fork(json_text.place)
        assert json_text.guest.append(child, numbers) == len(wrong) - 1
        assert not allows(json_text.guest, child, numbers[-1])
        json_text.guest.end(child)


def test_a_regex_goes_on_from_the_middle_of_a_character(vocabulary: TokenizerVocabulary) -> None:
    automaton = compile_regex("[\u00e0-\u00ff\u6f20-\u6f2f]{2,5}!")
    bytes_of = {vocabulary.token(n): n for n in range(vocabulary.size)}
    with closing(guest_of(vocabulary, automaton.to_bytes())) as guest:
        place = guest.start()
        state = automaton.start
        for byte in "\u00e9\u6f22\u00e9!".encode():
            tokens = look(guest, place)[1]
            assert tokens == by_bytes(_Run(automaton, state), vocabulary)
            assert guest.append(place, [bytes_of[bytes((byte,))]]) == 1
            state = automaton.step(state, byte)
        assert look(guest, place) == (COMPLETE, {EOS})


class _Run:
    """A text under a regular expression, byte by byte."""

    def __init__(self, automaton: Dfa, state: int) -> None:
        self._automaton = automaton
        self.place = state

    def byte(self, byte: int) -> bool:
        after = self._automaton.step(self.place, byte)
        if after:
            self.place = after
        return bool(after)

    def copy(self) -> _Run:
        return _Run(self._automaton, self.place)


# --- the lexer rules of AICI ----------------------------------------------------------------------


@pytest.fixture
def aici_c(vocabulary: TokenizerVocabulary) -> Iterator[Text]:
    text = Text(AICI_C, vocabulary)
    with closing(text.guest):
        yield text


def test_a_directive_may_begin_the_text_and_every_line_and_nothing_else(aici_c: Text) -> None:
    assert {b"#", b"int", b" ", b"\n", b"//"} <= aici_c.texts()
    aici_c.write("#define A 1 + \\\n  2\n# undef A\nint x; ")
    following = aici_c.texts()
    assert b"int" in following
    assert not any(token.lstrip(b" \t\f").startswith(b"#") for token in following)
    assert aici_c.can_end()


def test_a_name_is_a_type_from_the_letter_on_that_makes_it_one(aici_c: Text) -> None:
    # A declaration begins with a type, whose name ends with `_t`. So this name must continue.
    aici_c.write("size_")
    following = aici_c.texts()
    assert {b"t", b"type", b"x"} <= following
    assert all(re.match(rb"[A-Za-z0-9_]", token) for token in following)
    # A type is not a value, so this name must continue too.
    aici_c.write("t n = size_t")
    following = aici_c.texts()
    assert not {b";", b" ;", b",", b"("} & following
    assert {b"s", b"_", b"ype"} <= following


# --- whole texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arithmetic", "c", "json", "python_expr", "sql_select"])
def test_samples_can_be_written_and_their_masks_are_exact_on_the_way(
    name: str, vocabulary: TokenizerVocabulary
) -> None:
    """Each token of each sample is allowed. At a few positions, the whole mask is compared."""
    guest = guest_of(vocabulary, compiled(name).to_bytes())
    with closing(guest):
        steps = 0
        for sample in library.samples(name).accepted:
            tokens = vocabulary.tokenize(sample.encode())
            text = Text.__new__(Text)
            text.vocabulary, text.guest = vocabulary, guest
            text.place, text.reference = guest.start(), Recognizer(compiled(name))
            for token in tokens:
                steps += 1
                if steps in (3, 22, 50):
                    text.allowed()
                text.add(token)
            assert text.can_end()
            guest.end(text.place)


@pytest.mark.parametrize(("name", "file"), [("c", "ring.c"), (AICI_C, "aici/words.c")])
def test_a_c_file_can_be_written_by_the_tokenizer_and_byte_by_byte(
    name: str, file: str, vocabulary: TokenizerVocabulary
) -> None:
    written = (SAMPLES / file).read_bytes()
    single = {vocabulary.token(n): n for n in range(vocabulary.size)}
    guest = guest_of(vocabulary, compiled(name).to_bytes())
    with closing(guest):
        for tokens in (
            vocabulary.tokenize(written),
            [single[written[at : at + 1]] for at in range(len(written))],
        ):
            place = guest.start()
            for token in tokens:
                assert allows(guest, place, token)
                assert guest.append(place, [token]) == 1
            assert guest.complete(place)
            guest.end(place)


def test_the_masks_along_a_c_file_under_aicis_lexer_rules_are_exact(aici_c: Text) -> None:
    text = (SAMPLES / "aici" / "words.c").read_bytes()
    for step, token in enumerate(aici_c.vocabulary.tokenize(text)):
        if step % 400 == 0:
            aici_c.allowed()
        aici_c.add(token)
    assert aici_c.allowed() >= {EOS}


def test_forced_text_becomes_the_tokenizers_own_tokens(vocabulary: TokenizerVocabulary) -> None:
    forced = '{"first_name": "'
    tables = compile_regex(re.escape(forced) + '[a-z]{1,9}"}').to_bytes()
    with closing(guest_of(vocabulary, tables)) as guest:
        place = guest.start()
        tokens = guest.forced(place)
        text = vocabulary.bytes_of(tokens).decode()
        assert text
        assert forced.startswith(text)
        assert tokens == vocabulary.tokenize(forced.encode())[: len(tokens)]
        assert guest.append(place, tokens) == len(tokens)
        for token in vocabulary.tokenize((forced[len(text) :] + 'ada"}').encode()):
            assert allows(guest, place, token)
            assert guest.append(place, [token]) == 1
        assert look(guest, place) == (COMPLETE, {EOS})
