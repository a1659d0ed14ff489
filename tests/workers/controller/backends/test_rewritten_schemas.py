"""Masks enforce the keywords of a schema that are rewritten (``protocol.json_schema``): random
texts under the masks are valid for ``jsonschema``."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.controller.backends.compiling.bounds import Bounds
from tokenbus.workers.controller.backends.compiling.processes import Processes
from tokenbus.workers.controller.backends.compiling.tasks import Kind
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.backends.llguidance.schemas import Rewriting, implemented

from ..played import vocabulary
from .llguidance_streams import TOKENS, Stream, walked

pytestmark = pytest.mark.process

SHORT = vocabulary(TOKENS)
MAX_TOKENS = 60
NAMES = st.sampled_from(["name", "age", "ab"])
WORDS = st.sampled_from(["red", "name", "ab", ""])
VALUES = st.one_of(WORDS, st.integers(0, 12), st.booleans(), st.none())
SOME_VALUES = st.lists(VALUES, min_size=1, max_size=3)
PROPERTIES: dict[str, Any] = {
    "name": {"enum": ["red", "né", ""]},
    "age": {"type": "integer", "minimum": 8, "maximum": 12},
    "ab": {"type": "boolean"},
}
OBJECT: dict[str, Any] = {"type": "object", "properties": PROPERTIES, "additionalProperties": False}
CONDITIONS = st.one_of(
    st.builds(lambda name: {"required": [name]}, NAMES),
    st.builds(
        lambda name, value: {"properties": {name: {"const": value}}, "required": [name]},
        NAMES,
        st.sampled_from(["red", 10, True]),
    ),
)
ITEMS = {"type": "array", "maxItems": 4, "items": {"enum": ["red", "ab", 10]}}


def objects(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords).map(lambda more: {**OBJECT, **more})


SCHEMAS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "not values": SOME_VALUES.map(lambda values: {"not": {"enum": values}, "maxLength": 9}),
    "not types": st.lists(st.sampled_from(["null", "string", "array", "object"]), max_size=3).map(
        lambda kinds: {"not": {"type": kinds}} if kinds else {"type": "null"}
    ),
    "not a pattern": st.sampled_from(["^a", "b$", "^[a-n]*$", "(ab|red)", r"\d"]).map(
        lambda pattern: {"type": "string", "maxLength": 6, "not": {"pattern": pattern}}
    ),
    "not in an object": objects(**{"not": CONDITIONS}),
    "if": objects(**{"if": CONDITIONS, "then": CONDITIONS, "else": CONDITIONS}),
    "oneOf": st.lists(CONDITIONS, min_size=1, max_size=3).map(
        lambda some: {**OBJECT, "oneOf": some}
    ),
    "dependentRequired": objects(
        dependentRequired=st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2)
    ),
    "dependentSchemas": objects(dependentSchemas=st.dictionaries(NAMES, CONDITIONS, max_size=2)),
    "propertyNames": st.sampled_from(
        [
            {"enum": ["name", "b+"]},
            {"pattern": "^[ab]+$"},
            {"minLength": 2, "maxLength": 3},
            {"not": {"enum": ["name", "a"]}},
            {"not": {"pattern": "a"}},
        ]
    ).map(
        lambda names: {
            "type": "object",
            "additionalProperties": {"const": 1},
            "propertyNames": names,
        }
    ),
    "patternProperties": st.sampled_from(["a", "^n", "b$"]).map(
        lambda pattern: {"type": "object", "patternProperties": {pattern: False}}
    ),
    "contains": VALUES.map(lambda value: {"type": "array", "contains": {"const": value}}),
    "uniqueItems": st.integers(0, 3).map(
        lambda least: {**ITEMS, "uniqueItems": True, "minItems": least}
    ),
    "unevaluatedProperties": st.lists(NAMES, max_size=2, unique=True).map(
        lambda names: {
            "type": "object",
            "allOf": [{"properties": {name: PROPERTIES[name] for name in names}}],
            "unevaluatedProperties": False,
        }
    ),
    "pattern": st.sampled_from(["^(?!ab)[a-c]+$", "^(?=.a)[a-e]{3}", "^(?=a)(?!aba)ab."]).map(
        lambda pattern: {"type": "string", "maxLength": 6, "pattern": pattern}
    ),
    "format": st.sampled_from(
        [
            *("uri-reference", "iri", "uri-template", "json-pointer", "relative-json-pointer"),
            *("idn-hostname", "idn-email", "regex", "zip"),
        ]
    ).map(lambda name: {"type": "string", "format": name}),
}
SAMPLES: list[Any] = [
    *(None, True, False, 0, 1, "", "a", "red", [], ["red"], {}, {"name": "red"}, {"age": 10}),
    *({"ab": True}, {"name": "", "age": 9}, {"name": "red", "age": 10, "ab": True}),
]
FORMATS = Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize("draft", ["draft-04", "draft-06", "draft-07"])
@pytest.mark.parametrize("values", [[0, 0.5], [-1.5, -1], [1.2, 1.5], [2, 3], [False], [True, 1]])
def test_no_text_is_a_value_that_is_not_allowed(
    matchers: Matchers, draft: str, values: list[Any]
) -> None:
    schema = {"$schema": f"http://json-schema.org/{draft}/schema#", "not": {"enum": values}}
    for value in values:
        stream = Stream(JsonSchemaProgram(matchers), schema, SHORT)
        for byte in json.dumps(value).encode():
            stream.mid()
            if 1 + byte not in stream.allowed:
                break
            stream.push([1 + byte])
        else:
            stream.mid()
            assert not stream.allowed & {0}


def started(program: JsonSchemaProgram, schema: dict[str, Any]) -> Stream | None:
    """A sequence under a schema; None if no value matches the schema."""
    try:
        return Stream(program, schema, SHORT, MAX_TOKENS)
    except RequestError as error:
        if "nsatisfiable" not in error.message:
            raise
        return None


class Counted(Processes):
    """Counts the tasks that rewrite schemas."""

    def __init__(self) -> None:
        super().__init__(Bounds())
        self.tasks: list[bytes] = []

    def run(self, kind: Kind, grammar: bytes) -> bytes:
        assert kind == "rewrite"
        self.tasks.append(grammar)
        return super().run(kind, grammar)


def test_a_process_rewrites_a_schema_once() -> None:
    processes = Counted()
    rewriting = Rewriting(processes)
    schema = json.dumps({"not": {"enum": [1, 2.0]}, "type": "number"})
    plain = json.dumps({"type": "number"})
    for _ in range(2):
        assert rewriting.implemented(schema) == implemented(schema)
        assert rewriting.implemented(plain) == plain
        assert rewriting.implemented("{") == "{"
    assert processes.tasks == [schema.encode()]
    processes.close()


@pytest.mark.parametrize("keyword", SCHEMAS)
def test_texts_under_a_rewritten_keyword_are_valid(matchers: Matchers, keyword: str) -> None:
    program = JsonSchemaProgram(matchers)

    @settings(max_examples=8, deadline=None)
    @given(SCHEMAS[keyword], st.integers(0, 1 << 30))
    def walk(schema: dict[str, Any], seed: int) -> None:
        validator = Draft202012Validator(schema, format_checker=FORMATS)
        stream = started(program, schema)
        if stream is None:
            assert not any(map(validator.is_valid, SAMPLES))
            return
        validator.validate(json.loads(walked(stream, random.Random(seed))))

    walk()
