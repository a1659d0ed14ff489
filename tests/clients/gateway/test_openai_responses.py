"""``/v1/responses``, as the openai package uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from ...processes import Gateway, until
from .openai_requests import MODEL, PERSON, WEATHER, openai_client, receipt

pytestmark = pytest.mark.process

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


def respond(api: openai.OpenAI, input: Any = "hello", **options: Any) -> Response:
    given: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0, **options}
    answer = api.responses.create(model=MODEL, input=input, **given)
    assert isinstance(answer, Response)
    return answer


def events(api: openai.OpenAI, input: Any = "hello", **options: Any) -> list[Any]:
    given: dict[str, Any] = {"max_output_tokens": 8, "temperature": 0, **options}
    with api.responses.stream(model=MODEL, input=input, **given) as stream:
        return list(stream)


def test_a_text_is_answered(api: openai.OpenAI) -> None:
    answer = respond(api, store=False)
    chat = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=8,
        temperature=0,
    )
    assert answer.output_text == chat.choices[0].message.content
    assert (answer.status, answer.object, answer.model) == ("incomplete", "response", MODEL)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.total_tokens == chat.usage.total_tokens
    assert answer.usage.input_tokens_details.cached_tokens >= 0


def test_a_stream_describes_how_the_answer_grows(api: openai.OpenAI) -> None:
    expected = respond(api)
    found = events(api)
    kinds = [event.type for event in found]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in found] == list(range(len(found)))
    deltas = [e.delta for e in found if e.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.output_text
    assert found[-1].response.output_text == expected.output_text


def test_a_conversation_is_sent_whole(api: openai.OpenAI) -> None:
    called = respond(
        api, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_output_tokens=80
    )
    [call] = called.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert json.loads(call.arguments)["place"] in ("Bern", "Rome")
    assert (called.status, call.name, call.status) == ("completed", "weather", "completed")
    assert receipt(called) == {"constraint": "tools", "ended": "complete"}
    conversation: Any = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "The weather?"},
        call.model_dump(exclude_unset=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        *[item.model_dump(exclude_unset=True) for item in respond(api).output],
    ]
    raw = api.responses.with_raw_response.create(
        model=MODEL, input=conversation, max_output_tokens=2, instructions="Be kind.", user="ann"
    )
    answer = raw.parse()
    assert isinstance(answer.output[0], ResponseOutputMessage)
    assert raw.headers["x-tokenbus-ignored"] == "user"


def test_calls_are_streamed(api: openai.OpenAI) -> None:
    given: dict[str, Any] = {
        "tools": TOOLS,
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 80,
    }

    def num_parts() -> int:
        """Checks a streamed call; returns the number of its parts."""
        found = events(api, **given)
        deltas = [e.delta for e in found if e.type == "response.function_call_arguments.delta"]
        [done] = [e for e in found if e.type == "response.function_call_arguments.done"]
        [call] = found[-1].response.output
        assert "".join(deltas) == done.arguments == call.arguments
        assert found[-1].type == "response.completed"
        return len(deltas)

    # A gateway that gets no CPU time for a while sends all tokens of that time as one part.
    until(lambda: num_parts() > 1, 300.0, "a call in several parts")


def test_the_format_of_a_text_is_enforced(api: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    answer = respond(api, text=text, max_output_tokens=60)
    assert set(json.loads(answer.output_text)) == {"name", "age"}
    assert receipt(answer) == {"constraint": "json_schema", "ended": "complete"}
    parsed = api.responses.parse(model=MODEL, input="x", text_format=Person, max_output_tokens=40)
    assert isinstance(parsed.output_parsed, Person)


def test_logprobs_are_included_where_asked_for(api: openai.OpenAI) -> None:
    answer = respond(api, include=["message.output_text.logprobs"], top_logprobs=1)
    [item] = answer.output
    assert isinstance(item, ResponseOutputMessage)
    [part] = item.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(len(one.top_logprobs) == 1 for one in part.logprobs)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"input": "word " * 2000}, "input"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_needs_a_memory_or_more_than_text_is_refused(
    api: openai.OpenAI, given: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        respond(api, **given)
    if param is not None:
        assert caught.value.param == param


# --- large requests ------------------------------------------------------------------------------

LARGE: Any = {"metadata": {"notes": "x" * 300_000}}


@pytest.mark.parametrize("given", [{"background": True}, {"store": True}])
def test_a_stored_response_copies_a_bounded_part_of_its_request(
    api: openai.OpenAI, given: dict[str, Any]
) -> None:
    with pytest.raises(openai.APIStatusError, match="send store=false") as refused:
        respond(api, **LARGE, **given)
    assert (refused.value.status_code, refused.value.code) == (413, "too_large")


def test_a_large_request_without_store_is_not_stored(api: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 1, **LARGE}
    found = api.responses.with_raw_response.create(**given)
    assert found.headers["x-tokenbus-ignored"] == "store"
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(found.parse().id)
