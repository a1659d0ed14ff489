"""Rewritten schemas allow only values that the original schemas allow, and nearly all of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from tokenbus.protocol.json_schema import rewritten
from tokenbus.protocol.json_schema.complement import has_inner_anchor, matching, without
from tokenbus.protocol.json_schema.parts import Unsupported
from tokenbus.protocol.json_schema.rewriting import MAX_BYTES, REWRITTEN

NAMES = st.sampled_from(["a", "b", "ab", "c"])
SCALARS = st.sampled_from([None, True, False, 0, 1, 2, 3, "", "a", "b", "ab", "abc"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CONSTANTS: st.SearchStrategy[Any] = SCALARS | st.lists(SCALARS, max_size=2) | st.just({})
KINDS = st.sampled_from(["null", "boolean", "number", "string", "array", "object"])
COUNTS = st.integers(0, 3)


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=3, unique=True),
        "enum": st.lists(CONSTANTS, min_size=1, max_size=3),
        "const": CONSTANTS,
        "minimum": COUNTS,
        "exclusiveMaximum": COUNTS,
        "minLength": COUNTS,
        "maxLength": COUNTS,
        "pattern": st.sampled_from(["^a", "b$", "^(ab?)*$", "[^a]", "^(?!a)b", "^(?=a).b"]),
        "minItems": COUNTS,
        "maxItems": COUNTS,
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "contains": inner,
        "uniqueItems": st.booleans(),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "properties": st.dictionaries(NAMES, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": st.sampled_from(
            [{"enum": ["a", "b"]}, {"pattern": "^a"}, {"maxLength": 1}, {"not": {"const": "a"}}]
        ),
        "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=2), max_size=2),
        "dependentSchemas": st.dictionaries(NAMES, inner, max_size=2),
        "patternProperties": st.just({"^a": False}),
        "unevaluatedProperties": st.booleans(),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=3),
    }
    chosen = st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({n: keywords[n] for n in names}))


SCHEMAS = st.recursive(st.booleans() | combined(st.booleans()), combined, max_leaves=8)


def keywords_of(schema: Any) -> set[str]:
    """The names of all members of all objects in a schema."""
    if isinstance(schema, list):
        return set().union(*map(keywords_of, schema))
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords_of, schema.values()))
    return set()


@settings(max_examples=120)
@given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=8))
def test_a_rewritten_schema_allows_the_same_values(schema: Any, values: list[Any]) -> None:
    made = rewritten(schema).schema
    original, other = Draft202012Validator(schema), Draft202012Validator(made)
    for value in values:
        allowed = other.is_valid(value)
        assert not allowed or original.is_valid(value), made
        if not (REWRITTEN & keywords_of(made) or "additionalProperties" in keywords_of(schema)):
            assert allowed == original.is_valid(value), made


EACH: list[tuple[dict[str, Any], list[str]]] = [
    ({"not": {"required": ["a"]}}, ["not"]),
    ({"not": {"enum": ["a", 1, None]}}, ["not"]),
    ({"not": {"type": ["string", "null"]}}, ["not"]),
    ({"not": {"pattern": "^a+$"}}, ["not"]),
    ({"not": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, ["not"]),
    ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}}, ["if", "then"]),
    ({"if": {"type": "string"}, "else": {"type": "null"}}, ["if", "else"]),
    ({"dependentRequired": {"a": ["b", "c"]}}, ["dependentRequired"]),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, ["dependentSchemas"]),
    ({"propertyNames": {"enum": ["a", "b"]}}, ["propertyNames"]),
    ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, ["propertyNames"]),
    ({"propertyNames": {"minLength": 2}, "required": ["ab"]}, ["propertyNames"]),
    ({"propertyNames": {"not": {"enum": ["a"]}}}, ["propertyNames"]),
    ({"patternProperties": {"a": False}, "properties": {"ab": {}}}, ["patternProperties"]),
    ({"contains": {"const": "a"}}, ["contains"]),
    ({"uniqueItems": True, "maxItems": 1}, ["uniqueItems"]),
    ({"uniqueItems": True, "items": {"enum": ["a", 1, None]}, "minItems": 1}, ["uniqueItems"]),
    ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, ["oneOf"]),
    ({"oneOf": [{"type": "string"}, {"type": "null"}]}, ["oneOf"]),
    ({"oneOf": [{"minimum": 1}, {"type": "number", "maximum": 2}]}, ["oneOf"]),
    ({"pattern": "^(?!ab)(?=a)[a-c]+$"}, ["pattern"]),
    ({"pattern": "^([a-z]+(/|$))*$"}, ["pattern"]),
    ({"format": "json-pointer"}, ["format"]),
    (
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]}
        | {"unevaluatedProperties": False},
        ["unevaluatedProperties"],
    ),
]


@pytest.mark.parametrize(("schema", "enforced"), EACH)
def test_each_keyword_is_rewritten(schema: dict[str, Any], enforced: list[str]) -> None:
    found = rewritten(schema)
    assert found.enforced == enforced
    assert not {*REWRITTEN, "format"} & keywords_of(found.schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"multipleOf": 7}},
        {"uniqueItems": True},
        {"contains": {}, "minContains": 2},
        {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
        {"pattern": "a(?=b)"},
        {"pattern": "^(?=a)?b"},
        {"not": {"const": 2**53 + 1}},
        {"oneOf": [{"": 5, "multipleOf": 2}, {"": 3, "multipleOf": 2}]},
        {"not": {"not": {"$ref": "#/$defs/u"}}, "$defs": {"u": {"uniqueItems": True}}},
        {"$defs": {"a": {"$id": "urn:a", "not": {"$ref": "#/$defs/b"}}, "b": {"const": 1}}},
        {"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]},
        {"allOf": [{"propertyNames": {"pattern": "^a"}}], "additionalProperties": False},
        {"if": {"uniqueItems": True}, "then": {"minItems": 1}},
        {"not": {"$ref": "#/$defs/none"}},
        {"$schema": "http://json-schema.org/draft-03/schema#", "not": {}},
    ],
)
def test_other_keywords_stay(schema: dict[str, Any]) -> None:
    found = rewritten(schema)
    assert found.schema == schema
    assert not found.enforced


def test_each_draft_has_its_keywords() -> None:
    seven = {"$schema": Draft7Validator.META_SCHEMA["$schema"]}
    needs: dict[str, Any] = {"dependencies": {"a": ["b"], "c": {"required": ["d"]}}}
    made = rewritten(seven | needs).schema
    assert not Draft7Validator(made).is_valid({"a": 1})
    assert not Draft7Validator(made).is_valid({"c": 1})
    assert Draft7Validator(made).is_valid({"c": 1, "d": 1, "b": 1})
    four = {"$schema": "http://json-schema.org/draft-04/schema#", "if": {}, "then": False}
    assert rewritten(four).schema == four


def test_keywords_next_to_a_reference_follow_the_draft() -> None:
    schema = {"$ref": "#/definitions/a", "not": {}, "definitions": {"a": {"not": {"const": 1}}}}
    made = rewritten({"$schema": "http://json-schema.org/draft-07/schema#", **schema}).schema
    assert Draft7Validator(made).is_valid(2)
    assert not Draft7Validator(made).is_valid(1)
    assert not Draft202012Validator(rewritten(schema).schema).is_valid(2)


def test_constraints_next_to_a_reference_are_removed_up_to_draft_7() -> None:
    schema = {
        "properties": {"a": {"$ref": "#/definitions/a", "maxLength": 1, "title": "A"}},
        "definitions": {"a": {"type": "string"}},
    }
    made = rewritten({"$schema": "http://json-schema.org/draft-04/schema#", **schema}).schema
    assert made["properties"]["a"] == {"$ref": "#/definitions/a", "title": "A"}
    assert rewritten(schema).schema is schema


def test_a_part_without_its_own_id_has_the_draft_of_the_root() -> None:
    four = {"$schema": "http://json-schema.org/draft-04/schema", "type": "object"}
    schema: dict[str, Any] = {
        "definitions": {"a": {"id": "schemata/a", **four}},
        "$ref": "#/definitions/a",
    }
    assert rewritten(schema).schema["definitions"]["a"] == {"id": "schemata/a", "type": "object"}
    assert rewritten({**four, **schema}).schema["definitions"]["a"] == schema["definitions"]["a"]


def test_a_format_that_json_schema_does_not_define_is_an_annotation() -> None:
    assert rewritten({"format": "zip"}) == ({}, [], ["format"])


def nested(keyword: str, depth: int) -> Any:
    return {keyword: nested(keyword, depth - 1)} if depth else {"const": 1}


ENDLESS = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 1000}}}


@pytest.mark.parametrize(
    "schema",
    [
        nested("contains", 40),
        {"not": nested("items", 40)},
        {**ENDLESS, "$ref": "#/$defs/a", "not": {"required": ["a"]}},
        {**ENDLESS, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
        {"oneOf": [{"enum": list(range(first, first + 4000))} for first in range(16)]},
    ],
)
def test_a_small_schema_with_a_large_rewritten_form_stays(schema: Any) -> None:
    assert rewritten(schema).schema is schema


def test_the_rewritten_schema_is_bounded() -> None:
    deep: Any = {"required": ["a"]}
    for number in range(12):
        deep = {"oneOf": [{"required": [f"{number}{one}"], "not": deep} for one in "abcdef"]}
    assert rewritten(deep).schema == deep
    wide = {"items": [{"not": {"const": number}} for number in range(30_000)]}
    assert len(str(wide)) > MAX_BYTES
    assert rewritten(wide).schema == wide


def uncounted(_: int) -> None:
    """Does not count the work."""


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", ".", r"\w", r"\D", "[ab]", "[^a]", "", "-"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+?", "?", "{1,2}"])).map(
            lambda both: f"(?:{both[0]}){both[1]}"
        ),
        inner.map(lambda one: f"(^{one})"),
        inner.map(lambda one: f"({one}$)"),
    ),
    max_leaves=5,
)


@settings(max_examples=150)
@given(PATTERNS, st.lists(st.text("ab-1é\n", max_size=5), max_size=10))
def test_the_complement_of_a_pattern_matches_all_other_strings(
    pattern: str, texts: list[str]
) -> None:
    try:
        other = without(pattern, uncounted)
    except Unsupported:
        return
    for text in texts:
        matches = re.search(pattern, text) is not None
        complement = re.fullmatch(other[1:-1], text) is not None
        assert not (matches and complement)
        if text.isascii():
            assert complement == (not matches), other


@settings(max_examples=150)
@given(PATTERNS, st.lists(st.text("ab-1é\n", max_size=5), max_size=10))
def test_anchors_inside_a_pattern_are_rewritten(pattern: str, texts: list[str]) -> None:
    try:
        same = matching(pattern, uncounted)
    except Unsupported:
        return
    assert not has_inner_anchor(same)
    for text in texts:
        matches = re.search(pattern, text) is not None
        rewritten_matches = re.fullmatch(same[1:-1], text) is not None
        assert matches or not rewritten_matches
        if text.isascii() and not text.endswith("\n"):
            assert rewritten_matches == matches, same


@pytest.mark.parametrize("pattern", ["(", "é", r"(a)\1", r"\ba", "(?i)a", "a{500}", "a" * 301])
def test_other_patterns_have_no_complement(pattern: str) -> None:
    with pytest.raises(Unsupported):
        without(pattern, uncounted)


@pytest.mark.parametrize("pattern", ["", ".*", "(?:)", "^|b"])
def test_a_pattern_that_always_matches_has_no_complement(pattern: str) -> None:
    with pytest.raises(Unsupported):
        without(pattern, uncounted)
