"""Conversations of the Python clients."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import httpx
import pytest
from tokenbus.clients import AsyncClient, Client, RequestError

from ..processes import Bus, Gateway
from .gateway.openai_requests import HELLO, MODEL, WEATHER

pytestmark = pytest.mark.process

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


def test_a_client_answers_as_the_gateway_does(steered: Bus, gateway: Gateway) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 8, "temperature": 0}
    url = f"{gateway.url}/v1/chat/completions"
    wanted = httpx.post(url, json=body, timeout=300).json()["choices"][0]["message"]
    with steered.client() as client:
        answer = client.chat(HELLO, max_tokens=8)
        assert "".join(answer) == wanted["content"]
        message = answer.message()
        assert (message["role"], message["content"]) == ("assistant", wanted["content"])
        more = [*HELLO, message, {"role": "user", "content": "more"}]
        begun = client.chat(more, model=MODEL, max_tokens=1)
        assert begun.text() == begun.message()["content"]
        before, after = (one.stream.sequences[0].prompt_tokens for one in (answer, begun))
        assert before is not None
        assert after is not None
        assert after > before


def test_an_answer_may_call_a_tool(steered: Bus) -> None:
    with steered.client() as client:
        answer = client.chat(HELLO, tools=TOOLS, tool_choice="required", temperature=1.0)
        assert "".join(answer) == ""
        message = answer.message()
        call = message["tool_calls"][0]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["place"] in ("Bern", "Rome")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        after = client.chat([*HELLO, message, result], tools=TOOLS, max_tokens=4)
        after.close()
        chosen = client.chat(HELLO, controller="choice", controller_arg=["yes", "no"])
        assert chosen.text() in ("yes", "no")


@pytest.mark.anyio
async def test_the_asynchronous_client_has_the_same_calls(steered: Bus) -> None:
    async with AsyncClient(steered.front) as client:
        assert await client.models() == [MODEL]
        answer = await client.chat(HELLO, max_tokens=4)
        assert "".join([text async for text in answer]) == await answer.text()
        # A blocking client also works in a thread with a running event loop.
        with steered.client() as blocking:
            assert blocking.models() == [MODEL]
            assert blocking.chat(HELLO, max_tokens=4).text() == await answer.text()


def test_a_wrong_conversation_is_refused_by_its_field(client: Client) -> None:
    with pytest.raises(RequestError, match="role") as refused:
        client.chat([{"role": "nobody", "content": "x"}])
    assert refused.value.path == "$.messages[0].role"
    with pytest.raises(RequestError, match="unknown function 'rain'"):
        client.chat(
            HELLO,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "rain"}},
        )
    with pytest.raises(RequestError, match="no worker serves the model 'nowhere'"):
        client.chat(HELLO, model="nowhere")


def test_a_conversation_does_not_keep_its_client_open(bus: Bus) -> None:
    client = bus.client()
    client.chat(HELLO, max_tokens=1).text()
    left = weakref.ref(client)
    gc.disable()
    try:
        del client
        assert left() is None
    finally:
        gc.enable()
