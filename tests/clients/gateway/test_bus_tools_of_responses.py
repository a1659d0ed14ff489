"""``/v1/responses`` with tools of tool workers. The gateway calls these tools itself."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenbus.clients.gateway.stored.tables import FILE

from ...processes import Bus, Gateway, until
from .openai_requests import HELLO, MODEL, openai_client, receipt

pytestmark = pytest.mark.process

NUMBERS = "[9007199254740993,7]"
FAILING = "the tool 'chat_failing' failed: ValueError: no such thing"
NAMES: Any = {"type": "function", "name": "chat_names"}
"""A function that the client offers, and calls itself."""
CALL_EVENTS = [
    "response.output_item.added",
    "response.mcp_call.in_progress",
    "response.mcp_call_arguments.delta",
    "response.mcp_call_arguments.done",
    "response.mcp_call.completed",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def api(door: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(door) as client:
        yield client


def asked(api: openai.OpenAI, *names: str, **options: Any) -> Any:
    tools: Any = [{"type": "bus", "name": name} for name in names]
    given = {"model": MODEL, "input": HELLO, "max_output_tokens": 60, "temperature": 0, **options}
    given["tools"] = [*tools, *options.get("tools", [])]
    return api.responses.create(**given)


def last_event(api: openai.OpenAI, id: str) -> Any:
    [*_, last] = api.responses.retrieve(id, stream=True)
    return last


def named(name: str) -> Any:
    return {"type": "bus", "name": name}


def items(answer: Any, kind: str) -> list[Any]:
    return [item for item in answer.output if item.type == kind]


def test_an_answer_has_the_call_and_continues_with_the_result(api: openai.OpenAI) -> None:
    answer = asked(api, "chat_numbers", tool_choice=named("chat_numbers"))
    call, message = answer.output
    assert (call.type, call.name, call.arguments) == ("mcp_call", "chat_numbers", "{}")
    assert (call.output, call.error, call.status) == (NUMBERS, None, "completed")
    assert (message.type, bool(message.content[0].text)) == ("message", True)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 60
    assert receipt(answer)["constraint"] == "tools"
    assert api.responses.retrieve(answer.id).output == answer.output


def test_the_next_request_has_the_prompt_of_the_last_turn(api: openai.OpenAI) -> None:
    """The prompt of a conversation has the same tokens if the gateway continues with a second turn,
    if the client sends the conversation again, and if the client continues it by its id."""
    given = {"extra_body": {"max_tool_turns": 1}, "tool_choice": named("chat_numbers")}
    answer = asked(api, "chat_numbers", **given)
    assert answer.incomplete_details.reason == "max_tool_turns"
    assert receipt(answer)["code"] == "max_tool_turns"
    [call] = answer.output
    assert (call.error, call.status) == ("not called: max_tool_turns is 1", "failed")
    whole = asked(api, "chat_numbers", tool_choice=named("chat_numbers"), max_output_tokens=60)
    # Without text in the second turn, the conversation ends with the result of the call.
    sent = [item.model_dump(exclude_unset=True) for item in whole.output[:1]]
    again = asked(api, "chat_numbers", input=[*HELLO, *sent], max_output_tokens=1)
    first = asked(api, "chat_numbers", max_output_tokens=1)
    assert first.usage.input_tokens + again.usage.input_tokens == whole.usage.input_tokens
    more = asked(api, input="and?", previous_response_id=whole.id, max_output_tokens=1)
    sent = [item.model_dump(exclude_unset=True) for item in whole.output]
    follow: Any = {"role": "user", "content": "and?"}
    same = asked(api, input=[*HELLO, *sent, follow], max_output_tokens=1)
    assert more.usage.input_tokens == same.usage.input_tokens


def test_a_stream_reports_each_call_and_its_result_in_order(api: openai.OpenAI) -> None:
    events = list(asked(api, "chat_numbers", tool_choice=named("chat_numbers"), stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = [one.type for one in events if getattr(one, "output_index", None) == 0]
    assert list(dict.fromkeys(kinds)) == CALL_EVENTS
    assert Counter(kinds)["response.mcp_call_arguments.delta"] >= 1
    deltas = [one.delta for one in events if one.type == "response.mcp_call_arguments.delta"]
    assert "".join(deltas) == "{}"
    [call] = [one.item for one in events if one.type == "response.output_item.done"][:1]
    assert call.output == NUMBERS
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output[0] == call
    texts = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(texts) == last.response.output_text


def test_the_error_of_a_tool_is_the_result_of_its_call(api: openai.OpenAI) -> None:
    answer = asked(api, "chat_failing", tool_choice=named("chat_failing"), max_tool_calls=1)
    assert answer.max_tool_calls == 1
    call = answer.output[0]
    assert (call.status, call.error, call.output) == ("failed", FAILING, None)
    assert items(answer, "message")


def test_a_result_that_does_not_fit_into_the_context_is_the_reason_of_the_end(
    api: openai.OpenAI,
) -> None:
    answer = asked(api, "chat_long", tool_choice=named("chat_long"))
    assert answer.incomplete_details.reason == "context_length_exceeded"
    assert receipt(answer)["code"] == "context_length_exceeded"


def test_a_call_of_the_client_s_function_ends_the_answer(api: openai.OpenAI) -> None:
    chosen: Any = {"tool_choice": {"type": "function", "name": "chat_names"}, "tools": [NAMES]}
    answer = asked(api, "chat_numbers", **chosen)
    [call] = answer.output
    assert (call.type, call.name, answer.status) == ("function_call", "chat_names", "completed")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Ann"}
    more = asked(api, "chat_numbers", input=[result], previous_response_id=answer.id)
    assert more.output


def test_a_request_that_cannot_be_served_is_refused(api: openai.OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="may not call the tool 'secret'"):
        asked(api, "secret")
    with pytest.raises(openai.InternalServerError) as refused:
        asked(api, "chat_gone", stream=True)
    assert refused.value.status_code == 503
    assert asked(api, "chat_gone", tool_choice="none", max_output_tokens=1).output
    unused = api.responses.with_raw_response.create(
        model=MODEL, input="hi", max_output_tokens=1, max_tool_calls=2
    )
    assert unused.headers["x-tokenbus-ignored"] == "max_tool_calls"


def test_a_response_in_the_background_calls_tools_and_is_cancelled_with_its_call(
    api: openai.OpenAI, folder: Path
) -> None:
    begun = asked(api, "chat_numbers", tool_choice=named("chat_numbers"), background=True)
    last = last_event(api, begun.id)
    assert last.type == "response.incomplete"
    assert last.response.output[0].output == NUMBERS

    marks = folder / "begun", folder / "cancelled"
    for file in marks:
        file.unlink(missing_ok=True)
    endless = asked(api, "chat_endless", tool_choice=named("chat_endless"), background=True)
    until(marks[0].exists, 120.0, "a call")
    assert api.responses.cancel(endless.id).status == "cancelled"
    until(marks[1].exists, 120.0, "the end of the call")


def test_a_call_is_not_made_again_if_its_gateway_dies(
    steered: Bus, api: openai.OpenAI, folder: Path
) -> None:
    first = steered.start_gateway()
    with openai_client(first) as other:
        choice = named("chat_counted")
        begun = asked(other, "chat_counted", tool_choice=choice, background=True)
    until((folder / "counted").exists, 120.0, "a call")
    first.process.kill()
    with sqlite3.connect(steered.folder / FILE, timeout=120.0) as database:
        # The killed gateway's lease on the response expires now.
        database.execute("UPDATE responses SET lease = 0 WHERE id = ?", (begun.id,))
    last = last_event(api, begun.id)
    call = last.response.output[0]
    assert (call.name, call.status) == ("chat_counted", "failed")
    assert "which may or may not have been made" in call.error
    assert last.response.output_text
    assert (folder / "counted").read_text() == "x"
