"""``/v1/models`` lists models whose tokenizer cannot be read, and additional names of models."""

from __future__ import annotations

import httpx
import pytest

from ...processes import Bus
from .openai_requests import HELLO
from .stepped import WAIT_S, stepped_worker


def test_a_tokenizer_that_cannot_be_read_leaves_the_list_of_models_whole(processes: None) -> None:
    with Bus() as bus:
        back = f"ipc://{bus.folder}/back.sock"
        with (
            stepped_worker(back, 1),
            stepped_worker(back, 1, "unreadable", tokenizer="{"),
        ):
            bus.wait_for_models("stepped")
            bus.wait_for_models("unreadable")
            gateway = bus.start_gateway()
            answer = httpx.get(f"{gateway.url}/v1/models", timeout=WAIT_S)
            assert answer.status_code == 200
            assert [model["id"] for model in answer.json()["data"]] == ["stepped", "unreadable"]
            one = httpx.get(f"{gateway.url}/v1/models/unreadable", timeout=WAIT_S)
            assert one.json()["max_model_len"] == 2**20
            body = {"model": "unreadable", "prompt": "x"}
            refused = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=WAIT_S)
            assert refused.status_code == 502
            assert "'unreadable' cannot be read" in refused.json()["error"]["message"]


@pytest.mark.process
def test_further_names_of_a_model_are_listed_and_answer(steered: Bus) -> None:
    named = "gpt-4o,claude-*=embedded,gone=missing"
    gateway = steered.start_gateway(served_model_name=named)
    listed = httpx.get(f"{gateway.url}/v1/models", timeout=WAIT_S).json()["data"]
    roots = {model["id"]: model["root"] for model in listed}
    assert roots == {"embedded": "embedded", "gpt-4o": "embedded", "claude-*": "embedded"}
    one = httpx.get(f"{gateway.url}/v1/models/claude-opus", timeout=WAIT_S).json()
    assert (one["id"], one["root"]) == ("claude-opus", "embedded")
    for path, more in (
        ("messages", {"messages": HELLO}),
        ("chat/completions", {"messages": HELLO}),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}),
        ("responses", {"input": "x"}),
    ):
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {"model": "claude-opus", limit: 2, **more}
        answer = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "claude-opus"
        body["model"] = "claude-" + 1000 * "x"
        answer = httpx.post(f"{gateway.url}/v1/{path}", json=body, timeout=WAIT_S)
        assert answer.json()["model"] == "embedded"
    body = {"model": "gone", "messages": HELLO}
    refused = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert refused.status_code == 404
    assert "'gone' stands for the model 'missing'" in refused.json()["error"]["message"]
