"""Anthropic's Messages API, with the ``anthropic`` package as its client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import Message, TextBlock, ToolUseBlock
from msgspec.structs import fields
from tokenbus.clients.gateway.anthropic.bodies import (
    CreateMessage,
)

from ...processes import Bus, Gateway, until

pytestmark = pytest.mark.process

MODEL = "embedded"
HELLO: list[Any] = [{"role": "user", "content": "Add two numbers."}]
GREEDY = {"temperature": 0}
"""The interface has this field, but the package's method does not have the parameter."""
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "today": {"type": "boolean"}},
        "required": ["city", "today"],
        "additionalProperties": False,
    },
}
CLOCK: Any = {"name": "clock", "input_schema": {"type": "object", "additionalProperties": False}}


@pytest.fixture
def claude(gateway: Gateway) -> Iterator[Anthropic]:
    """A client of the package for the gateway."""
    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=120.0) as client:
        yield client


def create(client: Anthropic, **fields: Any) -> Message:
    given = {"model": MODEL, "max_tokens": 8, "messages": HELLO, "extra_body": GREEDY, **fields}
    message = client.messages.create(**given)
    assert isinstance(message, Message)
    return message


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if isinstance(block, TextBlock))


def calls_of(message: Message) -> list[ToolUseBlock]:
    return [block for block in message.content if isinstance(block, ToolUseBlock)]


# --- text -----------------------------------------------------------------------------------------


def test_a_message_is_what_the_bus_generates(claude: Anthropic, steered: Bus) -> None:
    message = create(claude)
    with steered.client() as client:
        text = client.generate("User: Add two numbers.\nAssistant:", max_tokens=8).text()
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert text_of(message) == text
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8


def test_its_events_give_the_same_message(claude: Anthropic) -> None:
    whole = create(claude)
    with claude.messages.create(
        model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY, stream=True
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with claude.messages.stream(
        model=MODEL, max_tokens=8, messages=HELLO, extra_body=GREEDY
    ) as accumulated:
        final = accumulated.get_final_message()
    assert text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 8)
    total = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert total == claude.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens


def test_the_events_on_the_wire_have_their_names(gateway: Gateway) -> None:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": HELLO, "stream": True}
    body["temperature"] = 0
    response = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=300.0)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    named = [name.removeprefix("event: ") for name, _ in events]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert named == [value["type"] for value in data]
    assert named[1] == "ping"
    start = data[0]["message"]
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert start["usage"]["output_tokens"] == 0
    assert data[-2]["usage"]["output_tokens"] == 2


@pytest.mark.parametrize("fields", [{}, {"tools": [CLOCK]}])
def test_the_stop_sequence_that_was_found_is_named(
    claude: Anthropic, fields: dict[str, Any]
) -> None:
    whole = text_of(create(claude, max_tokens=30, **fields))
    stop = whole[12:15]
    found = create(claude, max_tokens=30, stop_sequences=["\0", stop], **fields)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert text_of(found) == whole[: whole.index(stop)]


def test_an_answer_continues_the_last_message_of_the_assistant(
    claude: Anthropic, steered: Bus
) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "def add("}]
    with steered.client() as client:
        prompt = "User: Add two numbers.\nAssistant: def add("
        assert (
            text_of(create(claude, messages=begun)) == client.generate(prompt, max_tokens=8).text()
        )


def test_system_turns_and_blocks_reach_the_prompt(claude: Anthropic) -> None:
    def count(**fields: Any) -> int:
        given: dict[str, Any] = {"model": MODEL, "messages": HELLO, **fields}
        return claude.messages.count_tokens(**given).input_tokens

    blocks = [{"type": "text", "text": "Add two numbers."}]
    assert count(messages=[{"role": "user", "content": blocks}]) == count()
    assert count(system="Be brief.") == count(system=[{"type": "text", "text": "Be brief."}])
    assert count(system="Be brief.") > count()
    assert count(tools=[WEATHER]) > count(tools=[CLOCK]) > count()
    assert count(tools=[WEATHER], tool_choice={"type": "none"}) == count()
    turns = [*HELLO, {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "1"}]
    assert count(messages=turns) > count()
    late = [*HELLO, {"role": "system", "content": "Be brief."}]
    assert count(messages=late) == count(system="Be brief.")


def test_an_optional_field_may_be_null(claude: Anthropic) -> None:
    optional = [field.name for field in fields(CreateMessage) if not field.required]
    nothing = dict.fromkeys(optional)
    assert text_of(create(claude, extra_body=nothing | GREEDY)) == text_of(create(claude))


def test_tokens_from_the_cache_are_counted_apart(claude: Anthropic) -> None:
    messages = [{"role": "user", "content": "one two three " * 60}]
    first, again = (create(claude, messages=messages, max_tokens=1).usage for _ in range(2))
    assert again.cache_read_input_tokens
    assert again.cache_creation_input_tokens == 0
    total = first.input_tokens + (first.cache_read_input_tokens or 0)
    assert again.input_tokens + again.cache_read_input_tokens == total


def test_a_schema_holds_the_answer(claude: Anthropic) -> None:
    message = create(
        claude,
        max_tokens=40,
        output_config={"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}},
    )
    assert set(json.loads(text_of(message))) == {"city", "today"}
    assert message.stop_reason == "end_turn"
    [receipt] = (message.model_extra or {}).values()
    exact = receipt.pop("exact")
    assert receipt == {"constraint": "json_schema", "ended": "complete"}
    assert isinstance(exact, bool)


# --- tools ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_must_come_has_arguments_of_its_schema(
    claude: Anthropic, choice: dict[str, str]
) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}  # type: ignore[dict-item]
    message = create(claude, max_tokens=80, tools=[WEATHER], tool_choice=choice)
    [call] = calls_of(message)
    assert message.content == [call]
    assert call.id.startswith("toolu_")
    assert call.name == "get_weather"
    assert call.input["city"] in ("Paris", "Rome")
    assert isinstance(call.input["today"], bool)
    assert message.stop_reason == "tool_use"


