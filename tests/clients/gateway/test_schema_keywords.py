"""Schema keywords that masks cannot enforce are left out of the masks, checked when the text has
ended, and reported."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import anthropic
import httpx
import pytest
from tokenbus.clients.gateway.conversation import schemas
from tokenbus.clients.gateway.conversation.constraints import KeywordState
from tokenbus.clients.gateway.conversation.schemas import (
    MAX_CHECKED_BYTES,
    MAX_SCHEMA_BYTES,
    Checked,
    Checks,
    checked_schema,
    enforceable,
)
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.templates.schema_check import states_of
from tokenbus.clients.gateway.templates.templates import Templates
from tokenbus.clients.gateway.tokenization import MAX_LOOP_ITEMS
from tokenbus.protocol.json_schema import MAX_BYTES, rewritten
from tokenbus.protocol.messages import Token

from ...processes import Gateway
from .openai_requests import HELLO, MODEL
from .small_model import small_model

PLACES = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern"]}},
    "required": ["place"],
    "additionalProperties": False,
}
NAMES: dict[str, Any] = {**PLACES, "propertyNames": {"minLength": 3}}
"""Masks enforce ``propertyNames``."""
OTHER: dict[str, Any] = {**PLACES, "not": {"patternProperties": {"^p": {"const": "Rome"}}}}
"""Masks do not enforce ``not``. The only value that the masks allow matches the schema."""
NEVER: dict[str, Any] = {**PLACES, "not": {"patternProperties": {"^p": {"const": "Bern"}}}}
"""The only value that the masks allow does not match the schema."""


@pytest.mark.parametrize(
    ("schema", "kept", "enforced", "left_out"),
    [
        ({"type": "array", "uniqueItems": True}, {"type": "array"}, [], ["uniqueItems"]),
        (
            {"properties": {"not": {"not": {"multipleOf": 2}}}},
            {"properties": {"not": {}}},
            [],
            ["not"],
        ),
        (
            {"not": {"required": ["a"]}},
            {"allOf": [{"type": "object", "properties": {"a": False}}]},
            ["not"],
            [],
        ),
        ({"pattern": "b(?=a)"}, {}, [], ["pattern"]),
        ({"pattern": "(?:a)"}, {"pattern": "(?:a)"}, [], []),
        ({"items": {"format": "zip"}}, {"items": {}}, [], ["format"]),
        ({"format": "date"}, {"format": "date"}, [], []),
        ({"oneOf": [{"const": 1}]}, {"allOf": [{"const": 1}]}, ["oneOf"], []),
        (
            {"oneOf": [{"type": "null"}, {"const": 1}], "not": {"multipleOf": 2}},
            {"anyOf": [{"type": "null"}, {"const": 1}]},
            ["oneOf"],
            ["not"],
        ),
        (
            {"anyOf": [{}], "oneOf": [{"multipleOf": 2}, {"uniqueItems": True}]},
            {"anyOf": [{}], "allOf": [{"anyOf": [{"multipleOf": 2}, {}]}]},
            [],
            ["uniqueItems", "oneOf"],
        ),
        ({"enum": [{"not": 1}]}, {"enum": [{"not": 1}]}, [], []),
    ],
)
def test_masks_leave_out_the_keywords_that_they_cannot_enforce(
    schema: dict[str, Any], kept: dict[str, Any], enforced: list[str], left_out: list[str]
) -> None:
    assert enforceable(rewritten(schema)) == (kept, enforced, left_out)


@pytest.mark.parametrize(
    ("schema", "value", "states"),
    [
        ({"uniqueItems": True}, [1, 1], {"uniqueItems": "failed"}),
        ({"uniqueItems": True}, [1, 2], {"uniqueItems": "checked"}),
        ({"if": {}, "then": {"const": 1}}, 2, {"if": "checked", "then": "failed"}),
        ({"oneOf": [{"type": "integer"}, {"const": 1}]}, 1, {"oneOf": "failed"}),
        ({"anyOf": [{"uniqueItems": True}]}, [1, 1], {"uniqueItems": "failed"}),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}},
            {"a": 1},
            {"dependencies": "failed"},
        ),
        ({"format": "zip", "not": {}}, "x", {"format": "not checked", "not": "failed"}),
        ({"$ref": "http://x.example", "not": {}}, "x", {"not": "not checked"}),
        ({"pattern": "(", "not": {}}, "x", {"not": "not checked"}),
    ],
)
def test_a_value_is_checked_for_each_keyword(
    schema: dict[str, Any], value: Any, states: dict[str, str]
) -> None:
    assert states_of(schema, value, list(states)) == states


def test_the_process_does_not_keep_the_patterns_of_its_clients() -> None:
    compiled = ref(re.compile("(?=x)" * 100))
    assert states_of({"pattern": "(?=x)" * 100}, "x", ["pattern"]) == {"pattern": "checked"}
    assert compiled() is None


def test_references_to_other_places_are_not_opened(tmp_path: Path) -> None:
    """The reference is to a file instead of a URL. By default, jsonschema opens both."""
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    schema = {"not": {"$ref": path.as_uri()}}
    assert states_of(schema, 1, ["not"]) == {"not": "not checked"}
    local = {"not": {"$ref": "#/$defs/a"}, "$defs": {"a": {"type": "integer"}}}
    assert states_of(local, 1, ["not"]) == {"not": "failed"}


@pytest.mark.process
@pytest.mark.parametrize(("count", "on_loop"), [(MAX_LOOP_ITEMS - 2, True), (1000, False)])
def test_the_work_on_a_large_schema_is_done_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, count: int, on_loop: bool
) -> None:
    schema = {"properties": {str(n): {"format": "zip"} for n in range(count)}}
    used: list[threading.Thread] = []

    def noting(work: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            used.append(threading.current_thread())
            return work(*arguments)

        return noted

    for name in ("needs_rewriting", "checked_schema"):
        monkeypatch.setattr(schemas, name, noting(getattr(schemas, name)))

    async def found() -> Any:
        templates = Templates()
        made = await schemas.enforced_schema(templates, small_model(), schema, False)
        await templates.close()
        return made

    assert asyncio.run(found()) == checked_schema(schema, rewritten(schema), False)
    assert [one is threading.current_thread() for one in used] == [on_loop] * 2


@pytest.mark.process
def test_another_process_rewrites_schemas() -> None:
    schema: dict[str, Any] = {"not": {"const": "a"}, "format": "zip"}
    large = {"not": {"const": "x" * MAX_BYTES}}
    plain = {"type": "string"}

    async def found() -> tuple[Any, ...]:
        templates = Templates()
        made = [await templates.rewritten(one) for one in (schema, large, plain)]
        await templates.close()
        return tuple(made)

    assert asyncio.run(found()) == (rewritten(schema), (large, [], []), (plain, [], []))


@pytest.mark.process
def test_a_fork_is_checked_with_the_text_of_its_parent() -> None:
    def entry(text: str, **more: Any) -> Token:
        given: dict[str, Any] = {"logprob": -1.0, "finish_reason": None, **more}
        return Token(token=1, stream_id=0, text=text, **given)

    async def outcomes() -> dict[int, dict[str, KeywordState]]:
        templates = Templates()
        checks = Checks(templates, None, Checked({"uniqueItems": True}, ["uniqueItems"]))
        await checks.read([entry("[1")])
        await checks.read([entry(",1]", seq=1, parent=0, pos=1, finish_reason="stop")])
        await checks.read([entry(",2]", pos=1, finish_reason="stop")])
        await templates.close()
        return checks.outcomes

    found = asyncio.run(outcomes())
    assert found == {0: {"uniqueItems": "checked"}, 1: {"uniqueItems": "failed"}}


def called(gateway: Gateway, schema: dict[str, Any], **more: Any) -> httpx.Response:
    function = {"name": "f", "parameters": schema, **more}
    other = {"name": "g", "parameters": PLACES, "strict": True}
    body = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 60,
        "temperature": 0,
        "tools": [{"type": "function", "function": one} for one in (function, other)],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)


@pytest.mark.process
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMES, {"propertyNames": "enforced"}),
        (OTHER, {"not": "checked"}),
        (NEVER, {"not": "failed"}),
    ],
)
def test_the_receipt_of_each_interface_reports_the_keywords(
    gateway: Gateway, schema: dict[str, Any], expected: dict[str, str]
) -> None:
    [choice] = called(gateway, schema).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"place": "Bern"}
    assert choice["tokenbus"]["keywords"] == expected

    format = {"type": "json_schema", "name": "n", "schema": schema}
    body = {"input": "x", "max_output_tokens": 60, "text": {"format": format}}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=300).json()
    assert answer["tokenbus"]["keywords"] == expected

    body = {
        "messages": HELLO,
        "max_tokens": 60,
        "stream": True,
        "response_format": {"type": "json_schema", "json_schema": format},
    }
    stream = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)
    chunks = [line.removeprefix("data: ") for line in stream.text.split("\n\n")[:-2]]
    assert json.loads(chunks[-1])["choices"][0]["tokenbus"]["keywords"] == expected

    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", timeout=120)
    with client.messages.stream(
        model=MODEL,
        max_tokens=60,
        messages=HELLO,
        tools=[{"name": "f", "input_schema": schema}],
        tool_choice={"type": "tool", "name": "f"},
    ) as events:
        deltas = [event for event in events if event.type == "message_delta"]
    assert (deltas[-1].model_extra or {})["tokenbus"]["keywords"] == expected


class Counting(Templates):
    """Records the schema size of each check. If ``slow`` is true, checks fail as if they took too
    long."""

    def __init__(self, slow: bool = False) -> None:
        super().__init__()
        self.schema_bytes: list[int] = []
        self.slow = slow

    async def validate(self, schema: bytes, value: Any, keywords: Any) -> Any:
        self.schema_bytes.append(len(schema))
        if self.slow:
            raise ApiError(400, "slow")
        return dict.fromkeys(keywords, "checked")


def checked(templates: Counting, num_bytes: int, sequences: int) -> list[Any]:
    """The outcomes of sequences whose text is checked against a schema of ``num_bytes`` bytes."""
    schema = {"not": {"const": "x" * (num_bytes - len(b'{"not":{"const":""}}'))}}
    checks = Checks(templates, None, Checked(schema, ["not"]))

    async def check() -> None:
        for seq in range(sequences):
            await checks.check(seq, "{}")

    asyncio.run(check())
    return [checks.outcomes[seq]["not"] for seq in range(sequences)]


def test_a_large_schema_is_not_sent_to_be_checked() -> None:
    templates = Counting()
    assert checked(templates, MAX_SCHEMA_BYTES, 1) == ["checked"]
    assert checked(templates, MAX_SCHEMA_BYTES + 1, 128) == ["not checked"] * 128
    assert templates.schema_bytes == [MAX_SCHEMA_BYTES]


def test_the_checks_of_a_request_are_bounded_together() -> None:
    templates = Counting()
    outcomes = checked(templates, MAX_SCHEMA_BYTES, 128)
    assert set(outcomes) == {"checked", "not checked"}
    assert sum(templates.schema_bytes) < MAX_CHECKED_BYTES


def test_a_check_that_takes_too_long_is_the_last_of_its_request() -> None:
    templates = Counting(slow=True)
    assert checked(templates, 100, 128) == ["not checked"] * 128
    assert len(templates.schema_bytes) == 1


@pytest.mark.process
def test_a_strict_schema_is_enforced_or_refused(gateway: Gateway) -> None:
    refused = called(gateway, {**OTHER, "$dynamicRef": "#"}, strict=True)
    assert refused.status_code == 400
    assert '"not"' in refused.json()["error"]["message"]
    for schema, keyword in ((NAMES, "propertyNames"), (OTHER, "not")):
        [choice] = called(gateway, schema, strict=True).json()["choices"]
        assert choice["tokenbus"]["keywords"] == {keyword: "enforced"}


@pytest.mark.process
def test_a_check_that_takes_too_long_is_given_up(gateway: Gateway) -> None:
    definitions: dict[str, Any] = {"d0": {"type": "object"}}
    for depth in range(1, 30):
        both = {"$ref": f"#/$defs/d{depth - 1}"}
        definitions[f"d{depth}"] = {"allOf": [both, both]}
    schema = {**PLACES, "not": {"$ref": "#/$defs/d29"}, "$defs": definitions}
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = {"messages": HELLO, "max_tokens": 60, "response_format": format}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["tokenbus"]["keywords"]["not"] == "not checked"
