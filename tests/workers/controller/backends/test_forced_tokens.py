"""Text that a schema, a grammar or a structure forces is appended as the tokens into which the
tokenizer divides it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tokenbus.clients.gateway.answer_forms import DEEPSEEK_FENCED, Wanted, structure_of
from tokenbus.workers.controller.backends.constraints import Constraints
from tokenbus.workers.controller.interface import Action
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary

from ..played import engine as wasm_engine
from ..tokens.real_tokenizers import sentencepiece, tekken
from .answer_walks import FUNCTIONS
from .llguidance_streams import Stream

pytestmark = pytest.mark.process

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["crew", "guest", "harbour"]}},
        "internationalised_name": {"type": "boolean"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 9}},
            "required": ["street"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "internationalised_name", "address"],
    "additionalProperties": False,
}
VALUES = [
    ("John Doe", 42, ["crew", "guest"], True, "Main"),
    ("Zoé", 7, [], False, "12 B"),
    ("x", 120, ["harbour"] * 3, False, "a\\b"),
]
LARK = 'start: "The answer, unfortunately, is " /[a-z]{1,12}/ ", and nobody understands it."'
FENCED = structure_of(DEEPSEEK_FENCED, Wanted(FUNCTIONS, None, parallel=False))


def record(values: tuple[str, int, list[str], bool, str]) -> str:
    name, age, tags, other, street = values
    shown = dict(zip(SCHEMA["properties"], (name, age, tags, other), strict=False))
    return json.dumps({**shown, "address": {"street": street}}, ensure_ascii=False)


CASES = [
    *(("json_schema", json.dumps(SCHEMA), record(values)) for values in VALUES),
    ("lark", LARK, "The answer, unfortunately, is internal, and nobody understands it."),
    ("lark", LARK, "The answer, unfortunately, is x, and nobody understands it."),
]


@pytest.fixture(scope="module")
def constraints() -> Iterator[Constraints]:
    made = Constraints(wasm_engine, None)
    yield made
    made.close()


def follow(stream: Stream, text: str) -> int:
    """Writes a text. If no token is forced, takes the next token from the tokenizer. Returns the
    number of forced tokens."""
    rest, forced = text.encode(), 0
    while rest:
        answer = stream.mid()
        if answer.action is Action.SPLICE:
            tokens = list(answer.tokens)
            forced += len(tokens)
        else:
            assert answer.action is Action.CONTINUE
            tokens = stream.vocabulary.tokenize(rest)[:1]
            assert tokens[0] in stream.allowed
        written = b"".join(map(stream.vocabulary.token, tokens))
        assert rest.startswith(written)
        stream.push(tokens)
        rest = rest[len(written) :]
    return forced


@pytest.mark.parametrize("make", [tekken, sentencepiece])
@pytest.mark.parametrize(("name", "arg", "text"), CASES)
def test_a_text_has_the_tokenizers_tokens_where_some_are_forced(
    constraints: Constraints, make: type[TokenizerVocabulary], name: str, arg: str, text: str
) -> None:
    on = make()  # type: ignore[call-arg]
    program = constraints.get(name)
    assert program is not None
    stream = Stream(program, arg, on, 400)
    assert follow(stream, text) > 5
    assert stream.tokens == on.tokenize(text.encode())


def test_the_literal_texts_of_a_call_have_them_too(constraints: Constraints) -> None:
    """The parts are tokenized one by one, because no token spans two of them."""
    on = tekken()
    program = constraints.get("structural")
    assert program is not None
    arg = msgspec.json.encode(FENCED).decode()
    call = FENCED.tags[0]
    parts = call.begin, '{"place": "Gdansk"}', call.end, DEEPSEEK_FENCED.closing
    stream = Stream(program, arg, on, 400)
    assert sum(follow(stream, part) for part in parts) > 20
    assert stream.tokens == [token for part in parts for token in on.tokenize(part.encode())]
