"""White space in JSON is bounded: in schemas, in schemas inside Lark grammars, and in the library's
grammar."""

from __future__ import annotations

import json

import pytest
from tokenbus.grammars import library
from tokenbus.grammars.yacc import check_text, compile_grammar
from tokenbus.protocol.errors import ControllerError, RequestError
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import (
    JsonSchemaProgram,
    LarkProgram,
)
from tokenbus.workers.controller.interface import ConstraintProgram

from ..played import BYTES, vocabulary
from .llguidance_streams import host

pytestmark = pytest.mark.process
LETTERS = vocabulary(BYTES)

DUMPED = '{"a": [1, {"b": "x  y"}]}'
TIGHT = '{"a":[1,{"b":"x  y"}]}'
INDENTED = json.dumps(json.loads(DUMPED), indent=2)
RUNS = [
    DUMPED.replace(": [", ":  ["),
    DUMPED.replace("[1", "[\n\n1"),
    DUMPED.replace("{", "{\t", 1),
]


def accepts(program: ConstraintProgram, arg: object, text: str) -> bool:
    controller = program.start(host(arg, LETTERS))
    try:
        controller.post_process([1 + byte for byte in text.encode()], 0)
    except ControllerError:
        return False
    return controller.text_end() == "complete"


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({}, {DUMPED}),
        ({"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}, {TIGHT}),
        ({"whitespace_flexible": True}, {DUMPED, TIGHT, INDENTED}),
        ({"indent": 2}, {INDENTED}),
    ],
)
def test_a_schema_chooses_its_white_space_and_never_gets_a_run_of_it(
    matchers: Matchers, options: dict[str, object], accepted: set[str]
) -> None:
    schema = {"type": "object", "x-guidance": options}
    program = JsonSchemaProgram(matchers)
    for text in (DUMPED, TIGHT, INDENTED, *RUNS):
        assert accepts(program, schema, text) == (text in accepted), text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"whitespace_flexible": True, "whitespace_pattern": " +"}, "matches texts of any length"),
        ({"item_separator": ", *"}, "matches texts of any length"),
        ({"key_separator": ":[ "}, "key_separator of x-guidance: "),
        ({"indent": 0}, "it must be from 1 to 16"),
        ({"indent": True}, "it must be from 1 to 16"),
        (3, "must be an object"),
        ({"spaces": 2}, "spaces"),
    ],
)
def test_white_space_without_a_bound_is_refused(
    matchers: Matchers, options: object, reason: str
) -> None:
    schema = {"type": "object", "x-guidance": options}
    with pytest.raises(RequestError, match=reason):
        JsonSchemaProgram(matchers).start(host(schema, LETTERS))
    with pytest.raises(RequestError, match=reason.replace("spaces", ".")):
        LarkProgram(matchers).start(host(f"start: %json {json.dumps(schema)}", LETTERS))


def test_a_schema_inside_of_lark_has_bounded_white_space(matchers: Matchers) -> None:
    grammar = 'start: "%json { " (a | b)\na: %json {"type":\n"object"}\nb: %json {"type": "null"}'
    program = LarkProgram(matchers)
    for text in (DUMPED, TIGHT, INDENTED, "null"):
        assert accepts(program, grammar, "%json { " + text)
    for text in RUNS:
        assert not accepts(program, grammar, "%json { " + text)


def test_an_error_behind_a_schema_inside_of_lark_has_its_line(matchers: Matchers) -> None:
    with pytest.raises(RequestError, match=r"lark: 4\("):
        LarkProgram(matchers).start(host('start: a b\na: %json {\n"type": "null"}\n!', LETTERS))


def test_json_of_the_library_has_bounded_white_space() -> None:
    grammar = compile_grammar(library.grammar("json")).grammar
    for text in (DUMPED, TIGHT, INDENTED, f"{INDENTED}\n"):
        assert check_text(grammar, text.encode()) is None
    for text in RUNS:
        assert check_text(grammar, text.encode()) is not None
