"""Schemas that are certain to compile quickly, and bounds on the length of their shortest
values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller.backends.compiling.bounds import RefusedGrammar
from tokenbus.workers.controller.backends.llguidance.completion import Completions
from tokenbus.workers.controller.backends.llguidance.least_length import growth, least_bytes
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.plain import (
    MAX_COPIES,
    MAX_NODES,
    MAX_UNROLLED,
    MAX_VALUES,
    is_plain,
    unrolled,
)
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.backends.llguidance.spacing import spaced_schema

from ..played import BYTES, vocabulary
from .compile_bombs import bombs, deep, intersection, product
from .llguidance_streams import Stream

LETTERS = vocabulary(BYTES)
TEXT = {"type": "string"}
NAMES = {f"name {number}": TEXT for number in range(60)}
PLAIN: dict[str, Any] = {
    "an object": {"type": "object", "properties": NAMES, "required": list(NAMES)},
    "a tree": {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    "a date": {**TEXT, "pattern": r"^[0-9]{4}-[0-9]{2}-[0-9]{2}( [a-z]{1,64})?$"},
    "alternatives": {"anyOf": [TEXT, {"type": "array", "minItems": 3, "items": {"const": "x"}}]},
    "a merged object": {
        "allOf": [
            {"type": "object", "properties": NAMES, "required": ["name 3"]},
            {"required": ["name 4", "other"], "properties": {"name 3": {"minLength": 9}}},
        ]
    },
    "required by one": {
        "type": "object",
        "properties": {"a": {"enum": ["one", "another"]}, "b": {"type": "integer"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "a tuple": {"type": "array", "prefixItems": [TEXT, {"const": 12}], "minItems": 4},
    "a name": {"type": "object", "additionalProperties": TEXT},
    "a small number": {"type": "number", "exclusiveMinimum": 2.5, "maximum": 2.5000000001},
    "a format": {**TEXT, "format": "date-time"},
    "any": {},
}


def grammar_of(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(*spaced_schema(json.dumps(schema)))


@pytest.mark.parametrize("name", PLAIN)
def test_no_process_compiles_a_plain_schema_whose_text_surely_fits(name: str) -> None:
    schema = PLAIN[name]
    matchers = Matchers()
    assert is_plain(json.dumps(schema), schema)
    assert Stream(JsonSchemaProgram(matchers), schema, LETTERS, 100_000).mid().action
    assert not matchers.processes._idle


@pytest.mark.parametrize("name", PLAIN)
def test_a_shortest_value_is_not_longer_than_the_bound(name: str) -> None:
    found = Completions(grammar_of(PLAIN[name])).start().find()
    least = least_bytes(PLAIN[name])
    assert found is not None
    assert least is not None
    assert len(found) <= least <= 10 * len(found) + 100


def test_what_has_no_bound_that_could_be_told_has_none() -> None:
    node = {"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/node"}}}
    for schema in (
        {"$defs": {"node": {"anyOf": [node, TEXT]}}, "$ref": "#/$defs/node"},
        {**TEXT, "allOf": [{"pattern": "a+$"}, {"pattern": "^b+"}]},
        {"type": "array", "minItems": 10**6},
        {"type": "number", "minimum": 1e300},
        {**TEXT, "minLength": "many"},
        {**TEXT, "pattern": "^(a{99}b){99}$"},
    ):
        assert least_bytes(schema) is None


def test_what_an_item_requires_bounds_how_a_text_grows() -> None:
    inner = {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "required": ["a"]}
    node = {"properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    for schema, item, string in (
        (True, 4, 0),
        ({"type": "array", "items": TEXT}, 9, 0),
        ({"type": "object", "properties": {"x": inner}}, 21, 0),
        ({"type": "array", "items": {**TEXT, "pattern": "^[a-z]{30}$"}}, 72, 66),
        (node, 80, 0),
        ({"type": "array", "items": {"type": "array", "minItems": float("inf")}}, 300, 0),
        ({"x-guidance": {"item_separator": " *, *"}}, 300, 300),
    ):
        found = growth(schema)
        assert item // 2 <= found.item <= 2 * item, schema
        assert string // 2 <= found.string <= string, schema


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("^abc$", 5, 5),
        ("a{3}", 3, 3),
        ("a{2,5}b", 3, 6),
        ("(ab{2}){3,}", 9, 9),
        ("[{}]{4}", 4, 4),
        (r"\{{0,9}x", 2, 10),
        ("((a{10}){10}){10}", 1000, 1000),
        ("a{1,99999999999999}", 1, 999_999_999),
    ],
)
def test_the_length_of_a_pattern_counts_its_repetitions(
    pattern: str, least: int, most: int
) -> None:
    assert unrolled(pattern) == (least, most)


def test_what_may_take_long_is_not_plain() -> None:
    many = {f"p{number}": TEXT for number in range(MAX_NODES)}
    for schema in (
        intersection(5),
        product(8, 4),
        deep("properties", 60),
        {"type": "object", "properties": many},
        {"type": "object", "properties": dict.fromkeys(many, True)},
        {"type": "object", "required": [f"p{number}" for number in range(MAX_VALUES)]},
        {"const": list(range(MAX_VALUES))},
        {**TEXT, "pattern": "^(a{1,50}b){1,50}$"},
        {**TEXT, "pattern": "a" * MAX_UNROLLED},
        {"type": "array", "minItems": 10_000},
        {"$ref": "https://example.org/schema.json"},
        {"$ref": "#a", "$defs": {"a": {**TEXT, "$anchor": "a"}}},
        {"allOf": [{"$ref": "#/$defs/%61"}] * 2, "$defs": {"a": {"anyOf": [TEXT] * MAX_COPIES}}},
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, TEXT]}}, "$ref": "#/$defs/a"},
    ):
        assert not is_plain(json.dumps(schema), schema)
    assert sum(is_plain(json.dumps(one.schema), one.schema) for one in bombs()) < 30


@pytest.mark.process
def test_a_plain_schema_that_is_refused_names_the_part_at_fault() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    assert is_plain(json.dumps(schema), schema)
    matchers = Matchers()
    with pytest.raises(RefusedGrammar, match=r'"uniqueItems"\] \(in \$\.properties\.a\)'):
        matchers.get(LETTERS, grammar_of(schema))
    matchers.close()


@pytest.mark.process
def test_a_text_that_may_not_fit_is_searched_for_at_the_start() -> None:
    matchers = Matchers()
    program = JsonSchemaProgram(matchers)
    with pytest.raises(RequestError, match="is 9, but the shortest text takes 10 tokens; it must"):
        Stream(program, {**TEXT, "minLength": 8}, LETTERS, 9)
    assert not matchers.processes._idle
    matchers.close()
