"""``/v1/chat/completions`` with tools of tool workers. The gateway calls these tools itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tokenbus.clients.request_options import status_call
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.messages import Status

from ...processes import Bus, Gateway, until
from .openai_requests import ECHO_TEMPLATE, HELLO, MODEL, openai_client, receipt

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def api(door: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(door) as client:
        yield client


def chat(api: openai.OpenAI, *names: str, **options: Any) -> ChatCompletion:
    given: dict[str, Any] = {"max_completion_tokens": 90, "temperature": 0, **options}
    given.setdefault("tools", bus_tools(*names))
    messages: Any = HELLO
    answer = api.chat.completions.create(model=MODEL, messages=messages, **given)
    assert isinstance(answer, ChatCompletion)
    return answer


def stream(api: openai.OpenAI, **options: Any) -> list[ChatCompletionChunk]:
    given: dict[str, Any] = {"max_completion_tokens": 90, "temperature": 0, **options}
    usage: Any = {"include_usage": True}
    chunks: Any = api.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=usage, **given
    )
    return list(chunks)


def bus_tools(*names: str) -> Any:
    return [{"type": "bus", "name": name} for name in names]


def named(name: str) -> Any:
    return {"type": "bus", "name": name}


def without_ids(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(call["id"].startswith("call_") for call in calls)
    return [{key: value for key, value in call.items() if key != "id"} for call in calls]


PING: Any = {"type": "function", "function": {"name": "chat_names"}}
"""A function that the client offers, and calls itself."""
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "chat_numbers": ({"result": [2**53 + 1, 7]}, "[9007199254740993,7]"),
    "chat_failing": (
        {
            "error": "the tool 'chat_failing' failed: ValueError: no such thing",
            "code": "tool_failed",
        },
        "Error: the tool 'chat_failing' failed: ValueError: no such thing",
    ),
}
"""For each tool, the report of its call in the receipt, and the text that the model receives."""


@pytest.mark.parametrize("name", ANSWERS)
def test_the_result_or_the_error_of_a_call_is_in_the_next_prompt(
    api: openai.OpenAI, door: Gateway, steered: Bus, ending: dict[str, int], name: str
) -> None:
    answer = chat(api, name, tool_choice=named(name), logit_bias=ending)
    [choice] = answer.choices
    reported, text = ANSWERS[name]
    [call] = receipt(choice)["tool_calls"]
    assert without_ids([call]) == [{"name": name, "arguments": "{}", **reported}]
    assert choice.finish_reason == "stop"
    assert (choice.message.tool_calls, choice.message.content) == (None, "")
    # The prompts of both turns have as many tokens as if the client made the call itself.
    with steered.client() as client:
        status = client.ask(status_call(60.0, tools=[name])).status
    assert isinstance(status, Status)
    function = {**msgspec.to_builtins(status.tools[0]), "timeout_s": None}
    function = {key: function.get(key, "") for key in ("name", "description", "parameters")}
    called = {"id": call["id"], "type": "function", "function": {"name": name, "arguments": "{}"}}
    results: list[Any] = [
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text},
    ]
    tokens = 0
    for messages in (HELLO, HELLO + results):
        body = {"messages": messages, "tools": [{"type": "function", "function": function}]}
        tokens += httpx.post(f"{door.url}/tokenize", json=body, timeout=300).json()["count"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens


def test_a_stream_has_the_text_of_all_turns_and_the_calls_at_its_end(api: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "tools": bus_tools("chat_weather"),
        "tool_choice": {"type": "function", "function": {"name": "chat_weather"}},
    }
    whole = chat(api, **given)
    *chunks, last = stream(api, **given)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
    assert not any(choice.delta.tool_calls for choice in choices)
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text
    assert text == whole.choices[0].message.content
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    found, expected = receipt(choices[-1]), receipt(whole.choices[0])
    calls = without_ids(found.pop("tool_calls"))
    assert [call["result"] for call in calls] in (["rain in Oslo"], ["rain in Rome"])
    assert calls == without_ids(expected.pop("tool_calls"))
    assert found == expected
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert last.usage.completion_tokens == 90


def test_several_calls_of_one_turn(api: openai.OpenAI, ending: dict[str, int]) -> None:
    body = {"min_tokens": 40}
    given: dict[str, Any] = {"tool_choice": "required", "logit_bias": ending}
    [choice] = chat(api, "chat_weather", "chat_numbers", **given, extra_body=body).choices
    calls = receipt(choice)["tool_calls"]
    assert len(calls) == 2
    assert len({call["id"] for call in calls}) == 2
    assert all("result" in call for call in calls)


def test_calls_beyond_max_tool_calls_get_an_error(
    api: openai.OpenAI, ending: dict[str, int]
) -> None:
    body = {"min_tokens": 40, "max_tool_calls": 1}
    given: dict[str, Any] = {"tool_choice": "required", "logit_bias": ending}
    [choice] = chat(api, "chat_weather", "chat_numbers", **given, extra_body=body).choices
    first, second = receipt(choice)["tool_calls"]
    assert "result" in first
    assert second["error"] == "not called: max_tool_calls is 1"
    assert choice.finish_reason == "stop"


def test_a_turn_with_calls_of_the_client_ends_the_answer(
    api: openai.OpenAI, ending: dict[str, int]
) -> None:
    given: dict[str, Any] = {
        "tools": [*bus_tools("chat_numbers"), PING],
        "tool_choice": "required",
        "temperature": 2,
        "logit_bias": ending,
        "extra_body": {"min_tokens": 40},
    }
    # With some seeds, the first turn calls both tools.
    for seed in range(200):
        [choice] = chat(api, **given, seed=seed).choices
        if choice.finish_reason == "tool_calls" and "tool_calls" in receipt(choice):
            break
    [own] = choice.message.tool_calls or []
    assert own.type == "function"
    assert own.function.name == "chat_names"
    [made] = receipt(choice)["tool_calls"]
    assert (made["name"], made["result"]) == ("chat_numbers", [2**53 + 1, 7])

    # The client appends the messages about the gateway's call, and the result of its own call.
    called, result = receipt(choice)["tool_messages"]
    assert [call["id"] for call in called["tool_calls"]] == [made["id"]]
    assert (result["tool_call_id"], result["content"]) == (made["id"], "[9007199254740993,7]")
    message: Any = choice.message.model_dump(exclude_unset=True)
    mine: Any = {"role": "tool", "tool_call_id": own.id, "content": "Ann"}
    followed = api.chat.completions.with_raw_response.create(
        model=MODEL, messages=[*HELLO, called, result, message, mine], max_tokens=2, tools=[PING]
    )
    assert followed.parse().choices[0].message.content
    assert "x-tokenbus-ignored" not in followed.headers

    *chunks, _ = stream(api, **given, seed=seed)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert [d.function.name for d in deltas if d.function and d.function.name] == ["chat_names"]
    assert choices[-1].finish_reason == "tool_calls"
    assert without_ids(receipt(choices[-1])["tool_calls"]) == without_ids([made])


def test_the_turns_of_an_answer_are_bounded(api: openai.OpenAI, door: Gateway) -> None:
    prompt = {"prompt": "<tool_call>"}
    found = httpx.post(f"{door.url}/tokenize", json=prompt, timeout=300).json()
    # Under this template, each turn has the same prompt, which makes a call likely.
    answer = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "<tool_call> " * 8}],
        temperature=0,
        logit_bias={str(token): 60 for token in found["tokens"]},
        tools=bus_tools("chat_numbers"),
        parallel_tool_calls=False,
        extra_body={"chat_template": ECHO_TEMPLATE, "max_tool_turns": 3},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "length"
    reported = receipt(choice)
    assert (reported["code"], "max_tool_turns is 3" in reported["error"]) == (
        "max_tool_turns",
        True,
    )
    results = [call.get("result") or call["code"] for call in reported["tool_calls"]]
    assert results == [[2**53 + 1, 7]] * 2 + ["not_called"]


def test_a_result_that_does_not_fit_into_the_context_ends_the_answer(api: openai.OpenAI) -> None:
    [choice] = chat(api, "chat_long", tool_choice=named("chat_long")).choices
    assert choice.finish_reason == "length"
    reported = receipt(choice)
    assert reported["code"] == "context_length_exceeded"
    [call] = reported["tool_calls"]
    assert call["result"] == "é" * 60_000


def test_a_result_that_cannot_be_sent_is_an_error(
    api: openai.OpenAI, ending: dict[str, int]
) -> None:
    given: dict[str, Any] = {"tool_choice": named("chat_too_long"), "logit_bias": ending}
    [choice] = chat(api, "chat_too_long", **given).choices
    [call] = receipt(choice)["tool_calls"]
    assert (call["code"], "at most 131072 can be sent" in call["error"]) == ("tool_failed", True)
    assert choice.finish_reason == "stop"


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "not allowed": ({"tools": bus_tools("secret")}, 403, "not_allowed"),
    "not served": ({"tools": bus_tools("chat_weather", "chat_gone")}, 503, "no_worker"),
    "a name twice": ({"tools": bus_tools("chat_weather", "chat_weather")}, 400, "invalid_field"),
    "too many": ({"tools": bus_tools(*["chat_weather"] * 129)}, 400, "invalid_field"),
    "several answers": ({"n": 2}, 400, "invalid_field"),
    "token ids": ({"return_token_ids": True}, 400, "invalid_field"),
    "turns": ({"max_tool_turns": 0}, 400, "invalid_field"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_is_refused_at_its_beginning(
    door: Gateway, case: str
) -> None:
    body, status, code = REFUSED[case]
    given = {"messages": HELLO, "tools": bus_tools("chat_weather"), "stream": True, **body}
    answer = httpx.post(f"{door.url}/v1/chat/completions", json=given, timeout=300)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_choice_of_no_tool_does_not_look_up_tools(api: openai.OpenAI) -> None:
    answer = chat(api, "chat_gone", tool_choice="none", max_completion_tokens=2)
    assert answer.choices[0].message.content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_disconnects_cancels_a_running_call(
    door: Gateway, folder: Path, streamed: bool
) -> None:
    begun, cancelled = folder / "begun", folder / "cancelled"
    for file in (begun, cancelled):
        file.unlink(missing_ok=True)
    body = {
        "messages": HELLO,
        "tools": bus_tools("chat_endless"),
        "tool_choice": named("chat_endless"),
        "temperature": 0,
        "stream": streamed,
    }

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            sent = asyncio.ensure_future(client.post(f"{door.url}/v1/chat/completions", json=body))
            await asyncio.to_thread(until, begun.exists, 120.0, "a call")
            assert not sent.done()
            sent.cancel()
            await asyncio.gather(sent, return_exceptions=True)

    asyncio.run(leave())
    until(cancelled.exists, 120.0, "the end of the call")


def test_an_idempotency_key_is_refused(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="would call the tools again"):
        chat(api, "chat_numbers", extra_headers={"Idempotency-Key": "a-call"})


def test_a_client_of_the_bus_calls_its_tools_itself(steered: Bus) -> None:
    with (
        steered.client() as client,
        pytest.raises(RequestError, match="only in POST /v1/chat/completions"),
    ):
        client.chat(HELLO, tools=bus_tools("chat_weather"))