def test_a_call_is_streamed_as_json_text(claude: Anthropic) -> None:
    def num_parts() -> int:
        """Checks a streamed call; returns the number of its parts."""
        with claude.messages.stream(
            model=MODEL,
            max_tokens=80,
            messages=HELLO,
            extra_body=GREEDY,
            tools=[WEATHER],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        ) as stream:
            events = list(stream)
            final = stream.get_final_message()
        start = next(event for event in events if event.type == "content_block_start")
        assert isinstance(start.content_block, ToolUseBlock)
        deltas = [event.partial_json for event in events if event.type == "input_json"]
        [call] = calls_of(final)
        assert json.loads("".join(deltas)) == call.input
        assert set(call.input) == {"city", "today"}
        assert final.stop_reason == "tool_use"
        return len(deltas)

    # A gateway that gets no CPU time for a while sends all tokens of that time as one part.
    until(lambda: num_parts() > 1, 300.0, "a call in several parts")


def test_a_result_of_a_call_is_given_back(claude: Anthropic) -> None:
    asked = create(
        claude,
        max_tokens=80,
        tools=[WEATHER],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    [call] = calls_of(asked)

    def turns(**result: Any) -> list[Any]:
        block = {"type": "tool_result", "tool_use_id": call.id, **result}
        answered = {"role": "user", "content": [block, {"type": "text", "text": "So?"}]}
        return [*HELLO, {"role": "assistant", "content": asked.content}, answered]

    def count(**result: Any) -> int:
        counted = claude.messages.count_tokens(
            model=MODEL, messages=turns(**result), tools=[WEATHER]
        )
        return counted.input_tokens

    assert create(claude, messages=turns(content="sunny"), tools=[WEATHER]).content
    assert count(content="sunny") == count(content=[{"type": "text", "text": "sunny"}])
    assert count(content="sunny", is_error=True) > count(content="sunny") > count()


def test_with_auto_or_none_text_may_come(claude: Anthropic) -> None:
    free = text_of(create(claude, tools=[CLOCK], tool_choice={"type": "none"}))
    assert free == text_of(create(claude))
    message = create(claude, tools=[CLOCK], tool_choice={"type": "auto"})
    assert text_of(message)
    assert not calls_of(message)
    assert message.stop_reason == "max_tokens"


def test_a_call_that_does_not_fit_is_refused(claude: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="is 12, but the shortest text takes"):
        create(claude, max_tokens=12, tools=[WEATHER], tool_choice={"type": "any"})


def test_the_first_minute_of_the_guide(
    gateway: Gateway, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = Path(__file__).parents[3] / "docs" / "anthropic.md"
    [code] = re.findall(r"(?s)```python\n(.*?)```", guide.read_text())
    exec(code.replace("http://127.0.0.1:8080", gateway.url), {})
    assert re.fullmatch(r"get_weather \{'city': '(Rome|Paris)'.*\}\n", capsys.readouterr().out)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0]"),
        ({"thread": {"id": "thread_1"}}, "send the whole conversation"),
        ({"tools": [CLOCK, CLOCK]}, "two tools have the name 'clock'"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "x"}}, "'x'"),
        ({"tool_choice": {"type": "any"}}, "has no tools"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "'tool_choice.name' is missing"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "a", "input_schema": {"$ref": "#/nowhere"}}]}, "nowhere"),
        (
            {"tools": [CLOCK, {"name": "f", "input_schema": {"properties": {"a": "string"}}}]},
            "tools: the parameters of 'f': schema must be an object or boolean",
        ),
    ],
)
def test_a_refusal_names_the_field(claude: Anthropic, fields: dict[str, Any], says: str) -> None:
    given = {"model": MODEL, "max_tokens": 4, "messages": HELLO, **fields}
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.post("/v1/messages", body=given, cast_to=object)
    error = refused.value.response.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert says in error["error"]["message"]


def test_errors_are_typed(claude: Anthropic, gateway: Gateway) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody") as missing:
        create(claude, model="nobody")
    assert missing.value.response.json()["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.RequestTooLargeError):
        create(claude, messages=[{"role": "user", "content": "x" * 17 * 1024**2}])
    url = f"{gateway.url}/v1/messages"
    for content, kind, status in (
        (b"{", "application/json", 400),
        (b"{}", "text/plain", 415),
    ):
        response = httpx.post(url, content=content, headers={"content-type": kind}, timeout=300)
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(url, timeout=300).json()["type"] == "error"


def test_fields_without_an_effect_are_named(gateway: Gateway) -> None:
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "metadata": {"user_id": "u"},
        "messages": [{"role": "user", "content": [block, block]}],
    }
    response = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=300.0)
    assert response.status_code == 200
    assert response.headers["x-tokenbus-ignored"] == "metadata"


def test_a_client_that_leaves_ends_its_message(gateway: Gateway, steered: Bus) -> None:
    body = {"model": MODEL, "max_tokens": 900, "messages": HELLO, "stream": True}
    with steered.client() as client:
        with httpx.stream("POST", f"{gateway.url}/v1/messages", json=body, timeout=300.0) as answer:
            assert "message_start" in next(answer.iter_lines())
        until(
            lambda: not [s for s in client.status(streams=True).live if s.type == "GENERATE"],
            60.0,
            "the end of a message whose client has disconnected",
        )
