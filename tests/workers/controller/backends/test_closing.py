"""A text is closed, with few tokens, before its tokens run out. So streams end with a complete
text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenbus.clients import Client
from tokenbus.grammars import library
from tokenbus.grammars.regex import compile_regex
from tokenbus.grammars.yacc import Recognizer, compile_grammar
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.backends.grammar.grammar_instance import (
    GrammarInstance,
    GrammarModule,
)
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ....processes import Bus
from ..played import BYTES, EOS, Choose, Run, Steered, engine, vocabulary

MODULE = GrammarModule(engine)
LETTERS = vocabulary(BYTES)


AICI = Path(__file__).parents[3] / "grammars" / "samples" / "aici"


def sources() -> list[tuple[str, str, tuple[str, ...]]]:
    """The names, texts and accepted samples of the library's grammars, and of a C grammar under
    AICI's rules."""
    found = [(n, library.grammar(n), library.samples(n).accepted) for n in library.names()]
    return [*found, ("aici", (AICI / "c.y").read_text(), ((AICI / "words.c").read_text()[:600],))]


@pytest.mark.parametrize(("name", "grammar", "samples"), sources())
def test_every_beginning_of_a_sample_can_be_closed(
    name: str, grammar: str, samples: tuple[str, ...]
) -> None:
    compiled = compile_grammar(grammar).grammar
    guest = GrammarInstance(MODULE, LETTERS, compiled.to_bytes())
    closed = beginnings = 0
    for sample in samples:
        place, text = guest.start(), b""
        for byte in sample.encode():
            assert guest.append(place, [1 + byte])
            text += bytes([byte])
            beginnings += 1
            closing = guest.closing(place)
            if closing is None:
                continue
            closed += 1
            reference = Recognizer(compiled)
            whole = text + closing
            assert reference.read(whole) == len(whole), whole
            assert reference.complete, whole
        guest.end(place)
    # In C, a text that ends inside a skipped directive cannot be closed: further bytes would belong
    # to the directive.
    assert closed >= 0.98 * beginnings
    assert closed == beginnings or name in ("c", "aici")


@pytest.mark.parametrize(
    ("text", "closing"),
    [
        ("", "0"),
        ("[", "]"),
        ('{"a": [1, {"b": [[', "]]}]}"),
        ('{"a', '":0}'),
        ("[1", "]"),
        ("[1,", "0]"),
        ("tr", "ue"),
        ("-", "0"),
        ('"\\u12', '00"'),
        ("[] ", ""),
    ],
)
def test_json_is_closed_with_the_fewest_bytes(text: str, closing: str) -> None:
    tables = compile_grammar(library.grammar("json")).grammar.to_bytes()
    guest = GrammarInstance(MODULE, LETTERS, tables)
    place = guest.start()
    assert guest.append(place, [1 + byte for byte in text.encode()]) == len(text.encode())
    assert guest.closing(place) == closing.encode()
    json.loads(text + closing)


@pytest.mark.parametrize("pattern", [r"\d{4}-(0[1-9]|1[0-2])", "a*b{3,5}c?", "(the |a )?(cat|dog)"])
def test_a_regular_expression_is_closed_by_the_shortest_way(pattern: str) -> None:
    guest = GrammarInstance(MODULE, LETTERS, compile_regex(pattern).to_bytes())
    for beginning in ("", "2026", "2026-1", "aab", "bbbb", "th", "the ", "the c"):
        place = guest.start()
        taken = guest.append(place, [1 + byte for byte in beginning.encode()])
        if taken == len(beginning):
            closing = guest.closing(place)
            assert closing is not None
            assert re.fullmatch(pattern, beginning + closing.decode())


@pytest.fixture
def client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


@pytest.mark.process
def test_what_leads_where_there_is_no_time_is_taken_back() -> None:
    module = Constraints(engine, None).get("yacc")
    assert module is not None
    wide = b"(" * 12
    tokens = [*BYTES, wide]
    grammar = '%start s\n%%\ns: "a" | "[" s "]" | "(" s "tobeclosed" ")" ;'
    run = Steered(module, tokens, grammar)
    kept = [1 + ord("[")] * 40 + [tokens.index(wide)] + [1 + ord("[")] * 59
    for number, token in enumerate(kept):
        before = run.controller.mid_process((0,), memoryview(run._mask))
        if before.action is Action.SPLICE:
            kept = kept[:number]
            break
        run.post([token])
    assert before.action is Action.SPLICE
    assert before.backtrack > 0
    whole = [*kept[: len(kept) - before.backtrack], *before.tokens]
    assert len(whole) < 100
    text = run.vocabulary.bytes_of(whole)
    assert check_whole(text)
    assert run.controller.post_process(before.tokens, before.backtrack).action is Action.CONTINUE
    assert run.mid() is None
    assert "were dropped" in run.log.take()


