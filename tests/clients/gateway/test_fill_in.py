"""With the field ``suffix``, a completion is the text between the prompt and the suffix."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tokenbus.clients.gateway.openai.fill_in import FORMS
from tokenbus.workers.gpu import embedded
from tokenizers import Tokenizer

from ...processes import Bus
from .stepped import WAIT_S, stepped_worker


def tokenizer_with(names: list[str]) -> str:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    tokenizer.add_special_tokens(names)
    text: str = tokenizer.to_str()
    return text


@pytest.mark.process
@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=["prefix first", "suffix first"])
def test_a_gap_is_filled_between_the_tokens_of_the_tokenizer(form: Any) -> None:
    names = [name for name in form[:3] if name]
    text = tokenizer_with([*names, "<|endoftext|>"])
    tokenizer = Tokenizer.from_str(text)

    def ids(part: str) -> list[int]:
        found: list[int] = tokenizer.encode(part, add_special_tokens=False).ids
        return found

    with Bus() as bus, stepped_worker(f"ipc://{bus.folder}/back.sock", 4, tokenizer=text) as worker:
        bus.wait_for_models("stepped")
        gateway = bus.start_gateway()
        body = {"model": "stepped", "prompt": "def add(", "suffix": "return c", "stop": "\n"}
        with ThreadPoolExecutor(1) as threads:
            url = f"{gateway.url}/v1/completions"
            answered = threads.submit(httpx.post, url, json=body, timeout=WAIT_S)
            stream = worker.begun()
            stream.step(1, finish_reason="stop", text="a, b")
            answer = answered.result(WAIT_S)
        assert answer.json()["choices"][0]["text"] == "a, b"
        before = ids(f"{form.prefix}def add(")
        after = ids(f"{form.suffix}return c")
        parts = [after, before] if form.suffix_first else [before, after]
        assert stream.prompt == [*parts[0], *parts[1], *ids(form.middle)]
        assert set(ids("".join(names))) <= set(stream.generate.stop)
        assert "\n" in stream.generate.stop
        both = httpx.post(url, json={**body, "echo": True}, timeout=WAIT_S)
        assert json.loads(both.text)["error"]["param"] == "suffix"
