"""Every answer is valid input of the next request, and renders to the text that the model wrote."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.clients import GeneratedSequence
from tokenbus.clients.gateway.answer_forms import HERMES, Function, Wanted, structure_of
from tokenbus.clients.gateway.answer_parts import AnswerForm
from tokenbus.clients.gateway.anthropic.bodies import CreateMessage
from tokenbus.clients.gateway.anthropic.messages import MessageJob
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.bodies.reading import decode_body
from tokenbus.clients.gateway.conversation.parts import Conversation
from tokenbus.clients.gateway.conversation.rendering import for_template
from tokenbus.clients.gateway.json import encode
from tokenbus.clients.gateway.openai.chat import message_of
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.chat_chunks import ChatChunks
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import read_items, to_turns
from tokenbus.clients.gateway.openai.response_jobs import ResponseQuestion
from tokenbus.clients.gateway.openai.response_output import Output
from tokenbus.clients.gateway.openai.response_tools import OfferedTools
from tokenbus.clients.gateway.templates.template_process import render
from tokenbus.protocol.messages import Token

from ...counts import examples
from ...work import num_calls
from .small_model import played, prepared

TEMPLATE = """
{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n' if not loop.first }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- (c.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
"""A chat template that writes thinking and calls like the Hermes family."""
FUNCTIONS = [Function("weather", {"type": "object"}), Function("ping", {"type": "object"})]
FORM = AnswerForm(structure_of(HERMES, Wanted(FUNCTIONS, thinking="first")), {})


class Case(NamedTuple):
    """An answer, and the sizes of the pieces in which it arrives."""

    thinking: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    sizes: list[int]

    @property
    def written(self) -> str:
        thinking = f"<think>\n{self.thinking}\n</think>\n\n" if self.thinking else ""
        calls = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return thinking + self.text + "\n".join(calls)

    @property
    def entries(self) -> list[Token]:
        found, rest = [], self.written
        for size in itertools.cycle(self.sizes):
            reason: Any = None if len(rest) > size else "stop"
            found.append(
                Token(token=1, stream_id=0, logprob=-1.0, text=rest[:size], finish_reason=reason)
            )
            rest = rest[size:]
            if not rest:
                return found
        raise AssertionError


words = st.text(st.sampled_from('ab {}"\\.\n'), max_size=12).map(str.strip)
values = words | st.integers(-3, 3) | st.lists(words, max_size=2) | st.none()
some_calls = st.lists(
    st.tuples(st.sampled_from(["weather", "ping"]), st.dictionaries(words, values, max_size=2)),
    max_size=3,
)
cases = st.builds(Case, words, words, some_calls, st.lists(st.integers(1, 20), min_size=1))


def whole_chat(case: Case) -> dict[str, Any]:
    message = message_of(prepared(FORM), GeneratedSequence(0, _pieces=[case.written]))
    return json.loads(encode(message))


def streamed_chat(case: Case) -> dict[str, Any]:
    """The message that a client assembles from the chunks of a streamed answer."""
    request = msgspec.convert({"messages": [{"role": "user", "content": "x"}]}, ChatRequest)
    turns = played(prepared(FORM), [])
    chunks = ChatChunks("chatcmpl-1", 1, request, turns)
    data = b"".join(chunks.write(turns.turns[0], [entry]) for entry in case.entries).decode()
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in data.split("\n\n")[:-1]:
        delta = json.loads(event.removeprefix("data: "))["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


def next_chat(message: dict[str, Any]) -> tuple[Conversation, Ignored]:
    """Decodes the next request. Its assistant message has the fields that clients add."""
    thinking = message.get("reasoning_content")
    for number, call in enumerate(message.get("tool_calls", ())):
        call |= {"index": number, "namespace": "n", "provider_specific_fields": {"a": 1}}
    extra: dict[str, Any] = {
        "annotations": [],
        "audio": None,
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "reasoning_details": [{"type": "reasoning.text", "text": thinking}],
        "thinking_blocks": [{"type": "thinking", "thinking": thinking, "signature": ""}],
    }
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        for call in message.get("tool_calls", ())
    ]
    begin, end = ({"role": "user", "content": text} for text in ("first", "next"))
    body = {"messages": [begin, {**message, **extra}, *results, end]}
    ignored = Ignored()
    return decode_body(encode(body), ChatRequest, ignored).to_conversation(), ignored


def responses(case: Case) -> list[dict[str, Any]]:
    output = Output()
    output.feed(played(prepared(FORM), []).turns[0], case.entries)
    output.end("completed")
    return json.loads(encode(output.items))


def next_responses(items: list[dict[str, Any]]) -> tuple[Conversation, Ignored]:
    for item in items:
        if item["type"] == "reasoning":
            item |= {"encrypted_content": None}
        if item["type"] == "function_call":
            item |= {"namespace": "n", "parsed_arguments": {}}
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
        for item in items
        if item["type"] == "function_call"
    ]
    begin, end = ({"role": "user", "content": text} for text in ("first", "next"))
    ignored = Ignored()
    body = decode_body(encode({"input": [begin, *items, *results, end]}), ResponsesRequest, ignored)
    given = read_items(body.input, ignored)
    return ResponseQuestion(body, given, ignored).to_conversation({}), ignored