@pytest.mark.parametrize(
    ("max_tokens", "max_bytes"),
    [
        (4000, 0),  # The closing fits even with one token for each byte.
        (920, 1000),  # One tokenization shows that the closing fits.
        (600, 30 * 900),  # The closing never fits.
    ],
)
@pytest.mark.process
def test_a_long_closing_is_not_tokenized_in_each_round(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, max_bytes: int
) -> None:
    tokenized: list[int] = []
    tokenize = TokenizerVocabulary.tokenize

    def counted(self: TokenizerVocabulary, text: bytes) -> list[int]:
        tokenized.append(len(text))
        return tokenize(self, text)

    monkeypatch.setattr(TokenizerVocabulary, "tokenize", counted)
    program = Constraints(engine, None).get("regex")
    assert program is not None
    run = Steered(program, BYTES, "[a-z]{900}", max_tokens=max_tokens)
    for _ in range(500):
        assert run.mid() == set(range(1 + ord("a"), 2 + ord("z")))
        run.post([1 + ord("b")])
    assert sum(tokenized) <= max_bytes


def test_a_text_that_never_fits_is_cut_and_says_so() -> None:
    program = Constraints(engine, None).get("regex")
    assert program is not None
    run = Steered(program, BYTES, "[a-z]{900}")
    while run.mid() is not None:
        run.post([1 + ord("b")])
    assert "the text is not closed: max_tokens is 100" in run.log.take()


@pytest.mark.parametrize(("pattern", "max_tokens"), [("[0-9]", 1), ("[0-9]{3}", 3)])
def test_a_text_that_is_complete_at_its_last_token_is_not_reported_as_cut(
    pattern: str, max_tokens: int
) -> None:
    program = Constraints(engine, None).get("regex")
    assert program is not None
    run = Steered(program, BYTES, pattern, max_tokens=max_tokens)
    for _ in range(max_tokens):
        assert run.mid()
        run.post([1 + ord("0")])
    assert run.log.take() == ""


@pytest.mark.parametrize(
    ("name", "argument", "max_tokens", "texts"),
    [
        ("regex", "[0-9]", 2, ("0", "7")),
        ("regex", "[0-9]{4}-[0-9]{2}", 8, ("2026-11", "1999-04")),
        ("regex", "[0-9]{30}", 31, ("1" * 30, "9" * 30)),
        ("choice", ["good", "poor", "none"], 5, ("good", "poor", "none")),
        ("yacc", "%start s\n%%\ns: 'a' | 'b' | '(' s ')' ;", 6, ("a", "((b))")),
    ],
)
@pytest.mark.process
def test_the_model_chooses_among_the_shortest_texts(
    name: str, argument: str | list[str], max_tokens: int, texts: tuple[str, ...]
) -> None:
    program = Constraints(engine, None).get(name)
    assert program is not None
    given = argument if isinstance(argument, str) else json.dumps(argument)
    for text in texts:
        run = Run(program, BYTES, following(text), given, max_tokens)
        assert run.text() == text
        assert run.dropped == 0


def following(text: str) -> Choose:
    """Samples the tokens of ``text`` by their positions, and then the end."""
    wanted = [*(1 + byte for byte in text.encode()), EOS]

    def choose(_seq: int, tokens: list[int], _may: set[int]) -> int:
        return wanted[len(tokens)]

    return choose


def check_whole(text: bytes) -> bool:
    """Whether a text is complete in the grammar of nested brackets above."""
    while text != b"a":
        inner = re.fullmatch(rb"\[(.*)\]|\((.*)tobeclosed\)", text)
        if inner is None:
            return False
        text = inner[1] or inner[2]
    return True


@pytest.mark.parametrize("max_tokens", [5, 24, 100])
def test_a_stream_is_whole_within_its_tokens(client: Client, max_tokens: int) -> None:
    streams = [
        client.generate(
            "x = ",
            controller="yacc",
            controller_arg="json",
            temperature=1.5,
            seed=seed,
            max_tokens=max_tokens,
        )
        for seed in range(20)
    ]
    whole = 0
    for stream in streams:
        [sequence] = stream.wait()
        assert len(sequence.tokens) <= max_tokens
        if sequence.finish_reason == "stop":
            json.loads(sequence.text)
            whole += 1
    assert whole == 20 or max_tokens < 24
    assert whole
