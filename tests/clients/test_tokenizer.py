"""A client gets a model's tokenizer, and tokenizes texts like the worker."""

from __future__ import annotations

import json

import pytest
from tokenbus.clients import AsyncClient, Client, RequestError
from tokenizers import Tokenizer

from ..processes import Bus

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):\n    return 'ä€'"


def test_a_client_gets_the_tokenizer_of_a_model(client: Client) -> None:
    files = client.tokenizer()
    assert files == client.tokenizer("embedded")
    assert files.fingerprint == client.model_info().fingerprint
    assert files.special_tokens["eos_token"] == "<|endoftext|>"
    assert files.chat_template == ""
    ids = Tokenizer.from_str(files.json).encode(PROMPT).ids
    stream = client.generate(ids, max_tokens=8, text=True)
    assert stream.text() == client.generate(PROMPT, max_tokens=8).text()
    assert stream.tokens() == client.generate(PROMPT, max_tokens=8).tokens()


@pytest.mark.anyio
async def test_the_asynchronous_client_gets_it_too(bus: Bus) -> None:
    async with AsyncClient(bus.front) as client:
        files = await client.tokenizer()
    assert json.loads(files.json)["model"]["type"] == "BPE"


def test_an_unknown_model_is_refused_by_name(client: Client) -> None:
    with pytest.raises(RequestError, match="no worker serves the model 'nowhere'"):
        client.tokenizer("nowhere")
