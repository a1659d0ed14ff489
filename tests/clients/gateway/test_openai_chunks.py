"""The chunks of streams whose sequences fork, drop tokens, or end together."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tokenbus.clients.gateway.conversation.constraints import Constraint
from tokenbus.clients.gateway.generation.counter import Counter
from tokenbus.clients.gateway.models import ServedModel
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.chat_chunks import ChatChunks
from tokenbus.clients.gateway.openai.completion_bodies import CompletionRequest
from tokenbus.clients.gateway.openai.completion_chunks import CompletionChunks, Stamp
from tokenbus.protocol.messages import Token

from .small_model import played, prepared, small_model

NAME = 'a "text": b'
CONTROLLER = Constraint("mine", "mine", None, "controller")


@pytest.fixture
def model() -> ServedModel:
    return small_model(NAME)


def entry(text: str, pos: int, seq: int = 0, **more: Any) -> Token:
    given: dict[str, Any] = {"token": 1, "logprob": -1.0, "finish_reason": None, **more}
    return Token(stream_id=1, text=text, pos=pos, seq=seq, **given)


def choices(data: bytes) -> list[dict[str, Any]]:
    """The choices of all chunks in ``data``, which has complete server-sent events."""
    assert data.endswith(b"\n\n")
    events = data.decode().split("\n\n")[:-1]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk["model"] == NAME for chunk in chunks)
    return [choice for chunk in chunks for choice in chunk["choices"]]


def completions(model: ServedModel, prompts: int = 1, **body: Any) -> CompletionChunks:
    request = msgspec.convert({"prompt": "x", **body}, CompletionRequest)
    return CompletionChunks(
        Stamp("cmpl-1", 1, model.name), model, request, [""] * prompts, Counter()
    )


def test_what_arrives_together_is_one_chunk_for_each_choice(model: ServedModel) -> None:
    chunks = completions(model, prompts=2, n=2)
    arrived = [entry("a", 0), entry("b", 0, 1), entry("c", 1), entry("", 1, 1)]
    assert choices(chunks.write(1, arrived)) == [
        {"index": 2, "text": "ac", "logprobs": None, "finish_reason": None},
        {"index": 3, "text": "b", "logprobs": None, "finish_reason": None},
    ]
    assert chunks.write(1, [entry("", 2)]) == b""
    last = entry("!", 3, finish_reason="stop")
    assert choices(chunks.write(1, [entry("d", 2), last])) == [
        {"index": 2, "text": "d!", "logprobs": None, "finish_reason": "stop"}
    ]
    assert chunks.end() == b"data: [DONE]\n\n"


def test_a_fork_begins_with_the_text_of_its_parent(model: ServedModel) -> None:
    chunks = completions(model, controller="mine")
    chunks.write(0, [entry("a", 0), entry("b", 1)])
    forked = entry("c", 2, 1, parent=0)
    assert choices(chunks.write(0, [forked, entry("d", 2)])) == [
        {"index": 1, "text": "abc", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "d", "logprobs": None, "finish_reason": None},
    ]
    shorter = entry("e", 1, 2, parent=0, backtrack=1)
    [choice] = choices(chunks.write(0, [shorter]))
    assert (choice["index"], choice["text"]) == (2, "ae")


def test_text_that_is_taken_back_is_counted(model: ServedModel) -> None:
    chunks = completions(model, controller="mine")
    chunks.write(0, [entry("ab", 0), entry("cd", 1), entry("ü", 2)])
    found = choices(chunks.write(0, [entry("x", 3), entry("y", 2, backtrack=2)]))
    assert [choice["text"] for choice in found] == ["x", "y"]
    assert found[1]["tokenbus"] == {"backtrack": 2}


def test_what_a_controller_reports_is_in_the_last_chunk(model: ServedModel) -> None:
    chunks = completions(model, controller="mine")
    chunks.write(0, [entry("a", 0, logs="one\n")])
    end = entry("b", 1, logs="two\n", storage=[{"x": 1}], finish_reason="controller")
    [choice] = choices(chunks.write(0, [end]))
    assert choice["finish_reason"] == "stop"
    assert choice["tokenbus"] == {"logs": "one\ntwo\n", "storage": [{"x": 1}]}


def test_one_failed_sequence_does_not_hide_the_others(model: ServedModel) -> None:
    chunks = completions(model, controller="mine", n=2)
    failed = entry(
        "", 0, 1, token=None, finish_reason="error", error="it failed", code="deadlock", live=1
    )
    [choice] = choices(chunks.write(0, [failed]))
    assert (choice["index"], choice["finish_reason"]) == (1, "error")
    assert choice["tokenbus"] == {"error": "it failed", "code": "deadlock"}


def test_chats_take_back_too() -> None:
    request = msgspec.convert(
        {"messages": [{"role": "user", "content": "x"}], "controller": "mine"}, ChatRequest
    )
    turns = played(prepared(None, CONTROLLER, NAME), [])
    [turn] = turns.turns
    chunks = ChatChunks("chatcmpl-1", 1, request, turns)
    first, second = choices(chunks.write(turn, [entry("ab", 0)]))
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert second["delta"] == {"content": "ab"}
    [choice] = choices(chunks.write(turn, [entry("c", 0, backtrack=1)]))
    assert (choice["delta"], choice["tokenbus"]) == ({"content": "c"}, {"backtrack": 2})
    role, forked = choices(chunks.write(turn, [entry("d", 1, 1, parent=0)]))
    assert role["index"] == forked["index"] == 1
    assert forked["delta"] == {"content": "cd"}
