"""A prompt that ends in the middle of a word, through the Python client, HTTP and a WebSocket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenbus.clients import Client
from tokenizers import Tokenizer

from ...processes import Bus, Gateway
from ...websocket import connect

pytestmark = pytest.mark.process

WHOLE = "def add(a, b):\n    return a"
PROMPT = WHOLE.removesuffix("urn a")
WAIT_S = 120.0


class Healed:
    """A prompt that ends inside a word, and the token with which the sequence must continue."""

    def __init__(self, client: Client) -> None:
        tokenizer = Tokenizer.from_str(client.tokenizer().json)
        self.prompt: list[int] = tokenizer.encode(PROMPT).ids
        whole: list[int] = tokenizer.encode(WHOLE).ids
        at = len(self.prompt) - 1
        assert whole[:at] == self.prompt[:at]
        assert whole[at] != self.prompt[at]
        self.wanted = whole[at]
        """The token of the whole text at the position of the prompt's last token."""
        self.rest = tokenizer.decode(whole[: at + 1]).removeprefix(PROMPT)
        assert self.rest
        self.options: dict[str, Any] = {
            "heal_prompt": True,
            "max_tokens": 1,
            "logit_bias": {self.wanted: 100.0},
        }


@pytest.fixture(scope="module")
def healed(steered: Bus) -> Healed:
    with steered.client() as client:
        return Healed(client)


def test_the_first_token_is_the_tokenizers_and_the_text_goes_on_behind_the_prompt(
    steered: Bus, healed: Healed
) -> None:
    with steered.client() as client:
        stream = client.generate(PROMPT, **healed.options)
        assert stream.tokens() == [healed.wanted]
        assert stream.text() == healed.rest
        assert stream.sequences[0].prompt_tokens == len(healed.prompt)
        plain = client.generate(PROMPT, **{**healed.options, "heal_prompt": False})
        assert plain.text() != healed.rest
        ids = client.generate(healed.prompt, text=True, **healed.options)
        assert (ids.tokens(), ids.text()) == ([healed.wanted], healed.rest)
        longer = client.generate(PROMPT, **{**healed.options, "max_tokens": 12, "n": 2})
        assert sum(entry.token is not None for entry in longer) == 24
        assert {one.tokens[0] for one in longer.sequences} == {healed.wanted}
        assert {len(one.tokens) for one in longer.sequences} == {12}
        assert all(one.text.startswith(healed.rest) for one in longer.sequences)


def test_a_constraint_holds_behind_the_prompt(steered: Bus, healed: Healed) -> None:
    with steered.client() as client:
        given = {**healed.options, "max_tokens": 30}
        stream = client.generate(PROMPT, controller="regex", controller_arg="urn [ab];", **given)
        assert stream.text() in ("urn a;", "urn b;")
        assert stream.sequences[0].finish_reason == "stop"
        stopped = client.generate(PROMPT, stop=["rn"], **given)
        assert stopped.text() == healed.rest.partition("rn")[0]


def test_the_doors_have_it(gateway: Gateway, healed: Healed) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "heal_prompt": True}
    body["logit_bias"] = {str(healed.wanted): 100}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=WAIT_S).json()
    assert answer["choices"][0]["text"] == healed.rest
    assert answer["usage"]["prompt_tokens"] == len(healed.prompt)
    assert answer["usage"]["completion_tokens"] == 1
    with connect(gateway.ws_url, max_size=None) as socket:
        options = {**healed.options, "logit_bias": {str(healed.wanted): 100.0}}
        request = {"stream_id": 1, "prompt": healed.prompt, "text": True, **options}
        socket.send(f"GENERATE {json.dumps(request)}")
        message = socket.recv(WAIT_S)
        assert isinstance(message, str)
        kind, _, entries = message.partition(" ")
        assert kind == "TOKEN", message
        [entry] = json.loads(entries)
        assert (entry["token"], entry["text"]) == (healed.wanted, healed.rest)
