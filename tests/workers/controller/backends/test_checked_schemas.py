"""Masks hold the keywords that llguidance does not implement: a token that would end a value in
violation of such a keyword is removed from the mask."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tokenbus.protocol.errors import ControllerError, RequestError
from tokenbus.workers.controller.backends.llguidance.checking import checked_text
from tokenbus.workers.controller.backends.llguidance.checking.budget import Budget, Exhausted
from tokenbus.workers.controller.backends.llguidance.checking.values import Values
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import JsonSchemaProgram
from tokenbus.workers.controller.interface import Action

from ..played import BYTES, vocabulary
from .llguidance_streams import TOKENS, Stream, push, walked

pytestmark = pytest.mark.process

LETTERS = vocabulary(BYTES)
SHORT = vocabulary([*TOKENS, b'a"]}', b'"], "b": ["a"]}', b'", "a"]'])
STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LONG_OR_SHORT = {"oneOf": [{"minLength": 2}, {"maxLength": 3}], "type": "string"}


def accepts(matchers: Matchers, schema: Any, text: str) -> bool:
    """Whether the masks allow each byte of a text and its end. Forced text must agree with it."""
    stream = Stream(JsonSchemaProgram(matchers), schema, LETTERS)
    rest = text.encode()
    try:
        while True:
            answer = stream.mid()
            if answer.action is Action.STOP:
                return not rest
            if answer.action is Action.SPLICE:
                forced = LETTERS.bytes_of(answer.tokens)
                if not rest.startswith(forced):
                    return False
                push(stream, answer.tokens)
                rest = rest[len(forced) :]
            elif not rest:
                return 0 in stream.allowed
            elif 1 + rest[0] not in stream.allowed:
                return False
            else:
                push(stream, [1 + rest[0]])
                rest = rest[1:]
    except ControllerError:
        return False


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


ONLY_A: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {}},
    "additionalProperties": False,
}
CASES: list[tuple[str, Any, list[str], list[str]]] = [
    (
        "uniqueItems",
        STRINGS,
        ["[]", '["a"]', '["a", "b"]', '["a", "aa", ""]'],
        ['["a", "a"]', '["a", "b", "a"]', '["\\u0061", "a"]'],
    ),
    (
        "uniqueItems of any values",
        {"type": "array", "uniqueItems": True},
        ["[1, true, [1], [true]]", '[{"a": 1}, {"a": 2}]', "[0, false, null]"],
        ["[1, 1.0]", '[{"a": 1, "b": 2}, {"b": 2, "a": 1}]', "[[1], [1.0]]", "[{}, {}]"],
    ),
    (
        "uniqueItems in a property",
        {"properties": {"a": STRINGS}, "additionalProperties": {"type": "array"}},
        ['{"a": ["x", "y"]}', '{"b": [1, 1]}'],
        ['{"a": ["x", "x"]}'],
    ),
    ("oneOf", LONG_OR_SHORT, ['"a"', '"abcd"', '""'], ['"ab"', '"abc"']),
    (
        "oneOf of objects",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "oneOf": [{"required": ["a"]}, {"patternProperties": {"^b$": {"minimum": 5}}}],
        },
        ['{"a": 1, "b": 2}', '{"b": 7}', "{}"],
        ['{"a": 1}', '{"a": 1, "b": 9}', '{"b": 2}'],
    ),
    (
        "not",
        {"type": "integer", "not": {"multipleOf": 3}},
        ["1", "22", "-1", "100"],
        ["0", "3", "21", "-9"],
    ),
    (
        "if",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "additionalProperties": False,
            "if": {"properties": {"a": {"multipleOf": 2}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
        ["{}", '{"a": 1}', '{"a": 2, "b": 1}'],
        ['{"a": 2}', '{"a": 10}'],
    ),
    (
        "propertyNames",
        {"type": "object", "propertyNames": {"oneOf": [{"minLength": 2}, {"maxLength": 2}]}},
        ['{"a": 1}', '{"abc": 1}'],
        ['{"ab": 1}', '{"a": 1, "cd": 2}'],
    ),
    (
        "minProperties and maxProperties",
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "minProperties": 1,
            "maxProperties": 2,
        },
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ["{}", '{"a": 1, "b": 2, "c": 3}'],
    ),
    (
        "patternProperties",
        {
            "type": "object",
            "patternProperties": {"a": {"type": "integer"}, "b": {"minimum": 5}},
            "additionalProperties": {"type": "string"},
        },
        ['{"a": 1}', '{"ab": 5}', '{"b": 6}', '{"c": "x"}'],
        ['{"a": "x"}', '{"ab": 1}', '{"b": 1}', '{"c": 1}'],
    ),
    (
        "a circular reference",
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"$ref": "#/$defs/node", "not": {"required": ["end"]}}},
                }
            },
        },
        ["{}", '{"next": {}}', '{"next": {"next": {"x": 1}}}', '{"end": 1}'],
        ['{"next": {"end": 1}}', '{"next": {"next": {"end": 1}}}'],
    ),
    (
        "a keyword below anyOf",
        {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"a": STRINGS}}]},
        ["null", '{"a": ["x"]}'],
        ['{"a": ["x", "x"]}'],
    ),
    (
        "keywords whose rewritten form is too large",
        {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "allOf": [
                {"if": {"required": [f"p{n}"]}, "then": {"required": [f"q{n}"]}} for n in range(12)
            ],
        },
        ["{}", '{"p1": 1, "q1": 1}', '{"q2": 1, "p12": 1}'],
        ['{"p1": 1}', '{"p1": 1, "q2": 1}', '{"a": null}'],
    ),
    (
        "a keyword whose rewritten form is nested too deeply",
        {**ONLY_A, "not": {"const": nested(40)}},
        ["{}", json.dumps(nested(39)), json.dumps(nested(41))],
        [json.dumps(nested(40))],
    ),
    (
        "an anchor inside a pattern",
        {"type": "string", "pattern": "^([a-z]+(/|$))*(^|!)$", "not": {"minLength": 8}},
        ['""', '"a/b/!"', '"!"'],
        ['"/"', '"a/b"', '"aa/bb/cc/!"'],
    ),
    (
        "references to parts that allow no value",
        {
            "type": "object",
            "properties": {
                "a": {"$ref": "#/$defs/x/$defs/z"},
                "b": {"anyOf": [{"$ref": "#/$defs/y"}, {"type": "null"}]},
            },
            "$defs": {
                "x": {"$defs": {"z": {"type": "object", "anyOf": [{"type": "string"}]}}},
                "y": {"type": "string", "pattern": "^a$", "minLength": 3},
            },
        },
        ["{}", '{"b": null}', '{"c": 1}'],
        ['{"a": {}}', '{"a": "a"}', '{"b": "aaa"}'],
    ),
    (
        "circular references that are combined",
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/even"}],
            "$defs": {
                "a": {**ONLY_A, "properties": {"a": {"$ref": "#/$defs/a"}}},
                "even": {"additionalProperties": {"$ref": "#/$defs/odd"}},
                "odd": {"additionalProperties": {"$ref": "#/$defs/even"}, "minProperties": 1},
            },
        },
        ["{}", json.dumps(nested(2)), json.dumps(nested(4))],
        [json.dumps(nested(1)), json.dumps(nested(3))],
    ),
    (
        "patterns of references that are combined",
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/others/y"}, {"pattern": "(a|b){9}.{9}$"}],
            "$defs": {"x": {"anyOf": [{"pattern": "((ab.){2,4}){6}"}, {"pattern": "^b.{41}$"}]}},
            "others": {"y": {"pattern": "^(..){9,99}$", "maxLength": 198}},
            "type": "string",
        },
        [json.dumps("b" * 42), json.dumps("abc" * 12 + "a" * 9 + "bbbcccbbb")],
        [json.dumps("b" * 41), json.dumps("b" * 43), json.dumps("abc" * 12)],
    ),
    (
        "contains",
        {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "maxContains": 2},
        ["[1]", "[2, 1, 1]"],
        ["[]", "[2]", "[1, 1, 1]"],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), [case[1:] for case in CASES])
def test_masks_hold_the_keyword(
    matchers: Matchers, schema: Any, valid: list[str], invalid: list[str]
) -> None:
    accepted = [text for text in valid + invalid if accepts(matchers, schema, text)]
    assert accepted == valid


def tokens_of(*texts: bytes) -> list[int]:
    return [next(n for n in range(SHORT.size) if SHORT.token(n) == text) for text in texts]


def test_each_value_that_a_token_ends_is_checked(matchers: Matchers) -> None:
    schema = {
        "type": "object",
        "properties": {"a": STRINGS, "b": STRINGS},
        "required": ["a"],
        "additionalProperties": False,
    }
    stream = Stream(JsonSchemaProgram(matchers), schema, SHORT)
    answer = stream.mid()
    push(stream, answer.tokens)
    assert stream.text == b'{"a": '
    ends, two, several = tokens_of(b'a"]}', b'", "a"]', b'"], "b": ["a"]}')
    push(stream, tokens_of(b'["'))
    stream.mid()
    assert {ends, two, several} <= stream.allowed
    push(stream, tokens_of(b"a"))
    stream.mid()
    # The token would end the item "a" and another item "a".
    assert two not in stream.allowed
    assert several in stream.allowed
    assert ends in stream.allowed


def test_forks_are_checked_with_the_text_before_the_fork(matchers: Matchers) -> None:
    stream = Stream(JsonSchemaProgram(matchers), STRINGS, LETTERS)
    push(stream, [1 + byte for byte in b'["a", "'])
    other = stream.fork()
    for one, byte in ((stream, b"a"), (other, b"b")):
        push(one, [1 + byte[0]])
        one.mid()
    assert 1 + ord('"') not in stream.allowed
    assert 1 + ord('"') in other.allowed


def test_masks_along_a_draft_are_checked(matchers: Matchers) -> None:
    stream = Stream(JsonSchemaProgram(matchers), STRINGS, LETTERS)
    push(stream, [1 + byte for byte in b'["a", "'])
    stream.mid()
    masks = [memoryview(bytearray(4 * -(-LETTERS.size // 32))) for _ in range(2)]
    assert stream.controller.masks_along([1 + ord("a"), 1 + ord("b")], masks) == 2  # type: ignore[attr-defined]
    quote = 1 + ord('"')
    assert [bool(mask[quote >> 3] >> (quote & 7) & 1) for mask in masks] == [False, True]


def test_no_further_item_begins_if_all_listed_values_are_used(matchers: Matchers) -> None:
    values = ["aa", "ab", "c", "d", "e"]
    schema = {"type": "array", "items": {"enum": values}, "uniqueItems": True}
    stream = Stream(JsonSchemaProgram(matchers), schema, LETTERS)
    push(stream, [1 + byte for byte in b'["aa", "a'])
    stream.mid()
    assert stream.allowed == {1 + ord("b")}
    push(stream, [1 + byte for byte in b'b", "c", "d", "e"'])
    stream.mid()
    assert stream.allowed == {1 + ord("]")}


def test_a_dead_end_is_one_error(matchers: Matchers) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2, 3, 4, 5]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "not": {"patternProperties": {"^a$": {"const": 1}}},
    }
    stream = Stream(JsonSchemaProgram(matchers), schema, LETTERS)
    push(stream, stream.mid().tokens)
    push(stream, [1 + ord("1")])
    push(stream, stream.mid().tokens)
    push(stream, [1 + ord("t")])
    push(stream, stream.mid().tokens)
    with pytest.raises(ControllerError, match="would end a value that the schema does not allow"):
        stream.mid()


@pytest.mark.parametrize("schema", [STRINGS, LONG_OR_SHORT, CASES[-1][1], CASES[8][1]])
@pytest.mark.parametrize("max_tokens", [20, 40])
def test_texts_that_are_closed_near_max_tokens_are_valid(
    matchers: Matchers, schema: Any, max_tokens: int
) -> None:
    program = JsonSchemaProgram(matchers)
    for seed in range(6):
        stream = Stream(program, schema, SHORT, max_tokens)
        text = walked(stream, random.Random(seed), taken_back=True)
        Draft202012Validator(schema).validate(json.loads(text))
        assert stream.controller.text_end() != "cut"  # type: ignore[attr-defined]


def test_checks_of_a_mask_take_a_bounded_number_of_steps(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bound, the check would take 2 ** 30 steps."""
    monkeypatch.setattr(checked_text, "MAX_STEPS", 2_000)
    definitions: dict[str, Any] = {"d0": {"type": "array"}}
    for depth in range(1, 30):
        both = {"$ref": f"#/$defs/d{depth - 1}"}
        definitions[f"d{depth}"] = {"allOf": [both, both]}
    schema = {"type": "array", "uniqueItems": True, "oneOf": [{"$ref": "#/$defs/d29"}, {}]}
    stream = Stream(JsonSchemaProgram(matchers), {**schema, "$defs": definitions}, LETTERS)
    push(stream, [1 + ord("[")])
    stream.mid()
    assert 1 + ord("]") not in stream.allowed


