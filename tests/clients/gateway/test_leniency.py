"""Fields that a gateway does not implement are ignored and named in a header, or refused with
``strict_fields``."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from tokenbus.clients.gateway.anthropic.bodies import CreateMessage
from tokenbus.clients.gateway.bodies.leniency import MAX_NAMES, Ignored
from tokenbus.clients.gateway.bodies.reading import Body, decode_body
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import read_items
from tokenbus.protocol import expected_values

from ...processes import Bus, Gateway
from ...work import num_calls
from .openai_requests import HELLO, MODEL

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CHAT: dict[str, Any] = {"messages": HELLO}


def read(kind: type[Body], body: dict[str, Any], strict: bool = False) -> tuple[Any, list[str]]:
    ignored = Ignored(strict)
    return decode_body(json.dumps(body).encode(), kind, ignored), list(ignored.names)


def test_a_field_without_an_effect_is_named_unless_it_asks_for_nothing() -> None:
    body, names = read(ChatRequest, {**CHAT, "user": "a", "store": False, "seeed": 1, "x": None})
    assert names == ["user", "seeed"]
    assert body == read(ChatRequest, CHAT)[0]


@pytest.mark.parametrize("strict", [False, True])
def test_the_types_of_a_body_are_described_once(strict: bool) -> None:
    body = {**CHAT, "seed": 1.0}
    read(ChatRequest, body, strict)
    assert num_calls(lambda: read(ChatRequest, body, strict)) < 1_000
    assert num_calls(lambda: msgspec.inspect.type_info(ChatRequest)) > 2_000


@pytest.mark.parametrize("element", [1.0, 1, [], [1], {}, None], ids=str)
def test_the_work_of_a_repair_does_not_grow_with_elements_that_have_no_field(element: Any) -> None:
    def work(count: int) -> int:
        body = json.dumps({"messages": [element] * count}).encode()
        return num_calls(lambda: refused(body))

    def refused(body: bytes) -> None:
        with pytest.raises(ApiError):
            decode_body(body, ChatRequest, Ignored())

    work(1)  # The first call also describes the types of the body.
    assert work(2_000) < work(10) + 100


def test_the_declared_type_of_elements_is_examined_once_for_a_repair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: list[object] = []

    def kinds_of(kind: msgspec.inspect.Type) -> tuple[msgspec.inspect.Type, ...]:
        examined.append(kind)
        return expected_values.kinds_of(kind)

    monkeypatch.setattr("tokenbus.clients.gateway.bodies.leniency.kinds_of", kinds_of)
    for unknown in ({"a": 1}, {"type": "z"}, {"role": "user", "a": 1}):
        with pytest.raises(ApiError):
            read(ChatRequest, {"messages": [unknown] * 1000})
    assert len(examined) < 200


def test_unknown_fields_inside_are_dropped() -> None:
    told = {"role": "assistant", "content": "x", "annotations": [], "provider_specific_fields": {}}
    call = {"id": "1", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
    body, names = read(ChatRequest, {"messages": [{**told, "tool_calls": [call]}]})
    assert names == []
    assert body.messages[0].tool_calls[0].function.name == "f"


def test_elements_of_unknown_types_are_left_out_and_named() -> None:
    content = [{"type": "text", "text": "a"}, IMAGE]
    body, names = read(
        ChatRequest,
        {
            "messages": [{"role": "user", "content": content}],
            "tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "f"}}],
        },
    )
    assert names == ["messages[0].content[1] (image_url)", "tools[0] (web_search)"]
    assert [part.text for part in body.messages[0].content] == ["a"]
    assert [tool.function.name for tool in body.tools] == ["f"]
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    message = {"model": "", "max_tokens": 1, "messages": HELLO, "tools": [hosted]}
    body, names = read(CreateMessage, message)
    assert (body.tools, names) == ([], ["tools[0] (web_search_20250305)"])


def test_items_of_hosted_tools_are_left_out_but_references_are_not() -> None:
    ignored = Ignored()
    searched = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    items = read_items([searched, {"role": "user", "content": "x"}], ignored)
    assert len(items.input) == 1
    assert list(ignored.names) == ["input[0] (web_search_call)"]
    with pytest.raises(ApiError, match="item_reference"):
        read_items([{"type": "item_reference", "id": "msg_1"}], ignored)


@pytest.mark.parametrize("value", [8.0, 8])
def test_a_whole_number_may_be_written_as_a_fraction(value: float) -> None:
    body, names = read(ChatRequest, {**CHAT, "max_tokens": value, "temperature": 1})
    assert (body.max_tokens, body.temperature, names) == (8, 1.0, [])
    with pytest.raises(ApiError, match="max_tokens: expected a whole number"):
        read(ChatRequest, {**CHAT, "max_tokens": 8.5})


def test_a_field_that_changes_the_answer_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        read(ChatRequest, {**CHAT, "use_beam_search": True})
    assert (refused.value.status, refused.value.param) == (400, "use_beam_search")
    assert read(ChatRequest, {**CHAT, "use_beam_search": False})[1] == []


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"seeed": 1}, "seeed"),
        ({"stream_options": {"usage": True}}, "stream_options.usage"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_strict_fields_refuse_the_unknown(more: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(ChatRequest, {**CHAT, **more}, strict=True)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_strict_fields_name_known_fields_without_an_effect() -> None:
    told = {"role": "assistant", "content": "x", "annotations": []}
    body = {
        "messages": [told, told],
        "metadata": {},
        "stream_options": {"include_obfuscation": True},
    }
    names = read(ChatRequest, body, strict=True)[1]
    assert names == ["messages[].annotations", "metadata", "stream_options.include_obfuscation"]


def test_the_header_has_printable_names_and_a_bound() -> None:
    ignored = Ignored()
    for name in ("a\r\nset-cookie: b", "\u20ac", *map(str, range(MAX_NAMES))):
        ignored.add(name)
    [header] = ignored.headers.values()
    assert header.startswith("a??set-cookie: b, \\u20ac, 0, ")
    assert header.endswith(f"{MAX_NAMES - 3}, and 2 more")


def test_include_may_have_parts_that_are_not_implemented() -> None:
    body, _ = read(ResponsesRequest, {"input": "x", "include": ["file_search_call.results"]})
    ignored = Ignored()
    body.check_include(ignored)
    assert list(ignored.names) == ["include[0]"]
    with pytest.raises(ApiError, match="is not supported"):
        body.check_include(Ignored(strict=True))


# --- a gateway ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(steered: Bus) -> Gateway:
    """A gateway with the setting ``strict_fields``."""
    return steered.start_gateway(strict_fields=True)


@pytest.mark.process
@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
    ],
)
def test_each_interface_follows_the_setting(
    gateway: Gateway, strict: Gateway, path: str, limit: str
) -> None:
    given = {"model": MODEL, limit: 1, "promt": 1, "user": "ann"}
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    given[name] = HELLO if name == "messages" else "hello"
    lenient = httpx.post(gateway.url + path, json=given, timeout=300)
    assert (lenient.status_code, lenient.headers["x-tokenbus-ignored"]) == (200, "promt, user")
    refused = httpx.post(strict.url + path, json=given, timeout=300)
    assert refused.status_code == 400
    assert "unknown field 'promt'" in refused.json()["error"]["message"]
    del given["promt"]
    accepted = httpx.post(strict.url + path, json=given, timeout=300)
    assert (accepted.status_code, accepted.headers["x-tokenbus-ignored"]) == (200, "user")


@pytest.mark.process
def test_a_thread_is_refused_with_the_code_that_the_package_expects(gateway: Gateway) -> None:
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=120)
    given = {"model": MODEL, "max_tokens": 1, "messages": HELLO, "thread": {"id": "thread_1"}}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.post("/v1/messages", body=given, cast_to=object)
    details = refused.value.response.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request"}
