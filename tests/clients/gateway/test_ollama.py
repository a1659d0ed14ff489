"""Ollama's interface, with Ollama's own Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from threading import Thread
from typing import Any

import httpx
import msgspec
import ollama
import pytest
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.conversation.parts import Result
from tokenbus.clients.gateway.ollama.bodies import Message, to_turns

from ...processes import Bus, Gateway
from .openai_requests import MODEL, PERSON
from .stepped import SteppedWorker, stepped_worker

pytestmark = pytest.mark.process

TEMPLATE = """\
{# <think> </think> <tool_call> #}
{%- for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %}{% endfor %}[assistant]"""
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
HELLO = [{"role": "user", "content": "hello"}]
FEW: Any = {"num_predict": 6, "temperature": 0}


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> ollama.Client:
    return ollama.Client(gateway.url, timeout=300.0)


@pytest.fixture(scope="module")
def served(processes: None) -> Iterator[tuple[SteppedWorker, ollama.Client]]:
    """A worker that sends tokens only when a test calls ``step``, and Ollama's client, which is
    connected to a gateway of the same system."""
    with Bus() as bus:
        bus.start_other("state")
        bus.start_other("controller")
        with stepped_worker(f"ipc://{bus.folder}/back.sock", 8, template=TEMPLATE) as worker:
            bus.wait_for_models("stepped")
            bus.wait_for_roles("controller", "state")
            yield worker, ollama.Client(bus.start_gateway().url, timeout=300.0)


def test_a_chat_is_answered_whole_and_in_lines(api: ollama.Client) -> None:
    whole = api.chat(MODEL, HELLO, options=FEW)
    assert whole.message.role == "assistant"
    assert whole.message.content
    assert (whole.done, whole.done_reason, whole.eval_count) == (True, "length", 6)
    assert whole.prompt_eval_count
    assert whole.total_duration
    assert whole.total_duration > 0
    lines = list(api.chat(f"{MODEL}:latest", HELLO, options=FEW, stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1].eval_count == 6


def test_a_prompt_is_answered_with_and_without_the_template(api: ollama.Client) -> None:
    chat = api.chat(MODEL, HELLO, options=FEW)
    generated = api.generate(MODEL, "hello", options=FEW)
    assert generated.response == chat.message.content
    assert generated.prompt_eval_count == chat.prompt_eval_count
    raw = api.generate(MODEL, "hello", raw=True, options=FEW)
    assert raw.prompt_eval_count
    assert generated.prompt_eval_count
    assert raw.prompt_eval_count < generated.prompt_eval_count
    lines = list(api.generate(MODEL, "hello", options=FEW, stream=True))
    assert "".join(line.response or "" for line in lines) == generated.response


def test_a_format_holds(api: ollama.Client) -> None:
    answer = api.chat(MODEL, HELLO, format=PERSON, options={"num_predict": 200, "seed": 3})
    assert set(json.loads(answer.message.content or "")) == {"name", "age"}
    free = api.generate(MODEL, "x", format="json", options={"num_predict": 200, "seed": 3})
    assert isinstance(json.loads(free.response or ""), dict)


def test_thinking_calls_and_results_make_a_conversation(
    served: tuple[SteppedWorker, ollama.Client],
) -> None:
    worker, api = served
    lines = iter(api.chat("stepped", HELLO, tools=[WEATHER], think=True, stream=True))
    # The client sends its request when the first line is requested.
    found: list[Any] = []
    reader = Thread(target=lambda: found.extend(lines))
    reader.start()
    stream = worker.begun()
    stream.step(text="<think>\nwell\n</think>\n\n")
    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bern"}}\n</tool_call>'
    stream.step(text=call, finish_reason="stop")
    reader.join(120.0)
    thinking = "".join(line.message.thinking or "" for line in found)
    assert thinking.strip() == "well"
    [one] = [c for line in found for c in line.message.tool_calls or ()]
    assert (one.function.name, one.function.arguments) == ("weather", {"place": "Bern"})

    turns: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": "", "thinking": thinking, "tool_calls": [one]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    answers: list[Any] = []
    second = Thread(target=lambda: answers.append(api.chat("stepped", turns, tools=[WEATHER])))
    second.start()
    stream = worker.begun()
    stream.step(text="It is sunny.", finish_reason="stop")
    second.join(120.0)
    assert answers[0].message.content == "It is sunny."


def test_models_are_listed_and_shown(api: ollama.Client, gateway: Gateway) -> None:
    assert [model.model for model in api.list().models] == [MODEL]
    assert [model.model for model in api.ps().models] == [MODEL]
    shown = api.show(MODEL)
    assert shown.capabilities
    assert "completion" in shown.capabilities
    assert shown.details
    assert shown.details.parameter_size == "3.1M"
    version = httpx.get(f"{gateway.url}/api/version", timeout=300.0).json()["version"]
    assert version


def test_texts_are_embedded(api: ollama.Client) -> None:
    answer = api.embed(MODEL, ["one", "word " * 3000], dimensions=8)
    assert [len(one) for one in answer.embeddings] == [8, 8]


def test_a_result_belongs_to_the_first_open_call_of_its_function() -> None:
    called: list[dict[str, Any]] = [
        {"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")
    ]
    results: list[dict[str, Any]] = [
        {"tool_name": "a"},
        {"tool_name": "a"},
        {"tool_name": "a"},
        {},
        {"tool_call_id": "mine"},
    ]
    given = [
        {"role": "assistant", "tool_calls": called},
        *({"role": "tool", "content": "x", **one} for one in results),
    ]
    turns = to_turns(msgspec.convert(given, list[Message]), Ignored())
    ids = [part.call_id for turn in turns for part in turn.parts if isinstance(part, Result)]
    assert ids == ["call_0_0", "call_0_2", "call_unknown", "call_0_1", "mine"]


def test_a_vector_cannot_be_longer_than_the_model_s(gateway: Gateway) -> None:
    body = {"model": MODEL, "input": "x", "dimensions": 1000}
    answer = httpx.post(f"{gateway.url}/api/embed", json=body, timeout=300.0)
    assert answer.status_code == 400
    assert "the vectors of embedded have 192" in answer.json()["error"]


def test_errors_have_ollama_s_form(api: ollama.Client, gateway: Gateway) -> None:
    with pytest.raises(ollama.ResponseError, match="no-such-model") as caught:
        api.chat("no-such-model", HELLO)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="messages is empty"):
        api.chat(MODEL, [])
    wrong = httpx.post(f"{gateway.url}/api/chat", json={"messages": []}, timeout=300.0)
    assert wrong.status_code == 400
    assert set(wrong.json()) == {"error"}


def test_llama_cpp_s_completion(gateway: Gateway) -> None:
    url = f"{gateway.url}/completion"
    body: dict[str, Any] = {"prompt": "def add(a, b):", "n_predict": 8, "temperature": 0}
    whole = httpx.post(url, json=body, timeout=300.0).json()
    assert whole["content"]
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 8)
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=300.0) as answer:
        lines = [line for line in answer.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    ids = httpx.post(f"{gateway.url}/tokenize", json={"prompt": body["prompt"]}, timeout=300.0)
    by_ids = httpx.post(url, json={**body, "prompt": ids.json()["tokens"]}, timeout=300.0).json()
    assert by_ids["content"] == whole["content"]
    schema = {**body, "n_predict": 200, "json_schema": PERSON}
    made = httpx.post(url, json=schema, timeout=300.0).json()
    assert set(json.loads(made["content"])) == {"name", "age"}
    refused = httpx.post(url, json={**body, "grammar": 'root ::= "a"'}, timeout=300.0)
    assert refused.status_code == 400
    assert "GBNF" in refused.json()["error"]["message"]
    long = httpx.post(url, json={**body, "prompt": ["1,2.3:" * 500] * 200}, timeout=300.0)
    assert long.status_code == 400
    message = long.json()["error"]["message"]
    assert "at most 1024" in message
    assert int(message.split()[3]) < 4000, "the texts after the first are not tokenized"