def test_a_long_list_of_values_is_checked_in_few_steps() -> None:
    listed = [["a", number] for number in range(10_000)]
    values = Values(json.dumps({"anyOf": [{"enum": listed}, {"const": ["b"]}]}))
    assert values.holds(values.root, ["a", 9_999], Budget(500))
    assert values.holds(values.root, ["b"], Budget(500))
    assert not values.holds(values.root, ["a", True], Budget(500))


@pytest.mark.parametrize(
    "schema",
    [
        {"contains": {}, "minContains": 1_000},
        {"items": {}},
        {"oneOf": [{"minItems": 1}] * 1_000},
    ],
)
def test_each_item_and_each_schema_of_a_list_counts_as_a_step(schema: Any) -> None:
    values = Values(json.dumps(schema))
    with pytest.raises(Exhausted):
        values.holds(values.root, [0] * 1_000, Budget(500))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"uniqueItems": True, "items": {"pattern": "a(?=b)"}}, "Unimplemented|look-around"),
        ({"uniqueItems": True, "$dynamicRef": "#"}, "Unimplemented|dynamicRef"),
    ],
)
def test_a_schema_without_bounded_checks_is_refused(
    matchers: Matchers, schema: Any, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Stream(JsonSchemaProgram(matchers), schema, LETTERS)


VALUES = st.recursive(
    st.sampled_from([None, True, 0, 1, 2, 3, 1.5, "", "a", "ab", "abc"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "ab"]), inner, max_size=3)
    ),
    max_leaves=5,
)
SIMPLE = st.sampled_from(
    [
        *(
            {"type": "string"},
            {"minLength": 2},
            {"maxLength": 2},
            {"multipleOf": 2},
            {"minimum": 2},
        ),
        *({"required": ["a"]}, {"minItems": 2}, {"pattern": "b"}, {"type": ["array", "object"]}),
        *(
            {"uniqueItems": True},
            {"maxProperties": 1},
            {"patternProperties": {"a": {"minimum": 1}}},
        ),
    ]
)
KEYWORDS = st.one_of(
    st.builds(lambda one: {"not": one}, SIMPLE),
    st.builds(lambda some: {"oneOf": some}, st.lists(SIMPLE, min_size=2, max_size=3)),
    st.builds(lambda one: {"propertyNames": one}, SIMPLE),
    st.builds(lambda a, b, c: {"if": a, "then": b, "else": c}, SIMPLE, SIMPLE, SIMPLE),
    st.just({"uniqueItems": True}),
    st.builds(lambda a, b: {"patternProperties": {"a": a, "b": b}}, SIMPLE, SIMPLE),
)
SCHEMAS = st.one_of(
    KEYWORDS,
    st.builds(lambda one: {"items": one}, KEYWORDS),
    st.builds(lambda one: {"additionalProperties": one}, KEYWORDS),
    st.builds(lambda a, b: {"anyOf": [a, b]}, KEYWORDS, SIMPLE),
)


def test_masks_accept_exactly_the_valid_values(matchers: Matchers) -> None:
    @settings(max_examples=40, deadline=None)
    @given(SCHEMAS, st.lists(VALUES, min_size=1, max_size=4))
    def compare(schema: Any, values: list[Any]) -> None:
        validator = Draft202012Validator(schema)
        for value in values:
            text = json.dumps(value)
            try:
                found = accepts(matchers, schema, text)
            except RequestError as error:
                if "nsatisfiable" in error.message or "any text" in error.message:
                    assert not validator.is_valid(value)
                return
            assert found == validator.is_valid(value), (schema, text)

    compare()
