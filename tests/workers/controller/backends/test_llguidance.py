"""The built-in constraints json_schema and lark: masks, forced tokens, forks, samples."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import (
    JsonSchemaProgram,
    LarkProgram,
)
from tokenbus.workers.controller.interface import COMPLETE, Action
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..played import EOS, Run, vocabulary
from ..tokens.real_tokenizers import sentencepiece, sentencepiece_json, tekken
from ..tokens.small_tokenizers import byte_level, unigram
from ..tokens.small_tokenizers import vocabulary as tokenizer_vocabulary
from .llguidance_streams import PERSON, SPECIAL, TOKENS, Stream

pytestmark = pytest.mark.process


# --- masks ----------------------------------------------------------------------------------------


def dumped(values: Sequence[object]) -> list[str]:
    return [json.dumps(value, ensure_ascii=False) for value in values]


AGES: list[dict[str, object]] = [{}] + [{"age": age} for age in range(8, 113)]
PERSONS = [{"name": name, **age} for name in ("red", "né") for age in AGES]
VALUES = ["red", "re", "a", None, True, 10, 1, {"a": [1]}]
NULLS = {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 2}


def lists(of: Sequence[object], most: int) -> list[list[object]]:
    return [list(items) for n in range(most + 1) for items in itertools.product(of, repeat=n)]


SCHEMAS: list[tuple[object, list[str]]] = [
    (PERSON, dumped(PERSONS)),
    ({"enum": VALUES}, dumped(VALUES)),
    (
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        dumped(lists([True, False], 3)),
    ),
    (
        {"type": "string", "pattern": "^(ab)*a?$", "maxLength": 6},
        dumped([("ab" * 4)[:n] for n in range(7)]),
    ),
    ({"anyOf": [{"type": "null"}, {"const": "name"}]}, dumped([None, "name"])),
    (
        {"$defs": {"n": NULLS}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        dumped(lists([[None], [None, None]], 2)),
    ),
]
GRAMMARS = [
    ('start: "a" ("b" "+"){0,2} | /né?/', ["a", "ab+", "ab+b+", "n", "né"]),
    ('start: e\ne: "a" | "(" e ")"', ["(" * n + "a" + ")" * n for n in range(40)]),
]


def check_masks(stream: Stream, texts: set[bytes], rng: random.Random) -> None:
    """Follows a random text of a language. Each mask must equal the mask by brute force."""
    while len(stream.text) < 30:
        here = stream.text
        live = [text for text in texts if text.startswith(here)]
        may = {
            number
            for number, token in enumerate(TOKENS)
            if token and any(text.startswith(here + token) for text in live)
        }
        answer = stream.mid()
        if answer.action is Action.STOP:
            assert here in texts
            assert not may
            return
        if answer.action is Action.SPLICE:
            forced = here + b"".join(map(stream.vocabulary.token, answer.tokens))
            assert all(text.startswith(forced) for text in live)
            assert stream.push(answer.tokens) is Action.CONTINUE
            continue
        assert stream.allowed == (may | {EOS} if here in texts else may)
        token = rng.choice(sorted(stream.allowed))
        if token == EOS:
            assert stream.push([token]) is Action.STOP
            return
        assert stream.push([token]) is Action.CONTINUE


@pytest.mark.parametrize(("schema", "texts"), SCHEMAS)
def test_a_mask_of_a_schema_has_the_tokens_that_a_value_may_go_on_with(
    matchers: Matchers, schema: object, texts: list[str]
) -> None:
    language = {text.encode() for text in texts}
    for seed in range(25):
        stream = Stream(JsonSchemaProgram(matchers), schema, vocabulary(TOKENS))
        check_masks(stream, language, random.Random(seed))


@pytest.mark.parametrize(("grammar", "texts"), GRAMMARS)
def test_a_mask_of_a_lark_grammar_has_the_tokens_that_a_text_may_go_on_with(
    matchers: Matchers, grammar: str, texts: list[str]
) -> None:
    language = {text.encode() for text in texts}
    for seed in range(25):
        stream = Stream(LarkProgram(matchers), grammar, vocabulary(TOKENS))
        check_masks(stream, language, random.Random(seed))


def test_nothing_is_left_of_what_the_mask_held_before(matchers: Matchers) -> None:
    stream = Stream(JsonSchemaProgram(matchers), {"type": "integer"}, vocabulary(TOKENS))
    assert stream.mid().masked
    assert max(stream.allowed) < len(TOKENS)
    assert SPECIAL not in stream.allowed


def test_special_tokens_and_padding_are_in_no_text(matchers: Matchers) -> None:
    on = tokenizer_vocabulary(byte_level(), size=500, eos=[0])
    stream = Stream(LarkProgram(matchers), r"start: /(.|\n)*/", on)
    assert stream.mid().masked
    expected = {number for number in range(500) if on.token(number)} | {0}
    # llguidance refuses bytes that cannot occur in UTF-8.
    bad = {n for n in expected if on.token(n) and not is_begun_utf8(on.token(n))}
    assert stream.allowed == expected - bad


def is_begun_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.end == len(text) and "end of data" in error.reason
    return True


def test_each_end_of_sequence_is_allowed_exactly_where_the_text_is_complete(
    matchers: Matchers,
) -> None:
    on = TokenizerVocabulary.from_tokens([*TOKENS, b"", b"x"], [EOS, len(TOKENS)], "two ends")
    for end in on.eos_ids:
        stream = Stream(LarkProgram(matchers), 'start: ("a" | "b")+', on)
        assert stream.mid().masked
        assert not stream.allowed & set(on.eos_ids)
        stream.push([1 + ord("a")])
        assert stream.mid().masked
        assert stream.allowed >= set(on.eos_ids)
        assert stream.push([end]) is Action.STOP


@pytest.mark.parametrize("more", [0, 1, 31 - len(TOKENS) % 32, 32 - len(TOKENS) % 32])
def test_a_vocabulary_without_an_end_has_none_in_its_masks(matchers: Matchers, more: int) -> None:
    tokens = [b"zero", *TOKENS[1:], *([b"pad"] * more)]
    on = TokenizerVocabulary.from_tokens(tokens, [], f"endless {more}")
    stream = Stream(LarkProgram(matchers), 'start: ("a" | "b")+ "!"?', on)
    for _ in range(5):
        assert stream.mid().masked
        assert all(set(on.token(n)) <= set(b"ab!") for n in stream.allowed)
        stream.push([1 + ord("a")])
    assert stream.push([1 + ord("!")]) is Action.CONTINUE
    assert stream.mid().action is Action.STOP


def test_an_empty_text_that_is_all_there_is_stops_at_once(matchers: Matchers) -> None:
    assert Stream(LarkProgram(matchers), 'start: ""', vocabulary(TOKENS)).mid() == COMPLETE


# --- forced tokens, forks -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tekken", "sentencepiece", "unigram", "byte level"])
def test_forced_text_has_the_tokenizers_own_tokens(matchers: Matchers, name: str) -> None:
    make: dict[str, Callable[[], TokenizerVocabulary]] = {
        "tekken": tekken,
        "sentencepiece": sentencepiece,
        "unigram": lambda: tokenizer_vocabulary(unigram(), eos=[2]),
        "byte level": lambda: tokenizer_vocabulary(byte_level(), eos=[0]),
    }
    on = make[name]()
    value = {"The quick brown fox": "Größe, 你好, 👩‍👩‍👧", "jumps": [1, None]}
    text = json.dumps(value, ensure_ascii=False)
    schema = {"const": value}
    on.fingerprint = name
    stream = Stream(JsonSchemaProgram(matchers), schema, on)
    while (answer := stream.mid()).action is not Action.STOP:
        assert answer.action is Action.SPLICE
        assert stream.push(answer.tokens) is Action.CONTINUE
    assert stream.text.decode() == text
    assert stream.tokens == on.tokenize(text.encode())


def test_no_more_is_appended_than_the_sequence_may_have(matchers: Matchers) -> None:
    stream = Stream(LarkProgram(matchers), 'start: "a"{50}', vocabulary(TOKENS), max_tokens=50)
    while len(stream.tokens) < 50:
        assert stream.push(stream.mid().tokens) is Action.CONTINUE
    assert stream.text == b"a" * 50
    assert stream.mid().action is Action.STOP


def test_a_long_forced_text_is_appended_in_a_few_steps(
    matchers: Matchers,
) -> None:
    text = "what must come, " * 1000
    stream = Stream(JsonSchemaProgram(matchers), {"const": text}, tekken())
    assert stream.random(random.Random(0), 5)
    assert json.loads(stream.text) == text


def test_a_request_under_a_schema_is_played_to_its_end(matchers: Matchers) -> None:
    rng = random.Random(5)
    run = Run(
        JsonSchemaProgram(matchers),
        TOKENS,
        lambda seq, tokens, may: rng.choice(sorted(may)),
        json.dumps(PERSON),
        200,
    )
    assert run.ended == {0: "stop"}
    assert set(json.loads(run.text())) <= {"name", "age"}


def test_a_fork_goes_its_own_way(matchers: Matchers) -> None:
    schema = {"type": "array", "items": {"enum": ["one", "two"]}, "maxItems": 20, "minItems": 5}
    stream = Stream(JsonSchemaProgram(matchers), schema, tekken())
    for _ in range(4):
        answer = stream.mid()
        stream.push(answer.tokens or [min(stream.allowed)])
    streams = [stream, *(stream.fork() for _ in range(6))]
    begun = stream.text
    for seed, one in enumerate(streams):
        assert one.random(random.Random(seed))
        assert one.text.startswith(begun)
        assert set(json.loads(one.text)) <= {"one", "two"}
    assert len({one.text for one in streams}) > 3


# --- samples --------------------------------------------------------------------------------------

ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-\\d{4}$"},
        "amount": {"type": "number", "minimum": 0, "maximum": 1000},
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "paid": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 12},
        "when": {"type": "string", "format": "date"},
        "lines": {
            "type": "array",
            "minItems": 1,
            "maxItems": 3,
            "items": {
                "type": "object",
                "properties": {
                    "sku": {"enum": ["A1", "B2", "Ü3"]},
                    "extra": {"type": ["null", "boolean"]},
                },
                "required": ["sku"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["id", "amount", "count", "lines"],
    "additionalProperties": False,
}


def check_order(value: Any) -> None:
    assert {"id", "amount", "count", "lines"} <= set(value) <= set(ORDER["properties"])  # type: ignore[call-overload]
    assert re.fullmatch(r"[A-Z]{2}-\d{4}", value["id"])
    assert isinstance(value["amount"], int | float)
    assert 0 <= value["amount"] <= 1000
    assert type(value["count"]) is int
    assert 1 <= value["count"] <= 99
    assert isinstance(value.get("paid", True), bool)
    assert len(value.get("note", "")) <= 12
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", value.get("when", "2020-01-01"))
    assert 1 <= len(value["lines"]) <= 3
    for line in value["lines"]:
        assert {"sku"} <= set(line) <= {"sku", "extra"}
        assert line["sku"] in ("A1", "B2", "Ü3")
        assert line.get("extra") in (None, True, False)


@pytest.mark.parametrize("name", ["tekken", "sentencepiece"])
def test_samples_of_a_schema_are_values_of_it(matchers: Matchers, name: str) -> None:
    on = tekken()
    if name == "sentencepiece":
        on = TokenizerVocabulary.from_json(
            sentencepiece_json(), size=33_000, eos=[2], fingerprint="sp"
        )
    ended = 0
    for seed in range(150):
        stream = Stream(JsonSchemaProgram(matchers), ORDER, on)
        if stream.random(random.Random(seed)):
            ended += 1
            check_order(json.loads(stream.text))
    assert ended > 140


def test_samples_of_a_lark_grammar_are_texts_of_it(
    matchers: Matchers,
) -> None:
    grammar = """
        start: sum
        sum: product (("+" | "-") product)*
        product: atom (("*") atom)*
        atom: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,3}/
        %ignore / {1,2}/
    """
    ended = 0
    for seed in range(150):
        stream = Stream(LarkProgram(matchers), grammar, tekken())
        if stream.random(random.Random(seed), 60):
            ended += 1
            assert isinstance(eval(stream.text.decode().strip()), int)
    assert ended > 40


def test_any_schema_gives_json(matchers: Matchers) -> None:
    ended = 0
    for seed in range(100):
        stream = Stream(JsonSchemaProgram(matchers), "true", vocabulary(TOKENS))
        if stream.random(random.Random(seed), 300):
            ended += 1
            json.loads(stream.text)
    assert ended > 40


def test_a_schema_says_itself_how_it_is_spaced(matchers: Matchers) -> None:
    schema = {"const": {"a": [1, 2]}, "x-guidance": {"item_separator": ",", "key_separator": ":"}}
    stream = Stream(JsonSchemaProgram(matchers), schema, vocabulary(TOKENS))
    assert stream.random(random.Random(0))
    assert stream.text == b'{"a":[1,2]}'


def test_sequences_of_one_grammar_run_at_the_same_time(
    matchers: Matchers,
) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    texts: list[bytes] = []

    def run(seed: int) -> None:
        for i in range(6):
            stream = Stream(JsonSchemaProgram(matchers), ORDER, tekken())
            for _ in range(5):
                answer = stream.mid()
                stream.push(answer.tokens or [min(stream.allowed)])
            for one in (stream, stream.fork()):
                one.random(random.Random(100 * seed + i))
                texts.append(one.text)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
    assert len(texts) > 60
    for text in texts:
        check_order(json.loads(text))
