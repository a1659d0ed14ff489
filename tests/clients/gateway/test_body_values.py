"""A body over HTTP, or a line of a WebSocket, keeps the gateway's event loop for a bounded time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenbus.clients.gateway.bodies import (
    MAX_STRINGS,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    Body,
    decode_body,
)
from tokenbus.clients.gateway.conversation.parts import Call, Turn
from tokenbus.clients.gateway.conversation.rendering import for_template
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.protocol.body_bounds import MAX_PLAIN_BODY_BYTES
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.lines import line_frames
from tokenbus.protocol.messages import MAX_BODY_BYTES

ANY_TEXT = 'a "quoted" \\ text, [with] {marks}: \\" '


class AnyBody(Body):
    value: Any


class NumberedBody(Body):
    value: dict[int, float]


def read(value: Any) -> Any:
    return decode_body(json.dumps({"value": value}).encode(), AnyBody).value


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user", "content": ""}] * (MAX_STRINGS // 4),
        ["\\"] * MAX_STRINGS,
        ['"'] * MAX_STRINGS,
        [1] * MAX_VALUES,
        [[]] * (MAX_VALUES // 2),
        [{}] * (MAX_VALUES // 2),
    ],
    ids=["messages", "backslashes", "quotes", "numbers", "lists", "maps"],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        read(value)
    assert (refused.value.status, refused.value.code) == (413, "too_large")


def test_an_error_of_a_key_names_the_field() -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(b'{"value": {"a": 1}}', NumberedBody)
    assert (refused.value.param, refused.value.message) == (
        "value",
        "value: expected a whole number, not a text",
    )


def conversation(arguments: str, times: int = 1) -> list[Turn]:
    """A conversation in which the assistant has called a function ``times`` times."""
    return [Turn("assistant", [Call("1", "f", arguments)])] * times


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        (json.dumps({"a": [[]] * MAX_VALUES}), 1),
        (json.dumps({"a": [""] * MAX_VALUES}), 1),
        (json.dumps({"a": [[]] * (MAX_STRINGS // 4)}), 8),
    ],
    ids=["lists", "strings", "several calls"],
)
def test_arguments_with_too_many_values_are_refused_before_they_are_decoded(
    arguments: str, times: int
) -> None:
    assert read(arguments) == arguments
    with pytest.raises(ApiError) as refused:
        for_template(conversation(arguments, times))
    assert (refused.value.status, refused.value.code) == (413, "too_large")


def test_a_long_text_in_arguments_is_one_value() -> None:
    text = ANY_TEXT * (SMALL_BODY_BYTES // len(ANY_TEXT))
    [message] = for_template(conversation(json.dumps({"file": text})))
    assert message["tool_calls"][0]["function"]["arguments"] == {"file": text}


def test_a_long_text_is_one_value() -> None:
    text = ANY_TEXT * (MAX_BODY_BYTES // 2 // len(ANY_TEXT))
    assert read(text) == text


def test_many_values_fit() -> None:
    ids = list(range(MAX_VALUES // 2))
    assert len(json.dumps(ids)) > SMALL_BODY_BYTES
    assert read(ids) == ids


def test_a_line_with_a_long_hello_is_refused_before_it_is_decoded() -> None:
    names = json.dumps({"capabilities": ["a"] * MAX_PLAIN_BODY_BYTES})
    with pytest.raises(RequestError, match=f"{MAX_PLAIN_BODY_BYTES} are allowed"):
        line_frames(f"HELLO {names}")
