"""The OpenAI interface reports token ids, both kinds of log-probabilities, candidates and spans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenbus.clients import Client, GeneratedSequence

from ...processes import Bus, Gateway
from .openai_requests import HELLO, MODEL, openai_client

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"
FIELDS = {"return_token_ids": True, "processed_logprobs": True, "kept": True}
OPTIONS: dict[str, Any] = {"max_tokens": 7, "temperature": 0.9, "top_p": 0.8, "seed": 4}


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


@pytest.fixture(scope="module")
def bus_client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def wanted(client: Client, prompt: list[int], **options: Any) -> list[GeneratedSequence]:
    given = {**OPTIONS, "processed_logprobs": True, "kept": True, "text": True, **options}
    return client.generate(prompt, **given).wait()


def check(choice: dict[str, Any], sequence: GeneratedSequence) -> None:
    """Fails if the tokens or the additional fields of a choice differ from those of a sequence."""
    assert choice["token_ids"] == sequence.tokens
    assert choice["processed_logprobs"] == sequence.processed_logprobs
    assert choice["kept"] == sequence.kept
    [(first, span)] = sequence.spans
    assert choice["spans"] == [{"first": first, "weights": span.weights, "exact": span.exact}]


def joined(chunks: list[Any], index: int) -> dict[str, Any]:
    """The additional fields of a choice, assembled from its chunks."""
    found: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                for name, value in (choice.model_extra or {}).items():
                    found[name] = found[name] + value if name in found else value
    return found


def test_completions_report_their_tokens(api: openai.OpenAI, bus_client: Client) -> None:
    given: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "n": 2, **OPTIONS}
    answer = api.completions.create(**given, logprobs=1, extra_body=FIELDS)
    for choice in answer.choices:
        extra = choice.model_extra or {}
        sequences = wanted(bus_client, extra["prompt_token_ids"], n=2)
        check(extra, sequences[choice.index])
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == sequences[choice.index].logprobs
    chunks = list(api.completions.create(**given, stream=True, extra_body=FIELDS))
    for choice in answer.choices:
        found = joined(chunks, choice.index)
        check(found, wanted(bus_client, found["prompt_token_ids"], n=2)[choice.index])
        texts = [c.text for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(texts) == choice.text


def test_a_prompt_of_token_ids_is_repeated(api: openai.OpenAI) -> None:
    answer = api.completions.create(
        model=MODEL, prompt=[5, 6, 7], max_tokens=2, extra_body={"return_token_ids": True}
    )
    extra = answer.choices[0].model_extra or {}
    assert extra["prompt_token_ids"] == [5, 6, 7]
    assert len(extra["token_ids"]) == 2
    assert "kept" not in extra


def test_chats_report_their_tokens(api: openai.OpenAI, bus_client: Client) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": HELLO, **OPTIONS}
    answer = api.chat.completions.create(**given, extra_body=FIELDS)
    prompt = (answer.model_extra or {})["prompt_token_ids"]
    [sequence] = wanted(bus_client, prompt)
    check(answer.choices[0].model_extra or {}, sequence)
    chunks = list(api.chat.completions.create(**given, stream=True, extra_body=FIELDS))
    check(joined(chunks, 0), sequence)
    prompts = [(chunk.model_extra or {}).get("prompt_token_ids") for chunk in chunks]
    assert prompts == [prompt, *[None] * (len(chunks) - 1)]
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == answer.choices[0].message.content
