"""``truncation`` and ``truncate_prompt_tokens`` shorten prompts that are too long."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenbus.clients.gateway.conversation.parts import Call, Conversation, Result, Text, Turn
from tokenbus.clients.gateway.conversation.truncation import exchanges, last_tokens, without

from ...processes import Gateway
from .openai_requests import MODEL


def turn(role: Any, text: str) -> Turn:
    return Turn(role, [Text(text)])


def test_an_exchange_has_its_calls_and_results_and_instructions_stay() -> None:
    called = Turn("assistant", [Call("1", "f", "{}")])
    result = Turn("user", [Result("1", [Text("r")])])
    turns = [turn("system", "s"), turn("user", "a"), called, result, turn("assistant", "b")]
    turns += [turn("developer", "d"), turn("user", "c")]
    begins = exchanges(turns)
    assert begins == [0, 6]
    kept = without(Conversation(turns), begins, 1).turns
    assert kept == [turn("system", "s"), turn("developer", "d"), turn("user", "c")]
    assert without(Conversation(turns), begins, 0).turns == turns
    assert exchanges([turn("system", "s")]) == [0]


@pytest.mark.parametrize(
    ("count", "kept"), [(None, [1, 2, 3, 4]), (2, [3, 4]), (9, [1, 2, 3, 4]), (-1, [3, 4])]
)
def test_the_last_tokens_of_a_prompt_are_kept(count: int | None, kept: list[int]) -> None:
    assert last_tokens([1, 2, 3, 4], count, context=3) == kept


@pytest.mark.process
def test_the_oldest_exchanges_are_left_out_and_the_answer_says_so(gateway: Gateway) -> None:
    def item(role: str, text: str) -> dict[str, str]:
        return {"role": role, "content": text}

    items = [item("developer", "be kind")]
    for number in range(40):
        items += [item("user", f"{number} " * 20), item("assistant", "yes")]
    items.append(item("user", "and now"))
    body = {"model": MODEL, "input": items, "max_output_tokens": 4, "temperature": 0}

    def post(**more: Any) -> httpx.Response:
        return httpx.post(f"{gateway.url}/v1/responses", json={**body, **more}, timeout=300)

    assert post().json()["error"]["code"] == "context_length_exceeded"
    shortened = post(truncation="auto")
    assert shortened.status_code == 200
    said = shortened.headers["x-tokenbus-ignored"]
    assert said.startswith("truncation: the oldest ")
    left_out = int(said.split()[3])
    assert 0 < left_out < 40
    kept = [items[0], *items[1 + 2 * left_out :]]
    same = post(input=kept)
    assert same.status_code == 200
    assert same.json()["usage"]["input_tokens"] == shortened.json()["usage"]["input_tokens"]
    longer = [items[0], *items[1 + 2 * (left_out - 1) :]]
    refused = post(input=longer)
    assert refused.status_code == 400 or refused.json()["usage"]["input_tokens"] > 1024 - 4
    fits = post(input="x", truncation="auto")
    assert "x-tokenbus-ignored" not in fits.headers
    assert post(input="word " * 5000, truncation="auto").status_code == 400


@pytest.mark.process
def test_the_beginning_of_a_prompt_is_left_out(gateway: Gateway) -> None:
    def usage(path: str, **body: Any) -> int:
        asked = {"model": MODEL, "max_tokens": 1, **body}
        answer = httpx.post(f"{gateway.url}/v1/{path}", json=asked, timeout=300)
        assert answer.status_code == 200, answer.text
        number: int = answer.json()["usage"]["prompt_tokens"]
        return number

    assert usage("completions", prompt="a b c d e f g h", truncate_prompt_tokens=3) == 3
    assert usage("completions", prompt="word " * 1010, truncate_prompt_tokens=-1) <= 1023
    messages = [{"role": "user", "content": "a b c d e f g h"}]
    assert usage("chat/completions", messages=messages, truncate_prompt_tokens=4) == 4
    refused = {"prompt": "x", "truncate_prompt_tokens": 0}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=refused, timeout=300)
    assert answer.status_code == 400
