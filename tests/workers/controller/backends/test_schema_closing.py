"""Texts under schemas and Lark grammars are complete within ``max_tokens``, whichever tokens are
sampled."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller.backends.llguidance import matchers as of_matchers
from tokenbus.workers.controller.backends.llguidance.closing import Closing
from tokenbus.workers.controller.backends.llguidance.completion import Completions
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import (
    JsonSchemaProgram,
    LarkProgram,
)
from tokenbus.workers.controller.backends.llguidance.spacing import spaced_lark, spaced_schema

from ..played import BYTES, vocabulary
from .llguidance_streams import TOKENS, Stream, push, walked

pytestmark = pytest.mark.process

LETTERS = vocabulary(BYTES)
SHORT = vocabulary(TOKENS)

TREE = {
    "$defs": {
        "node": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "kind": {"const": "branch"},
                        "left": {"$ref": "#/$defs/node"},
                        "right": {"$ref": "#/$defs/node"},
                    },
                    "required": ["kind", "left", "right"],
                    "additionalProperties": False,
                },
                {"enum": ["leaf", "some other leaf"]},
            ]
        }
    },
    "$ref": "#/$defs/node",
}
OPTIONAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "when": {"type": "string", "format": "date-time"},
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.(org|net)$"},
        "tags": {"type": "array", "items": {"enum": ["one", "another"]}, "minItems": 3},
        "place": {"type": "object", "required": ["far", "away"], "additionalProperties": False},
    },
    "required": ["name"],
    "additionalProperties": False,
}
OPTIONAL["properties"]["place"]["properties"] = {  # type: ignore[index]
    "far": {"type": "integer", "minimum": 1000},
    "away": {"type": "string", "minLength": 12},
}
COUNTED = {
    "type": "object",
    "minProperties": 3,
    "patternProperties": {"^[a-z-]+$": {"$ref": "#/$defs/place"}},
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"far": {"type": "integer"}},
            "required": ["far"],
            "additionalProperties": False,
        }
    },
}
NAMED = {
    "type": "object",
    "properties": {
        "ab": {"type": "array", "items": {"type": "integer"}, "minItems": 4},
        "aba": {"type": "string", "minLength": 12},
        "b+": {"type": "string", "pattern": "^.{6}(:.*)?$"},
    },
    "additionalProperties": {"type": "string"},
}
"""Any property name is allowed. Some names require long values."""
SCHEMAS: dict[str, tuple[dict[str, Any], str]] = {
    "any": ({}, r"\d|\"\"|\[\]|\{\}"),
    "object": ({"type": "object"}, r"\{\}"),
    "tree": (TREE, '"leaf"'),
    "optional": (OPTIONAL, r'\{"name": ""\}'),
    "string": ({"type": "string", "minLength": 30}, '"[^"]{30}"'),
    "number": ({"type": "number", "exclusiveMinimum": 2.5, "maximum": 2.75}, r"2\.[67]"),
    "integers": ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, r"\[\d, \d, \d\]"),
    "named": (NAMED, r"\{\}"),
    "counted": (COUNTED, r'\{("[a-z]{1,3}": \{"far": \d\}(, )?){3}\}'),
    "anywhere": ({"type": "string", "pattern": "long|[0-9]+:[0-9]{2}"}, '"([0-9]:[0-9]{2}|long)"'),
}


def schema_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(*spaced_schema(json.dumps(schema)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_search_finds_a_shortest_value(name: str) -> None:
    schema, shortest = SCHEMAS[name]
    found = Completions(schema_grammar(schema)).start().find()
    assert found is not None
    assert re.fullmatch(shortest, found.decode())
    jsonschema.validate(json.loads(found), schema)


@pytest.mark.parametrize(
    ("text", "completion"),
    [
        ("", '{"name": ""}'),
        ('{"na', 'me": ""}'),
        ('{"name": "some free text', '"}'),
        ('{"name": "\\', '""}'),
        ('{"name": "", "when": "1999-1', '0-30T00:00:00+00:00"}'),
        ('{"name": "", "tags": [', '"one", "one", "one"]}'),
        ('{"name": "", "place": {"', 'far": 1000, "away": "000000000000"}}'),
    ],
)
def test_a_text_is_completed_from_where_it_is(text: str, completion: str) -> None:
    one = Completions(schema_grammar(OPTIONAL)).start()
    assert one.append(text.encode())
    found = one.find()
    assert found is not None
    jsonschema.validate(json.loads(text.encode() + found), OPTIONAL)
    assert len(found) <= len(completion)


@pytest.mark.parametrize(
    "text", ["", '{"', '{"far', '{"far": {"far": 1}, "fa', '{"b": {"far": 7}, "a": {"far"', '{"a":']
)
def test_a_completion_has_no_name_twice_where_names_count(text: str) -> None:
    one = Completions(schema_grammar(COUNTED)).start()
    assert one.append(text.encode())
    found = one.find()
    assert found is not None
    jsonschema.validate(json.loads(text.encode() + found), COUNTED)
    assert one.keep(found)


def test_a_completion_with_a_name_twice_is_none_where_names_count() -> None:
    one = Completions(schema_grammar(COUNTED)).start()
    assert one.append(b'{"a": {"far": 1}, ')
    twice, distinct = (b'"%s": {"far": 1}, "c": {"far": 1}}' % name for name in (b"a", b"b"))
    assert not one.fits(twice)
    assert not one.keep(twice)
    assert one.keep(distinct)
    assert one.find() == distinct


def test_a_completion_stays_where_the_text_goes_its_way_and_beside_it() -> None:
    one = Completions(schema_grammar(OPTIONAL)).start()
    for part, completion in (
        (b"", b'{"name": ""}'),
        (b'{"name"', b': ""}'),
        (b': "free', b'"}'),
        (b" text", b'"}'),
        ("ü".encode()[:1], None),
        ("ü".encode()[1:], b'"}'),
        (b'"}', b""),
    ):
        assert one.append(part)
        found = one.find()
        assert found is not None
        assert completion in (None, found)
    assert not one.append(b"x")


GRAMMARS = {
    "nested": ('start: "a" | "(" start ")" | "[" start "]]]]"', r"[(\[]*a[)\]]*"),
    "sum": ('start: T ("+" T)*\nT: /[0-9]{2,4}/', r"[0-9]{2,4}(\+[0-9]{2,4})*"),
    "json": ('start: "=" %json {"type": "array", "minItems": 2}', r"=\[.*,.*\]"),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_text_of_a_lark_grammar_is_whole(matchers: Matchers, name: str) -> None:
    grammar, pattern = GRAMMARS[name]
    for seed in range(12):
        rng = random.Random(seed)
        stream = Stream(LarkProgram(matchers), grammar, SHORT, rng.randint(9, 60))
        text = walked(stream, rng, taken_back=True)
        assert re.fullmatch(pattern, text.decode(), re.DOTALL)
        one = Completions(
            json.dumps({"grammars": [{"lark_grammar": spaced_lark(grammar)}]})
        ).start()
        assert one.append(text)
        assert one.find() == b""


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_value_of_a_schema_is_whole_at_every_limit(matchers: Matchers, name: str) -> None:
    schema, _ = SCHEMAS[name]
    program = JsonSchemaProgram(matchers)
    shortest = Stream(program, schema, SHORT).controller._grammar.shortest_tokens  # type: ignore[attr-defined]
    assert shortest is not None
    for seed in range(12):
        rng = random.Random(seed)
        most = len(shortest) + (seed if seed < 4 else rng.randint(4, 150))
        stream = Stream(program, schema, SHORT, most)
        text = walked(stream, rng)
        assert len(stream.tokens) <= most
        jsonschema.validate(json.loads(text), schema)
        assert stream.controller.text_end() in ("closed", "complete")  # type: ignore[attr-defined]


def written(stream: Stream, text: bytes) -> Stream:
    """Writes a text byte by byte, except where tokens are forced; returns the stream."""
    while text:
        answer = stream.mid()
        tokens = list(answer.tokens) or [1 + text[0]]
        assert answer.tokens or tokens[0] in stream.allowed
        push(stream, tokens)
        text = text.removeprefix(stream.vocabulary.bytes_of(tokens))  # type: ignore[attr-defined]
    stream.mid()
    return stream


def test_a_property_that_could_not_be_ended_is_not_begun(matchers: Matchers) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "long": {"type": "string", "minLength": 40}},
        "required": ["name"],
        "additionalProperties": False,
    }
    program = JsonSchemaProgram(matchers)
    comma = 1 + ord(",")
    for most, begun in ((40, False), (60, False), (120, True), (4000, True)):
        stream = written(Stream(program, schema, LETTERS, most), b'{"name": "a"')
        assert (comma in stream.allowed) == begun, most
        assert 1 + ord("}") in stream.allowed


def test_a_string_without_a_bound_ends_at_a_word_and_a_number_at_once(matchers: Matchers) -> None:
    program = JsonSchemaProgram(matchers)
    space, letter, quote, digit = (1 + byte for byte in b' a"1')
    text = written(Stream(program, {"type": "string"}, LETTERS, 60), b'"' + b"word " * 10)
    assert {space, letter, quote} <= text.allowed
    text = written(Stream(program, {"type": "string"}, LETTERS, 60), b'"' + b"word " * 10 + b"word")
    assert {letter, quote} <= text.allowed
    assert space not in text.allowed
    numbers = {"type": "array", "items": {"type": "integer"}}
    text = written(Stream(program, numbers, LETTERS, 60), b"[" + b"1" * 20)
    assert digit in text.allowed
    text = written(Stream(program, numbers, LETTERS, 60), b"[" + b"1" * 53)
    assert text.allowed == {1 + ord("]")}


def test_a_property_begun_near_the_end_is_one_that_fits(matchers: Matchers) -> None:
    """A name is allowed only if the tokens that are left suffice for its value."""
    properties = {"large": {"type": "string", "minLength": 70}, "brief": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    stream = written(Stream(JsonSchemaProgram(matchers), schema, LETTERS, 64), b'{"')
    assert stream.allowed == {1 + ord("b")}


def test_a_limit_below_the_shortest_value_is_refused_with_what_it_takes(matchers: Matchers) -> None:
    program = JsonSchemaProgram(matchers)
    with pytest.raises(RequestError, match="is 9, but the shortest text takes 10 tokens; it must"):
        Stream(program, {"type": "string", "minLength": 8}, LETTERS, 9)
    Stream(program, {"type": "string", "minLength": 8}, LETTERS, 10)


def test_a_fork_is_closed_as_the_sequence_is(matchers: Matchers) -> None:
    stream = Stream(JsonSchemaProgram(matchers), OPTIONAL, SHORT, 120)
    rng = random.Random(3)
    for _ in range(6):
        answer = stream.mid()
        push(stream, answer.tokens or [rng.choice(sorted(stream.allowed - {0}))])
    controller = stream.controller
    other = controller.fork(controller._host)  # type: ignore[attr-defined]
    for one in (controller, other):
        stream.controller, text = one, list(stream.tokens)
        jsonschema.validate(json.loads(walked(stream, rng)), OPTIONAL)
        stream.tokens = text


def test_completions_are_not_searched_for_while_there_is_much_room(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = Closing.look

    def counted(self: Closing, text: Sequence[int]) -> Any:
        looks.append(len(text))
        return look(self, text)

    monkeypatch.setattr(Closing, "look", counted)
    stream = Stream(JsonSchemaProgram(matchers), {"type": "string"}, LETTERS, 4000)
    for _ in range(640):
        push(stream, stream.mid().tokens or [1 + ord("a")])
    assert len(looks) <= 20


@pytest.mark.parametrize(
    ("value", "begin"),
    [
        ({"type": "integer"}, b'{"'),
        ({"type": "string", "pattern": "^.*$"}, b'{"a": "'),
        ({"type": "string", "pattern": "^.{3}"}, b'{"a": "'),
    ],
)
def test_nor_at_each_token_of_a_name_or_a_string_of_any_text_near_the_end(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch, value: object, begin: bytes
) -> None:
    looks: list[int] = []
    look = Closing.look

    def counted(self: Closing, text: Sequence[int]) -> Any:
        looks.append(len(text))
        return look(self, text)

    monkeypatch.setattr(Closing, "look", counted)
    schema = {"type": "object", "additionalProperties": value}
    stream = written(Stream(JsonSchemaProgram(matchers), schema, LETTERS, 90), begin + b"abc")
    before = len(looks)
    written(stream, b"x" * 62)
    assert len(looks) - before <= 2
    jsonschema.validate(json.loads(walked(stream, random.Random(1))), schema)


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_shortest_value_is_searched_for_in_a_process_only_where_that_takes_long(
    monkeypatch: pytest.MonkeyPatch, at_hand: bool
) -> None:
    monkeypatch.setattr(of_matchers, "SEARCH_S", 3600.0 if at_hand else 0.0)
    matchers = Matchers()
    value = {"type": "string", "minLength": 200}
    grammar = Stream(JsonSchemaProgram(matchers), value, SHORT, 210).controller._grammar  # type: ignore[attr-defined]
    assert re.fullmatch(rb'"[^"]{200}"', grammar.shortest_text)
    assert len(matchers.processes._idle) == (not at_hand)
    matchers.close()
