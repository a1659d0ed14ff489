"""Tools of ``/v1/responses`` as Codex sends them: in namespaces, or with a text as their input."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.conversation.parts import Call, Result, Text
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.openai.response_input import read_items, to_turns
from tokenbus.clients.gateway.openai.response_tools import (
    TEXT_INPUT,
    CustomTool,
    NamespaceTool,
    OfferedTools,
    ResponseTool,
)

from ...processes import Gateway
from .openai_requests import MODEL

EXEC = CustomTool(name="exec", format={"type": "grammar", "syntax": "lark", "definition": "x"})
TOOLS: list[ResponseTool | CustomTool | NamespaceTool] = [
    NamespaceTool(name="functions", tools=[EXEC, ResponseTool(name="wait")]),
    NamespaceTool(name="clock", tools=[ResponseTool(name="wait")]),
    ResponseTool(name="plain"),
]


def test_tools_in_namespaces_have_different_names_and_grammars_are_named() -> None:
    ignored = Ignored()
    offered = OfferedTools.of(TOOLS, ignored)
    assert [tool.name for tool in offered.tools] == ["exec", "wait", "clock.wait", "plain"]
    assert offered.tools[0].parameters == TEXT_INPUT
    assert offered.shown("clock", "wait") == "clock.wait"
    assert offered.shown("functions", "wait") == "wait"
    assert offered.shown(None, "gone") == "gone"
    assert list(ignored.names) == ["format of the tool exec"]


def test_a_repeated_tool_is_left_out_and_two_definitions_are_refused() -> None:
    assert len(OfferedTools.of([*TOOLS, *TOOLS], Ignored()).tools) == 4
    other = ResponseTool(name="wait", description="Waits.")
    for more, within in ((NamespaceTool(name="clock", tools=[other]), " of the namespace 'clock'"),
                         (ResponseTool(name="plain", strict=True), "")):  # fmt: skip
        with pytest.raises(ApiError, match=f"^tools: two tools{within} have the name "):
            OfferedTools.of([*TOOLS, more], Ignored())


def test_a_text_part_of_a_chat_is_read_as_input_text() -> None:
    given = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    ignored = Ignored()
    turns = to_turns(read_items(given, ignored).input, None, OfferedTools())
    assert (turns[0].parts, list(ignored.names)) == ([Text("hi")], [])


def test_calls_come_back_under_the_names_that_the_model_sees() -> None:
    offered = OfferedTools.of(TOOLS, Ignored())
    called = {"type": "custom_tool_call", "call_id": "1", "name": "exec", "input": "ls"}
    waited = {"type": "function_call", "call_id": "2", "name": "wait", "arguments": "{}"}
    items = read_items(
        [
            {"role": "user", "content": "hi"},
            {**called, "namespace": "functions", "id": "ctc_1", "status": "completed"},
            {**waited, "namespace": "clock"},
            {"type": "custom_tool_call_output", "call_id": "1", "output": "files"},
        ],
        Ignored(),
    )
    turns = to_turns(items.input, None, offered)
    assert turns[1].parts == [Call("1", "exec", {"input": "ls"}), Call("2", "clock.wait", "{}")]
    assert turns[2].parts == [Result("1", [Text("files")])]


@pytest.mark.process
def test_tools_among_the_items_are_called_with_a_text(gateway: Gateway) -> None:
    custom = {"type": "custom", "name": "exec"}
    space = {"type": "namespace", "name": "functions", "tools": [custom]}
    asked = {"role": "user", "content": "go"}
    items: list[Any] = [{"type": "additional_tools", "role": "developer", "tools": [space]}, asked]
    body = {
        "model": MODEL,
        "input": items,
        "tool_choice": {"type": "custom", "name": "exec"},
        "temperature": 0,
        "max_output_tokens": 60,
    }

    def post(**more: Any) -> httpx.Response:
        answer = httpx.post(f"{gateway.url}/v1/responses", json={**body, **more}, timeout=300)
        assert answer.status_code == 200, answer.text
        return answer

    [call] = [one for one in post().json()["output"] if one["type"] == "custom_tool_call"]
    assert (call["name"], call["namespace"], call["status"]) == ("exec", "functions", "completed")
    lines = [line[6:] for line in post(stream=True).text.splitlines() if line[:6] == "data: "]
    events = [json.loads(line) for line in lines]
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == [call["input"]]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    post(input=[*items, call, result], tool_choice="none")
