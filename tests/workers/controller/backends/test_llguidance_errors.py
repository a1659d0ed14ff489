"""The built-in constraints json_schema and lark: wrong and hostile arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from tokenbus.protocol.errors import Code, ControllerError, RequestError
from tokenbus.workers.controller.backends.llguidance.completion import (
    MAX_BYTES as MAX_COMPLETION_BYTES,
)
from tokenbus.workers.controller.backends.llguidance.completion import Completion
from tokenbus.workers.controller.backends.llguidance.matchers import Matchers
from tokenbus.workers.controller.backends.llguidance.schema_and_lark import (
    MAX_BYTES,
    JsonSchemaProgram,
    LarkProgram,
)
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..played import vocabulary
from ..tokens.real_tokenizers import tekken
from .llguidance_streams import PERSON, TOKENS, Stream, host

pytestmark = pytest.mark.process


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("", "is empty; it must be a JSON schema"),
        ("  ", "is empty; it must be a JSON schema"),
        (b"\xff", "UTF-8"),
        ("{", "EOF while parsing"),
        ("[1]", "Expecting object schema"),
        ("false", "Expecting object schema"),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"uniqueItems": True, "$dynamicRef": "#"}, r"Unimplemented keys: \[.*\"uniqueItems\""),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "string", "pattern": "a("}, "unclosed group"),
        ({"type": "string", "pattern": r"(?=a)"}, "look-around"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"$ref": "#"}, "does not allow any text"),
        ({"x-guidance": {"nope": 1}}, "unknown field `nope`"),
        ('{"type":"array","items":' * 300 + "{}" + "}" * 300, "recursion limit"),
        (" " * (MAX_BYTES + 1), "at most 1048576 are allowed"),
    ],
)
def test_what_is_no_schema_is_refused_with_llguidances_reason(
    matchers: Matchers, schema: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        JsonSchemaProgram(matchers).start(host(schema, vocabulary(TOKENS)))
    assert caught.value.code == Code.INVALID_FIELD
    assert caught.value.path == "$.controller_arg"
    assert "backtrace" not in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "is empty; it must be a grammar"),
        ("start", r"1\(6\): Expected token ':'"),
        ("start: FOO", r"at 1\(8\): unknown name: \"FOO\""),
        ('foo: "a"', "no start rule"),
        ("start: /(/", "unclosed group"),
        ("start: start", "does not allow any text"),
        ('{"grammars": []}', "lark"),
        ('start: %json {"type": "foo"}', "Invalid type: foo"),
        ("%import common.NOPE\nstart: NOPE", "common.NOPE"),
        ('start: "a"\n  | <[268]>', r"line 2 names the special token <\[268\]>"),
        ('start: "a" <|end|>', "special token"),
        ('# "\nstart: <[*]> # "', "special token"),
        ('start: /a\\/"/ <[1]> "', "special token"),
        ('start: %json {"const": "\\""} <[1]>', "special token"),
    ],
)
def test_what_is_no_lark_grammar_is_refused_with_llguidances_reason(
    matchers: Matchers, grammar: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        LarkProgram(matchers).start(host(grammar, vocabulary(TOKENS)))
    assert caught.value.path == "$.controller_arg"


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        ('start: "<[1]>"', "<[1]>"),
        ("start: /<\\/b>/ # <x>", "</b>"),
        ('// <x>\nstart: "\\"<i>"', '"<i>'),
        ('start: %json {"const": "<\\"y>"}', '"<\\"y>"'),
    ],
)
def test_angle_brackets_in_texts_and_comments_are_no_special_tokens(
    matchers: Matchers, grammar: str, text: str
) -> None:
    stream = Stream(LarkProgram(matchers), grammar, vocabulary(TOKENS))
    assert stream.random(random.Random(0))
    assert stream.text.decode() == text


def test_a_text_that_the_model_has_no_tokens_for_ends_with_an_error(matchers: Matchers) -> None:
    on = TokenizerVocabulary.from_tokens([b"", b"a", b"b", b"ab"], [0], "small")
    stream = Stream(LarkProgram(matchers), 'start: "a" ("c" | "d")', on)
    with pytest.raises(ControllerError, match="text so far: '") as caught:
        stream.random(random.Random(0))
    assert caught.value.code == Code.CONTROLLER_FAILED


def test_a_token_that_the_mask_forbids_is_an_error(matchers: Matchers) -> None:
    stream = Stream(LarkProgram(matchers), 'start: "a"+', vocabulary(TOKENS))
    stream.push([1 + ord("a")])
    with pytest.raises(ControllerError, match="text so far: 'a'"):
        stream.push([1 + ord("c")])


# --- hostile arguments ----------------------------------------------------------------------------


def bomb() -> object:
    patterns = [{"pattern": f"(a|b)*a(a|b){{{n}}}c"} for n in range(3, 30)]
    return {"type": "string", "allOf": patterns}


def many_properties() -> object:
    every = {f"p{n}": {"maxLength": n, "type": "string"} for n in range(10_000)}
    return {"type": "object", "properties": every}


def rules() -> str:
    chain = "\n".join(f'r{n}: r{n + 1} r{n + 1} | "x{n}"' for n in range(20_000))
    return f'start: r0\n{chain}\nr20000: "z"'


def references() -> object:
    items = ((n, {"$ref": f"#/$defs/d{n + 1}"}) for n in range(10_000))
    chain: dict[str, object] = {f"d{n}": {"type": "array", "items": item} for n, item in items}
    return {"$defs": {**chain, "d10000": {}}, "$ref": "#/$defs/d0"}


def multiplied() -> object:
    parts = [{"anyOf": [{"required": [f"a{i}_{j}"]} for j in range(6)]} for i in range(12)]
    return {"allOf": parts}


Make = type[JsonSchemaProgram] | type[LarkProgram]
HOSTILE: dict[str, tuple[Make, Callable[[], object]]] = {
    "an intersection that never ends": (JsonSchemaProgram, bomb),
    "ten thousand optional properties": (JsonSchemaProgram, many_properties),
    "a chain of rules": (LarkProgram, rules),
    "deep parentheses": (LarkProgram, lambda: f'start: {"(" * 20_000}"a"{")" * 20_000}'),
    "a chain of references": (JsonSchemaProgram, references),
    "alternatives that multiply": (JsonSchemaProgram, multiplied),
    "a large multiple": (JsonSchemaProgram, lambda: {"type": "integer", "multipleOf": 999_999_937}),
    "a text without end": (LarkProgram, lambda: 'start: "ab" start'),
    "complements": (LarkProgram, lambda: "start: T\nT: /.*a.{20}/ & /.*b.{21}/ & ~/.*c.{22}/"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_takes_too_much_to_compile_is_refused_and_the_worker_goes_on(
    matchers: Matchers, name: str
) -> None:
    make, arg = HOSTILE[name]
    with pytest.raises(RequestError) as caught:
        make(matchers).start(host(arg(), vocabulary(TOKENS)))
    assert caught.value.path == "$.controller_arg"
    stream = Stream(JsonSchemaProgram(matchers), PERSON, vocabulary(TOKENS))
    assert stream.random(random.Random(1))


RUNNING: list[tuple[Make, object]] = [
    (JsonSchemaProgram, {"type": "string", "pattern": "^([a-z]{1,1000}x){1,1000}$"}),
    (JsonSchemaProgram, {"type": "string", "minLength": 100_000, "maxLength": 200_000}),
    (JsonSchemaProgram, {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    (JsonSchemaProgram, {"type": "string", "pattern": "^a{100000}$"}),
    (LarkProgram, 'start: e\ne: e e | e e e | "a" | e "+" e | '),
    (LarkProgram, 'start: (("a"{0,1000} "b"?){0,1000} "c"?){0,1000}'),
    (LarkProgram, "start: /(a|aa|aaa){1,1000}(b|c){0,1000}.{1000,100000}/"),
]


@pytest.mark.parametrize(("make", "arg"), RUNNING)
def test_what_takes_too_much_to_follow_ends_its_own_stream(
    matchers: Matchers,
    make: Make,
    arg: object,
) -> None:
    stream = Stream(make(matchers), arg, tekken())
    for _ in range(30):
        answer = ended(stream)
        if answer:
            assert answer.code in (Code.CONTROLLER_FAILED, Code.CONTROLLER_TIMEOUT)
            assert "text so far" in answer.message
            break


def test_a_text_without_a_completion_is_searched_at_intervals(
    matchers: Matchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this test, a search takes seconds of CPU time."""
    find, searches = Completion.find, []

    def counted(completion: Completion) -> bytes | None:
        searches.append(completion)
        return find(completion)

    monkeypatch.setattr(Completion, "find", counted)
    schema = {"type": "string", "minLength": 100_000}
    stream = Stream(JsonSchemaProgram(matchers), schema, vocabulary(TOKENS), max_tokens=100)
    assert not stream.random(random.Random(0), 30)
    assert len(stream.tokens) == 30
    assert len(searches) == 1


def test_a_text_is_closed_where_a_later_search_finds_a_completion(matchers: Matchers) -> None:
    """At the first search, every completion has more than ``MAX_COMPLETION_BYTES``."""
    schema = {"type": "string", "minLength": MAX_COMPLETION_BYTES + 1000}
    program, most = JsonSchemaProgram(matchers), MAX_COMPLETION_BYTES + 4000
    stream = Stream(program, schema, vocabulary(TOKENS), max_tokens=most)
    quote, letter = 1 + ord('"'), 1 + ord("a")
    stream.push([quote, *[letter] * (most // 4)])
    assert stream.mid().action is Action.CONTINUE
    stream.push([letter] * (most - 100 - len(stream.tokens)))
    while len(stream.tokens) < most:
        answer = stream.mid()
        if answer.action is Action.STOP:
            break
        stream.push(answer.tokens if answer.action is Action.SPLICE else [letter])
    assert len(json.loads(stream.text)) >= MAX_COMPLETION_BYTES + 1000
    assert len(stream.tokens) < most


def ended(stream: Stream) -> ControllerError | None:
    try:
        stream.random(random.Random(0), 1)
    except ControllerError as error:
        return error
    return None
