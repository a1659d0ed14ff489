"""``/v1/messages`` with tools of tool workers. The gateway calls these tools itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from ...processes import Gateway
from .openai_requests import HELLO, MODEL

pytestmark = pytest.mark.process

NUMBERS = "[9007199254740993,7]"
NAMES: dict[str, Any] = {"name": "chat_names", "input_schema": {"type": "object"}}
"""A tool that the client offers, and calls itself."""


@pytest.fixture(scope="module")
def api(door: Gateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=door.url, api_key="none", max_retries=0, timeout=300.0) as client:
        yield client


def given(*names: str, **options: Any) -> dict[str, Any]:
    tools = [{"type": "bus", "name": name} for name in names]
    body = {"model": MODEL, "max_tokens": 60, "messages": HELLO, **options}
    return {**body, "tools": [*tools, *options.get("tools", [])]}


def create(api: Anthropic, options: dict[str, Any], **more: Any) -> Any:
    """The answer without sampling. The package does not have the parameter ``temperature``."""
    return api.messages.create(**options, extra_body={"temperature": 0, **more})


def forced(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "tool", "name": name}}


def sent_back(message: Any) -> list[dict[str, Any]]:
    return [block.model_dump(exclude_unset=True) for block in message.content]


def test_an_answer_has_the_call_its_result_and_the_next_turn(api: Anthropic) -> None:
    message = create(api, given("chat_numbers", **forced("chat_numbers")))
    called, result, text = sent_back(message)
    assert (called["type"], called["name"], called["input"]) == ("mcp_tool_use", "chat_numbers", {})
    assert result == {
        "type": "mcp_tool_result",
        "tool_use_id": called["id"],
        "is_error": False,
        "content": [{"type": "text", "text": NUMBERS}],
    }
    assert text["type"] == "text"
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 60)


def test_a_stream_has_the_same_blocks(api: Anthropic) -> None:
    options = given("chat_failing", **forced("chat_failing"))
    whole = create(api, options)
    with api.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        events: list[Any] = list(stream)
        streamed: Any = stream.get_final_message()
    called, result, text = sent_back(whole)
    assert result["is_error"]
    assert result["content"][0]["text"] == (
        "the tool 'chat_failing' failed: ValueError: no such thing"
    )
    starts = [one for one in events if one.type == "content_block_start"]
    assert [one.index for one in starts] == [0, 1, 2]
    assert [one.content_block.type for one in starts] == [
        called["type"],
        result["type"],
        text["type"],
    ]
    assert [one.index for one in events if one.type == "content_block_stop"] == [0, 1, 2]
    assert sent_back(streamed)[2] == text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_answer_is_continued_with_the_prompt_of_its_last_turn(api: Anthropic) -> None:
    options = given("chat_numbers", **forced("chat_numbers"))
    paused = create(api, options, max_tool_turns=1)
    assert paused.stop_reason == "pause_turn"
    assert sent_back(paused)[1]["is_error"]
    whole = create(api, options)
    # Without the text of the second turn, the conversation ends with the result of the call.
    begun: Any = {"role": "assistant", "content": sent_back(whole)[:2]}
    tools: Any = {"model": MODEL, "tools": options["tools"]}
    first = api.messages.count_tokens(messages=HELLO, **tools)
    second = api.messages.count_tokens(messages=[*HELLO, begun], **tools)
    usage = whole.usage
    prompts = usage.input_tokens + usage.cache_read_input_tokens
    assert prompts == first.input_tokens + second.input_tokens
    del options["tool_choice"]
    more = create(api, {**options, "messages": [*HELLO, begun]})
    assert more.content


def test_a_call_of_the_client_s_tool_ends_the_answer(api: Anthropic) -> None:
    options = given("chat_numbers", tools=[NAMES], **forced("chat_names"))
    message = create(api, options)
    [call] = message.content
    assert (call.type, call.name, message.stop_reason) == ("tool_use", "chat_names", "tool_use")


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "not allowed": (given("secret"), 403, "may not call the tool 'secret'"),
    "not served": (given("chat_gone"), 503, "chat_gone"),
    "a begun answer": (
        given("chat_numbers", messages=[*HELLO, {"role": "assistant", "content": "I"}]),
        400,
        "add a user message",
    ),
    "no schema": (given(tools=[{"name": "mine"}]), 400, "'tools[0].input_schema' is missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_is_refused_at_its_beginning(
    door: Gateway, case: str
) -> None:
    body, status, message = REFUSED[case]
    answer = httpx.post(f"{door.url}/v1/messages", json={**body, "stream": True}, timeout=300)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True)


def test_a_choice_of_no_tool_does_not_look_up_tools(api: Anthropic) -> None:
    options = given("chat_gone", tool_choice={"type": "none"}, max_tokens=2)
    assert api.messages.create(**options).content


def test_an_idempotency_key_is_refused(api: Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="would call the tools again"):
        api.messages.create(**given("chat_numbers"), extra_headers={"Idempotency-Key": "a-call"})
