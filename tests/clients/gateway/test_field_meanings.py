"""The gateway gives field values the meaning that they have in other servers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from ...processes import Gateway
from .openai_requests import HELLO, MODEL, WEATHER

pytestmark = pytest.mark.process


def chat(gateway: Gateway, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    assert "x-tokenbus-ignored" not in answer.headers
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a streamed answer."""
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def text_of(choice: dict[str, Any]) -> str:
    text = choice["message"]["content"]
    assert isinstance(text, str)
    return text


def test_an_empty_stop_string_and_a_top_p_of_zero_are_accepted(gateway: Gateway) -> None:
    greedy = text_of(chat(gateway))
    assert text_of(chat(gateway, stop="")) == greedy
    assert text_of(chat(gateway, stop=["", greedy[2:4]])) == greedy[: greedy.index(greedy[2:4])]
    assert text_of(chat(gateway, top_p=0, temperature=1)) == greedy
    body = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 1,
        "top_p": 0,
        "stop_sequences": [""],
    }
    message = httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=300).json()
    assert message["content"][0]["text"] == greedy


def test_minus_one_allows_the_rest_of_the_context(gateway: Gateway) -> None:
    long = [{"role": "user", "content": "word " * 1000}]
    assert chat(gateway, messages=long, max_tokens=-1)["finish_reason"] == "length"
    body: dict[str, Any] = {"model": MODEL, "temperature": 0}
    given = {**body, "prompt": "word " * 1000, "max_tokens": -1}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=given, timeout=300).json()
    assert answer["usage"]["total_tokens"] == 1024
    given = {**body, "input": "word " * 1000, "max_output_tokens": -1.0}
    answer = httpx.post(f"{gateway.url}/v1/responses", json=given, timeout=300).json()
    assert answer["usage"]["total_tokens"] == 1024
    for path, text, limit in (
        ("chat/completions", {"messages": HELLO}, "max_tokens"),
        ("responses", {"input": "x"}, "max_output_tokens"),
    ):
        refused = httpx.post(f"{gateway.url}/v1/{path}", json={**text, limit: 0}, timeout=300)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, limit)


def test_older_names_of_constraints_are_accepted(gateway: Gateway) -> None:
    assert text_of(chat(gateway, guided_regex="[0-9]{3}")).isdecimal()
    assert text_of(chat(gateway, guided_choice=["yes", "no"])) in ("yes", "no")
    found = chat(gateway, guided_json=WEATHER, max_tokens=60)
    assert json.loads(text_of(found))["place"] in ("Bern", "Rome")
    assert found["tokenbus"]["constraint"] == "json_schema"


def test_a_json_object_may_have_a_schema(gateway: Gateway) -> None:
    format = {"type": "json_object", "schema": WEATHER}
    found = chat(gateway, response_format=format, max_tokens=60)
    assert set(json.loads(text_of(found))) == {"place", "days"}


def test_templates_receive_the_reasoning_effort(gateway: Gateway) -> None:
    template = "{{ reasoning_effort }} {{ messages[0].content }}"
    high = chat(gateway, chat_template=template, reasoning_effort="high")
    same = chat(gateway, chat_template="high {{ messages[0].content }}")
    assert text_of(high) == text_of(same)


def test_an_answer_may_include_its_stop_string(gateway: Gateway) -> None:
    greedy = text_of(chat(gateway))
    stop = greedy[2:4]
    whole = greedy[: greedy.index(stop)] + stop
    assert text_of(chat(gateway, stop=stop, include_stop_str_in_output=True)) == whole
    body = {
        "model": MODEL,
        "messages": HELLO,
        "max_tokens": 8,
        "temperature": 0,
        "stop": stop,
        "include_stop_str_in_output": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)
    chunks = chunks_of(answer)
    text = "".join(c["delta"].get("content", "") for k in chunks for c in k["choices"])
    assert text == whole
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > 0
    del body["messages"]
    answer = httpx.post(
        f"{gateway.url}/v1/completions", json={**body, "prompt": "def"}, timeout=300
    )
    assert all(chunk["usage"]["prompt_tokens"] for chunk in chunks_of(answer))


def test_functions_are_called_in_the_older_form(gateway: Gateway) -> None:
    functions = [{"name": "weather", "parameters": WEATHER}]
    asked = {"functions": functions, "function_call": {"name": "weather"}, "max_tokens": 200}
    choice = chat(gateway, **asked)
    called = choice["message"]["function_call"]
    assert choice["finish_reason"] == "function_call"
    assert called["name"] == "weather"
    assert json.loads(called["arguments"])["place"] in ("Bern", "Rome")
    assert "tool_calls" not in choice["message"]
    result = {"role": "function", "name": "weather", "content": "sunny"}
    assert text_of(chat(gateway, messages=[*HELLO, choice["message"], result])) is not None
    body = {"model": MODEL, "messages": HELLO, "temperature": 0, "stream": True, **asked}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=300)
    choices = [choice for chunk in chunks_of(answer) for choice in chunk["choices"]]
    deltas = [c["delta"]["function_call"] for c in choices if "function_call" in c["delta"]]
    assert deltas[0]["name"] == "weather"
    assert "".join(delta["arguments"] for delta in deltas) == called["arguments"]
    assert choices[-1]["finish_reason"] == "function_call"


def test_log_probabilities_of_a_prompt_are_returned(gateway: Gateway) -> None:
    body = {"model": MODEL, "prompt": ["def add(a, b):", "x"], "max_tokens": 1, "temperature": 0}
    url = f"{gateway.url}/v1/completions"
    answer = httpx.post(url, json={**body, "prompt_logprobs": 2}, timeout=300).json()
    echoed = {**body, "echo": True, "logprobs": 2, "max_tokens": 0}
    echo = httpx.post(url, json=echoed, timeout=300).json()
    for choice, same in zip(answer["choices"], echo["choices"], strict=True):
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        logprobs = same["logprobs"]
        assert len(rest) == len(logprobs["tokens"]) - 1
        for place, token, logprob in zip(
            rest, logprobs["tokens"][1:], logprobs["token_logprobs"][1:], strict=True
        ):
            assert logprob in [one["logprob"] for one in place.values()]
            assert token in [one["decoded_token"] for one in place.values()]
            assert [one["rank"] for one in place.values()][:2] == [1, 2]
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}
    chat_url = f"{gateway.url}/v1/chat/completions"
    found = httpx.post(chat_url, json=asked, timeout=300).json()
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]
    refused = httpx.post(chat_url, json={**asked, "stream": True}, timeout=300)
    assert refused.json()["error"]["param"] == "prompt_logprobs"