def anthropic(case: Case) -> list[dict[str, Any]]:
    turns = played(prepared(FORM), [case.entries])
    job = MessageJob(turns)
    found: list[dict[str, Any]] = json.loads(encode(asyncio.run(job.whole()).content))
    return found


def next_anthropic(blocks: list[dict[str, Any]]) -> tuple[Conversation, Ignored]:
    for block in blocks:
        block |= {"cache_control": {"type": "ephemeral"}}
        if block["type"] == "tool_use":
            block |= {"caller": {"type": "direct"}}
        if block["type"] == "text":
            block |= {"citations": None}
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "sunny"}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    answered = {"role": "assistant", "content": blocks}
    end = {"role": "user", "content": [*results, {"type": "text", "text": "next"}]}
    begin = {"role": "user", "content": "first"}
    body = {"model": "m", "max_tokens": 1, "messages": [begin, answered, end]}
    ignored = Ignored()
    return decode_body(encode(body), CreateMessage, ignored).to_conversation({}), ignored


DOORS: dict[str, tuple[Callable[[Case], Any], Callable[[Any], tuple[Conversation, Ignored]]]] = {
    "chat": (whole_chat, next_chat),
    "a streamed chat": (streamed_chat, next_chat),
    "responses": (responses, next_responses),
    "messages": (anthropic, next_anthropic),
}


@pytest.mark.parametrize("door", DOORS)
@settings(max_examples=examples(60), deadline=None)
@given(case=cases)
def test_an_answer_is_input_of_the_next_turn_and_renders_to_its_own_text(
    door: str, case: Case
) -> None:
    answer, follow = DOORS[door]
    conversation, ignored = follow(answer(case))
    assert list(ignored.names) == []
    text = render(TEMPLATE, for_template(conversation.turns), {"add_generation_prompt": True})
    results = "<|tool|>sunny<|end|>" * len(case.calls)
    assert text == (
        f"<|user|>first<|end|><|assistant|>{case.written}<|end|>{results}"
        "<|user|>next<|end|><|assistant|>"
    )


def test_hidden_thinking_of_another_server_is_left_out() -> None:
    hidden = {"type": "redacted_thinking", "data": "abc"}
    conversation, ignored = next_anthropic([hidden, {"type": "text", "text": "a"}])
    assert list(ignored.names) == ["messages[1].content[0] (redacted_thinking)"]
    assert [m["content"] for m in for_template(conversation.turns)] == ["first", "a", "next"]


def names_of(messages: Sequence[dict[str, Any]]) -> list[str | None]:
    return [message.get("name") for message in messages if message["role"] == "tool"]


@pytest.mark.parametrize("door", DOORS)
def test_results_have_the_names_of_their_functions(door: str) -> None:
    answer, follow = DOORS[door]
    conversation, _ = follow(answer(Case("", "", [("weather", {}), ("ping", {})], [9])))
    assert names_of(for_template(conversation.turns)) == ["weather", "ping"]


def test_the_parts_of_an_answer_over_responses_are_one_turn() -> None:
    case = Case("hm", "I look.", [("ping", {}), ("weather", {"a": 1})], [1000])
    conversation, _ = next_responses(responses(case) * 2)
    roles = [turn.role for turn in conversation.turns]
    assert roles == ["user", "assistant", "assistant", *["user"] * 5]


def test_the_work_of_an_input_is_linear_in_its_items() -> None:
    def work(count: int) -> int:
        thinking = {
            "type": "reasoning",
            "content": [{"type": "reasoning_text", "text": ""}] * count,
        }
        answer = {"role": "assistant", "content": []}
        items = read_items([thinking, *[answer] * count], Ignored()).input
        return num_calls(lambda: to_turns(items, None, OfferedTools()))

    assert work(1_600) < 10 * work(200)
