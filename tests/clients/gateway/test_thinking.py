"""Thinking before an answer is bounded and separate from the text. Constraints hold after it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ...processes import Gateway
from .openai_requests import HELLO, MODEL, WEATHER, openai_client

pytestmark = pytest.mark.process

TEMPLATE = "{# </think> #}{% for m in messages %}{{ m.content }}\n{% endfor %}"
BEGUN = TEMPLATE + "<think>\n"
"""A template whose prompts end with the beginning of thinking."""
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
PLACE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


def chat(api: openai.OpenAI, template: str = BEGUN, most: int | None = 4, **options: Any) -> Any:
    """The choice of an answer with at most ``most`` tokens of thinking, or with any number of them
    if ``most`` is None."""
    given: dict[str, Any] = {"max_completion_tokens": 60, "temperature": 0, **options}
    extra = {"chat_template": template, **({} if most is None else {"max_thinking_tokens": most})}
    answer = api.chat.completions.create(
        model=MODEL, messages=HELLO, extra_body=extra, stream=False, **given
    )
    return answer.choices[0]


def test_thinking_is_apart_and_is_closed_when_its_tokens_are_used_up(api: openai.OpenAI) -> None:
    choice = chat(api)
    assert choice.message.reasoning_content
    assert choice.message.content
    assert "</think>" not in choice.message.content
    whole = chat(api, most=None, max_completion_tokens=8)
    assert whole.message.reasoning_content.startswith(choice.message.reasoning_content[:4])
    assert not whole.message.content
    assert whole.finish_reason == "length"


def test_thinking_streams_as_it_is_made(api: openai.OpenAI) -> None:
    choice = chat(api)
    chunks = api.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_completion_tokens=60,
        temperature=0,
        stream=True,
        extra_body={"chat_template": BEGUN, "max_thinking_tokens": 4},
    )
    deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks]
    thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thought == choice.message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content


def test_a_schema_and_tools_hold_behind_thinking(api: openai.OpenAI) -> None:
    choice = chat(api, response_format=FORMAT)
    assert choice.message.reasoning_content
    assert json.loads(choice.message.content)["n"] in (1, 2)
    assert choice.tokenbus["constraint"] == "json_schema"
    assert choice.tokenbus["ended"] == "complete"
    for template in (BEGUN, TEMPLATE):
        named = {"type": "function", "function": {"name": "weather"}}
        called = chat(api, template, tools=TOOLS, tool_choice=named, max_completion_tokens=200)
        assert called.finish_reason == "tool_calls"
        [call] = called.message.tool_calls
        assert call.function.name == "weather"
        assert isinstance(json.loads(call.function.arguments), dict)


def test_thinking_stays_in_the_text_where_it_is_asked_for(
    api: openai.OpenAI, gateway: Gateway
) -> None:
    given = {
        "messages": HELLO,
        "max_tokens": 4,
        "chat_template": BEGUN,
        "separate_reasoning": False,
    }
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=given, timeout=120).json()
    message = answer["choices"][0]["message"]
    assert message["content"]
    assert "reasoning_content" not in message
    with pytest.raises(openai.BadRequestError, match="does not support thinking"):
        chat(api, "{{ messages[0].content }}")


def test_a_budget_of_thinking_that_does_not_exist_has_no_effect(gateway: Gateway) -> None:
    client = anthropic.Anthropic(base_url=gateway.url, api_key="none", timeout=120)
    answer = client.messages.with_raw_response.create(
        model=MODEL,
        max_tokens=4,
        messages=[{"role": "user", "content": "hi"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert answer.headers["x-tokenbus-ignored"] == "thinking.budget_tokens"
