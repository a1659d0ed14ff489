"""The error for a wrong value of a field has the field's path and the valid values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenbus.clients.gateway.anthropic.bodies import CreateMessage
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.bodies.reading import Body, decode_body
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import read_items

from .openai_requests import HELLO

CHAT = {"messages": HELLO}
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        (ChatRequest, {**CHAT, "temperature": "hot"}, "temperature: expected a number, not a text"),
        (
            ChatRequest,
            {**CHAT, "temperature": -1},
            "temperature: expected a number of at least 0.0, not -1",
        ),
        (ChatRequest, {"messages": []}, "messages: expected a list with a length of at least 1"),
        (ChatRequest, {"messages": 3}, "messages: expected a list, not a whole number"),
        (ChatRequest, {}, "the field 'messages' is missing"),
        (ChatRequest, {"messages": [{}]}, "the field 'messages[0].role' is missing"),
        (
            ChatRequest,
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role: expected 'system' or 'developer' or 'user' or 'assistant' or "
            "'tool' or 'function', not 'robot'",
        ),
        (
            ChatRequest,
            {"messages": [IMAGE]},
            "messages[0].content[0].type: expected 'text', not 'image_url'",
        ),
        (
            ChatRequest,
            {**CHAT, "tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name: expected 1 to 128 of the characters a-zA-Z0-9_.:-, not ''",
        ),
        (
            CreateMessage,
            {"model": "", "max_tokens": 1, "messages": HELLO, "tools": [{"name": "a b" * 30}]},
            "tools[0].name: expected 1 to 128 of the characters a-zA-Z0-9_-, not "
            f"{('a b' * 30)[:64]!r}…",
        ),
        (
            ResponsesRequest,
            {"truncation": "some"},
            "truncation: expected 'auto' or 'disabled', not 'some'",
        ),
        (
            CreateMessage,
            {"model": "", "max_tokens": "1", "messages": HELLO},
            "max_tokens: expected a whole number, not a text",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_valid_values(
    kind: type[Body], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(json.dumps(body).encode(), kind, Ignored(strict=True))
    assert caught.value.message == message


def test_a_wrong_text_is_not_read_as_the_path_of_the_value() -> None:
    # An earlier version read this text as a path. Each name in the path took some microseconds, so
    # a body of 16 MiB took half a minute.
    text = f" - at `$.{'a.' * 250_000}a`"
    body = {"messages": [{"role": text, "content": "x"}]}
    with pytest.raises(ApiError) as caught:
        decode_body(json.dumps(body).encode(), ChatRequest, Ignored())
    assert caught.value.param == "messages[0].role"
    assert len(caught.value.message) < 400


def test_an_item_of_an_unknown_type_is_refused_with_the_valid_types() -> None:
    with pytest.raises(ApiError, match=r"input\[0\].type: expected 'message' or .*, not 'audio'"):
        read_items([{"type": "audio"}], Ignored(strict=True))
