"""``/v1/chat/completions``, as the openai package and httpx use it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from ...processes import Gateway
from .openai_requests import (
    ECHO_TEMPLATE,
    HELLO,
    MODEL,
    PERSON,
    WEATHER,
    openai_client,
    receipt,
)

pytestmark = pytest.mark.process

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "It.", "parameters": WEATHER},
    },
    {"type": "function", "function": {"name": "ping"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


def chat(api: openai.OpenAI, messages: Any = HELLO, **options: Any) -> ChatCompletion:
    given: dict[str, Any] = {"max_completion_tokens": 8, "temperature": 0, **options}
    answer = api.chat.completions.create(model=MODEL, messages=messages, **given)
    assert isinstance(answer, ChatCompletion)
    return answer


def stream(api: openai.OpenAI, messages: Any = HELLO, **options: Any) -> list[ChatCompletionChunk]:
    given: dict[str, Any] = {"max_completion_tokens": 8, "temperature": 0, **options}
    chunks: Iterable[Any] = api.chat.completions.create(
        model=MODEL, messages=messages, stream=True, **given
    )
    return list(chunks)


def content(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    found = [c for chunk in chunks for c in chunk.choices if c.index == index]
    return "".join(choice.delta.content or "" for choice in found)


def test_a_message_is_answered_under_the_plain_template(api: openai.OpenAI) -> None:
    answer = chat(api)
    [choice] = answer.choices
    prompt = "User: hello\nAssistant:"
    expected = api.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert choice.message.content == expected.choices[0].text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "length")
    assert choice.message.tool_calls is None
    assert answer.usage is not None
    assert expected.usage is not None
    assert answer.usage.total_tokens == expected.usage.total_tokens


def test_a_stream_has_the_same_content(api: openai.OpenAI) -> None:
    whole = chat(api)
    chunks = stream(api, stream_options={"include_usage": True})
    assert content(chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = stream(api, n=2, temperature=1, seed=3)
    expected = chat(api, n=2, temperature=1, seed=3).choices
    assert [content(several, i) for i in (0, 1)] == [c.message.content for c in expected]


def test_the_answer_may_be_as_long_as_the_context(api: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 1000}]
    answer = api.chat.completions.create(model=MODEL, messages=long, temperature=0)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024
    with pytest.raises(openai.BadRequestError) as caught:
        chat(api, [{"role": "user", "content": "word " * 2000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_an_answer_has_a_minimum_of_tokens(api: openai.OpenAI) -> None:
    def tokens(**fields: Any) -> list[int]:
        answer = chat(api, extra_body={"return_token_ids": True, **fields})
        found: list[int] = (answer.choices[0].model_extra or {})["token_ids"]
        return found

    first, second, *_ = tokens()
    assert tokens(stop_token_ids=[second]) == [first, second]
    longer = tokens(stop_token_ids=[second], min_tokens=7)
    assert len(longer) >= 7
    assert second not in longer[:7]


def test_logprobs_have_the_bytes_of_each_token(api: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "日本 ü"}]
    answer = chat(api, messages, logprobs=True, top_logprobs=2, temperature=2, seed=1)
    [choice] = answer.choices
    assert choice.logprobs is not None
    found = choice.logprobs.content or []
    raw = b"".join(bytes(token.bytes or []) for token in found)
    assert raw.decode("utf-8", "replace") == choice.message.content
    for token in found:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
    chunks = stream(api, messages, logprobs=True, top_logprobs=2, temperature=2, seed=1)
    pieces = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    streamed = [token for piece in pieces for token in piece.content or []]
    assert [(t.token, t.bytes) for t in streamed] == [(t.token, t.bytes) for t in found]
    expected = [token.logprob for token in found]
    assert [token.logprob for token in streamed] == pytest.approx(expected, abs=1e-3)


def test_templates_of_requests(api: openai.OpenAI) -> None:
    expected = api.completions.create(model=MODEL, prompt="a = b", max_tokens=8, temperature=0)
    given: Any = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    template = "{{ start }}{{ messages[0].content }}"
    body = {"chat_template": template, "chat_template_kwargs": {"start": "a = "}}
    assert chat(api, given, extra_body=body).choices[0].message.content == expected.choices[0].text
    begun: Any = [*HELLO, {"role": "assistant", "content": "I am"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    answer = chat(api, begun, extra_body=more)
    prompt = "User: hello\nAssistant: I am"
    expected = api.completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == expected.choices[0].text


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"chat_template": "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2}, "2 s of CPU"),
        ({"chat_template": "{{ raise_exception('no system message') }}"}, "no system message"),
        ({"chat_template": "{{ nothing"}, "line 1"),
        ({"chat_template": ""}, "the prompt is empty"),
        ({"continue_final_message": True}, "exclude each other"),
        ({"chat_template_kwargs": {"messages": []}}, "remove 'messages'"),
    ],
    ids=["loops", "raises", "syntax", "empty", "both", "name"],
)
def test_a_template_that_cannot_be_used_is_refused(
    gateway: Gateway, body: dict[str, Any], what: str
) -> None:
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json={"messages": HELLO, "max_tokens": 2, **body},
        timeout=300,
    )
    assert answer.status_code == 400
    assert what in answer.json()["error"]["message"]


def test_a_response_format_is_enforced(api: openai.OpenAI) -> None:
    schema = {"name": "person", "strict": True, "schema": PERSON}
    format: Any = {"type": "json_schema", "json_schema": schema}
    [choice] = chat(api, response_format=format, max_completion_tokens=60).choices
    assert set(json.loads(choice.message.content or "")) == {"name", "age"}
    assert receipt(choice) == {"constraint": "json_schema", "ended": "complete"}
    chunks = stream(api, response_format=format, max_completion_tokens=60)
    assert content(chunks) == choice.message.content
    assert receipt(chunks[-1].choices[0]) == receipt(choice)
    [choice] = chat(api, response_format={"type": "json_object"}).choices
    assert (choice.message.content or "").startswith("{")
    assert receipt(choice)["constraint"] == "json_object"
    parsed = api.chat.completions.parse(
        model=MODEL, messages=HELLO, response_format=Person, max_completion_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with pytest.raises(openai.BadRequestError, match="max_tokens is 3, but the shortest text"):
        chat(api, response_format=format, max_completion_tokens=3)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_call_that_is_demanded_is_held_to_its_schema(api: openai.OpenAI, choice: Any) -> None:
    given: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_completion_tokens": 80,
        "temperature": 1,
    }
    for seed in range(3):
        answer = chat(api, seed=seed, **given).choices[0]
        assert answer.finish_reason == "tool_calls"
        assert receipt(answer) == {"constraint": "tools", "ended": "complete"}
        assert answer.message.content is None
        [call] = answer.message.tool_calls or []
        assert call.type == "function"
        assert call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if choice is NAMED or call.function.name == "weather":
            assert call.function.name == "weather"
            assert arguments["place"] in ("Bern", "Rome")
            assert arguments["days"] in (1, 2, 3)
        else:
            assert (call.function.name, arguments) == ("ping", {})

        with api.chat.completions.stream(model=MODEL, messages=HELLO, seed=seed, **given) as events:
            [final] = events.get_final_completion().choices
        [streamed] = final.message.tool_calls or []
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
        assert final.finish_reason == "tool_calls"


def test_several_calls_and_what_follows_them(api: openai.OpenAI) -> None:
    answer = chat(api, tools=TOOLS, tool_choice="required", max_completion_tokens=120)
    calls = answer.choices[0].message.tool_calls or []
    assert len(calls) > 1
    assert len({call.id for call in calls}) == len(calls)
    first: Any = answer.choices[0].message.model_dump(exclude_unset=True)
    result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"}
    followed = api.chat.completions.with_raw_response.create(
        model=MODEL, messages=[*HELLO, first, result], max_tokens=2, tools=TOOLS
    )
    assert followed.parse().choices[0].message.content
    assert "x-tokenbus-ignored" not in followed.headers


def test_an_answer_under_auto_is_free_until_a_call_begins(
    api: openai.OpenAI, gateway: Gateway
) -> None:
    free = chat(api, tools=TOOLS).choices[0]
    assert free.message.content
    assert (free.message.tool_calls, free.finish_reason) == (None, "length")

    found = httpx.post(
        f"{gateway.url}/tokenize", json={"prompt": "<tool_call>"}, timeout=300
    ).json()
    given: dict[str, Any] = {
        # Only the tokens of "<tool_call>" are likely, and the prompt repeats this text.
        "messages": [{"role": "user", "content": "<tool_call> " * 8}],
        "logit_bias": {str(token): 60 for token in found["tokens"]},
        "extra_body": {"chat_template": ECHO_TEMPLATE},
        "tools": TOOLS[:1],
        "parallel_tool_calls": False,
        "max_completion_tokens": 80,
    }
    called = chat(api, **given).choices[0]
    assert (called.finish_reason, called.message.content) == ("tool_calls", None)
    [call] = called.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments)["place"] in ("Bern", "Rome")
    chunks = stream(api, **given)
    assert content(chunks) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_a_choice_nothing_is_called(api: openai.OpenAI) -> None:
    answer = chat(api, tools=TOOLS, tool_choice="none").choices[0]
    assert answer.message.content == chat(api).choices[0].message.content
    assert (answer.model_extra or {}).keys() == {"tokenbus"}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no messages": ({"messages": []}, "messages"),
    "a hosted tool that is demanded": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
    ),
    "required without tools": ({"tool_choice": "required"}, "tool_choice"),
    "an unknown name": ({"tool_choice": NAMED, "tools": TOOLS[1:]}, "tool_choice"),
    "a name twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "arguments of another type": (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        "tools",
    ),
    "a schema that is not supported": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "parameters": {"properties": {"a": {"$ref": "http://x.example"}}},
                    },
                }
            ],
        },
        "tools",
    ),
    "tools and another constraint": (
        {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "two limits": ({"max_completion_tokens": 3}, "max_tokens"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities[1]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(gateway: Gateway, name: str) -> None:
    body, param = REFUSED[name]
    answer = httpx.post(
        f"{gateway.url}/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO, "max_tokens": 2, **body},
        timeout=300,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_fields_without_an_effect_are_named(api: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "assistant", "content": "x", "annotations": []},
        {"role": "assistant", "content": "y", "annotations": []},
        *HELLO,
    ]
    answer = api.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=messages,
        max_tokens=2,
        metadata={"a": "b"},
        reasoning_effort="low",
        stream_options={"include_obfuscation": True},
    )
    assert answer.headers["x-tokenbus-ignored"].split(", ") == [
        "metadata",
        "reasoning_effort",
    ]
