"""``/v1/completions``, ``/v1/models`` and the tokenizer's paths, over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion
from tokenbus.clients import Client

from ...processes import Bus, Gateway, until
from .openai_requests import MODEL, PERSON, openai_client, receipt

pytestmark = pytest.mark.process

PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai_client(gateway) as client:
        yield client


@pytest.fixture(scope="module")
def bus_client(steered: Bus) -> Iterator[Client]:
    with steered.client() as client:
        yield client


def complete(api: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> Completion:
    given: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **options}
    answer = api.completions.create(model=MODEL, prompt=prompt, **given)
    assert isinstance(answer, Completion)
    return answer


def stream(api: openai.OpenAI, prompt: Any = PROMPT, **options: Any) -> list[Completion]:
    given: dict[str, Any] = {"max_tokens": 8, "temperature": 0, **options}
    chunks: Iterable[Any] = api.completions.create(model=MODEL, prompt=prompt, stream=True, **given)
    return list(chunks)


def texts(chunks: list[Completion]) -> dict[int, str]:
    """The text of each choice, assembled from its chunks."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            so_far = found.get(choice.index, "")
            back = receipt(choice).get("backtrack", 0)
            found[choice.index] = so_far[: len(so_far) - back] + choice.text
    return found


def test_the_models_are_listed(api: openai.OpenAI) -> None:
    [model] = api.models.list().data
    assert (model.id, model.owned_by) == (MODEL, "tokenbus")
    assert model.model_extra == {"max_model_len": 1024, "root": MODEL}
    assert api.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="is not loaded"):
        api.models.retrieve("other/model")


def test_a_completion_is_what_the_bus_generates(api: openai.OpenAI, bus_client: Client) -> None:
    expected = bus_client.generate(PROMPT, max_tokens=8).wait()[0]
    answer = complete(api)
    [choice] = answer.choices
    assert choice.text == expected.text
    assert (choice.index, choice.finish_reason) == (0, expected.finish_reason)
    assert choice.logprobs is None
    assert choice.model_extra == {"tokenbus": {"exact": expected.exact}}
    assert (answer.object, answer.model) == ("text_completion", MODEL)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, 8)
    assert usage.total_tokens == usage.prompt_tokens + 8


def test_a_stream_has_the_same_text_and_its_usage_if_asked_for(api: openai.OpenAI) -> None:
    whole = complete(api)
    assert texts(stream(api)) == {0: whole.choices[0].text}
    *chunks, last = stream(api, stream_options={"include_usage": True})
    assert texts(chunks) == {0: whole.choices[0].text}
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert (last.choices, last.usage) == ([], whole.usage)


def test_prompts_have_four_forms(api: openai.OpenAI, gateway: Gateway) -> None:
    def ids(text: str) -> list[int]:
        answer = httpx.post(f"{gateway.url}/tokenize", json={"prompt": text}, timeout=300).json()
        return [*answer["tokens"]]

    one, two = PROMPT, "import "
    expected = [complete(api, prompt).choices[0].text for prompt in (one, two)]
    assert complete(api, ids(one)).choices[0].text == expected[0]
    for several in ([one, two], [ids(one), ids(two)]):
        answer = complete(api, several)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert texts(stream(api, several)) == dict(enumerate(expected))


def test_n_samples_are_numbered_and_repeatable(api: openai.OpenAI) -> None:
    options: dict[str, Any] = {"n": 3, "temperature": 1, "seed": -7}
    answer = complete(api, [PROMPT, "import "], **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert len({choice.text for choice in answer.choices}) > 2
    again = stream(api, [PROMPT, "import "], **options)
    assert texts(again) == {choice.index: choice.text for choice in answer.choices}


def test_best_of_answers_with_the_likeliest(api: openai.OpenAI) -> None:
    def total(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs))

    options: dict[str, Any] = {"temperature": 1, "seed": 7, "logprobs": 0}
    every = complete(api, n=4, **options)
    best = complete(api, n=2, best_of=4, **options)
    likeliest = sorted(every.choices, key=total, reverse=True)
    assert [choice.text for choice in best.choices] == [c.text for c in likeliest[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_logprobs_in_the_form_of_completions(api: openai.OpenAI, bus_client: Client) -> None:
    expected = bus_client.generate(PROMPT, max_tokens=8, top_logprobs=2).wait()[0]
    [choice] = complete(api, logprobs=2).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert found.top_logprobs is not None
    for token, top in zip(found.tokens, found.top_logprobs, strict=True):
        assert token in top
        assert 2 <= len(top) <= 3
    assert found.text_offset is not None
    for at, token in zip(found.text_offset, found.tokens, strict=True):
        assert choice.text[at:].startswith(token)
    pieces = [chunk.choices[0].logprobs for chunk in stream(api, logprobs=2)]
    joined = [piece for piece in pieces if piece is not None]
    assert [t for piece in joined for t in piece.tokens or ()] == found.tokens
    assert [t for piece in joined for t in piece.text_offset or ()] == found.text_offset


def test_an_echo_has_the_scores_of_the_prompt(api: openai.OpenAI, bus_client: Client) -> None:
    ids = [int(t) for t in bus_client.generate(PROMPT, max_tokens=6).tokens()]
    scores = bus_client.score(ids[:1], ids[1:])
    answer = complete(api, ids, echo=True, logprobs=1, max_tokens=0)
    [choice] = answer.choices
    assert choice.logprobs is not None
    [first, *others] = choice.logprobs.token_logprobs or []
    assert first is None
    assert others == pytest.approx(scores.logprobs, abs=1e-3)
    assert choice.logprobs.tokens is not None
    assert choice.text == "".join(choice.logprobs.tokens)
    assert (choice.finish_reason, answer.usage and answer.usage.prompt_tokens) == ("length", 6)
    greedy = complete(api, ids[:5], max_tokens=1).choices[0].text
    assert choice.logprobs.top_logprobs is not None
    likeliest = choice.logprobs.top_logprobs[5] or {}
    assert max(likeliest, key=lambda token: likeliest[token]) == greedy

    continued = complete(api, echo=True, logprobs=0)
    assert continued.choices[0].text == PROMPT + complete(api).choices[0].text
    offsets = continued.choices[0].logprobs and continued.choices[0].logprobs.text_offset
    assert offsets is not None
    assert len(PROMPT) in offsets
    for options in ({}, {"logprobs": 0}):
        assert texts(stream(api, echo=True, **options)) == {0: continued.choices[0].text}
    assert texts(stream(api, echo=True, max_tokens=0)) == {0: PROMPT}


def test_sampling_fields_reach_the_engine(api: openai.OpenAI, gateway: Gateway) -> None:
    text = complete(api, max_tokens=12).choices[0].text
    stop = text.split()[1]
    stopped = complete(api, max_tokens=12, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(stop)], "stop")
    found = httpx.post(f"{gateway.url}/tokenize", json={"prompt": " xyz"}, timeout=300).json()
    token = found["tokens"][0]
    piece = httpx.post(f"{gateway.url}/detokenize", json={"tokens": [token]}, timeout=300).json()[
        "prompt"
    ]
    forced = complete(api, max_tokens=3, logit_bias={str(token): 100})
    assert forced.choices[0].text == 3 * piece
    other: dict[str, Any] = {"stop_token_ids": [token]}
    ended = complete(api, max_tokens=3, logit_bias={str(token): 100}, extra_body=other)
    assert ended.choices[0].finish_reason == "stop"
    more: dict[str, Any] = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "priority": 3,
    }
    sampled = complete(
        api, temperature=1, top_p=0.9, presence_penalty=0.5, frequency_penalty=1, extra_body=more
    )
    assert sampled.choices[0].finish_reason == "length"


def test_a_text_has_a_minimum_of_tokens(api: openai.OpenAI) -> None:
    prompt = "def add(a, b):\n    return a + b\n"
    assert complete(api, prompt).choices[0].text == ""
    [choice] = complete(api, prompt, stop="get", extra_body={"min_tokens": 6}).choices
    assert (choice.text, choice.finish_reason) == ("\ndef get(a, b):", "length")


def test_a_constrained_text_has_a_minimum_unless_it_is_complete(api: openai.OpenAI) -> None:
    body: dict[str, Any] = {"return_token_ids": True}
    [ended] = complete(api, "def add(a, b):\n    return a + b\n", extra_body=body).choices
    [end] = (ended.model_extra or {})["token_ids"]
    for regex, least, most in (("[a-z]+", 6, 6), ("yes|no", 1, 2)):
        body["structured_outputs"] = {"regex": regex}
        given: dict[str, Any] = {"logit_bias": {str(end): 100}, "max_tokens": 12}
        lengths = []
        for minimum in (0, 6):
            [found] = complete(api, extra_body=body | {"min_tokens": minimum}, **given).choices
            ids = (found.model_extra or {})["token_ids"]
            assert re.fullmatch(regex, found.text)
            lengths.append(len([token for token in ids if token != end]))
        assert lengths[0] <= 2
        assert least <= lengths[1] <= most


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": PERSON}, "json_schema"),
    "text": ({"json": json.dumps(PERSON)}, "json_schema"),
    "regex": ({"regex": r"[a-z]{3}\d"}, "regex"),
    "choice": ({"choice": ["yes", "no"]}, "choice"),
    "grammar": ({"grammar": 'start: "<" /[a-z]{2}/ ">"'}, "grammar"),
    "json_object": ({"json_object": True}, "json_object"),
}


@pytest.mark.parametrize("name", CASES)
def test_structured_outputs_are_enforced_and_receipted(api: openai.OpenAI, name: str) -> None:
    asked, label = CASES[name]
    given: dict[str, Any] = {"max_tokens": 40, "extra_body": {"structured_outputs": asked}}
    [choice] = complete(api, "x = ", **given).choices
    assert receipt(choice) == {"constraint": label, "ended": "complete"}
    assert choice.finish_reason == "stop"
    match name:
        case "regex":
            assert re.fullmatch(r"[a-z]{3}\d", choice.text)
        case "choice":
            assert choice.text in ("yes", "no")
        case "grammar":
            assert re.fullmatch("<[a-z]{2}>", choice.text)
        case _:
            value = json.loads(choice.text)
            assert name == "json_object" or set(value) == {"name", "age"}
    chunks = stream(api, "x = ", **given)
    assert texts(chunks) == {0: choice.text}
    assert receipt(chunks[-1].choices[0]) == receipt(choice)


def test_the_receipt_says_if_the_end_was_appended_or_is_missing(api: openai.OpenAI) -> None:
    def ended(asked: dict[str, Any], max_tokens: int) -> tuple[str, str | None, str]:
        body = {"structured_outputs": asked}
        [choice] = complete(api, "x = ", max_tokens=max_tokens, extra_body=body).choices
        return receipt(choice)["ended"], choice.finish_reason, choice.text

    how, reason, text = ended({"regex": "[a-z]+;"}, 12)
    assert (how, reason) == ("closed", "stop")
    assert re.fullmatch("[a-z]+;", text)
    how, reason, text = ended(
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}, 36
    )
    # Near the limit, masks may allow only tokens that lead to the end. The text is then complete
    # without an appended end.
    assert how in ("closed", "complete")
    assert reason == "stop"
    assert len(json.loads(text)) >= 9
    assert ended({"regex": "[a-z]{40};"}, 4)[:2] == ("cut", "length")
    with pytest.raises(openai.BadRequestError, match="max_tokens is 4, but the shortest text"):
        ended({"json": PERSON}, 4)


def test_a_controller_can_be_named(api: openai.OpenAI) -> None:
    body = {"controller": "regex", "controller_arg": "[0-9]{4}"}
    [choice] = complete(api, extra_body=body).choices
    assert re.fullmatch("[0-9]{4}", choice.text)
    assert receipt(choice) == {"constraint": "regex", "ended": "complete"}
    with pytest.raises(openai.NotFoundError) as caught:
        complete(api, extra_body={"controller": "nowhere"})
    assert (caught.value.code, caught.value.param) == ("unknown_controller", "controller")


REFUSED: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "a beam": ({"use_beam_search": True}, "use_beam_search", "sequences are sampled"),
    "unknown inside": ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "0 constraints"),
    "suffix": ({"suffix": "x"}, "suffix", "no tokens that mark"),
    "temperature": ({"temperature": -1}, "temperature", "at least 0"),
    "more than its maximum": (
        {"min_tokens": 3},
        "min_tokens",
        "min_tokens is 3; expected at most max_tokens, which is 2",
    ),
    "more than nothing": ({"max_tokens": 0, "min_tokens": 1, "echo": True}, "min_tokens", "is 0"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "best_of": ({"n": 3, "best_of": 2}, "best_of", "at least n"),
    "best_of in a stream": ({"best_of": 2, "stream": True}, "best_of", "stream"),
    "no prompts": ({"prompt": []}, "prompt", "length"),
    "kinds of prompts": ({"prompt": ["a", 1]}, "prompt", "different kinds"),
    "token": ({"prompt": [99999999]}, None, "99999999"),
    "too long": ({"prompt": "x " * 3000}, "prompt", "1024"),
    "empty": ({"prompt": ""}, "prompt", "empty"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regex"),
    "schema": (
        {"structured_outputs": {"json": {"type": "no"}}, "stream": True},
        "structured_outputs.json",
        "no",
    ),
    "two constraints": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        "structured_outputs",
        "2 constraints",
    ),
    "two fields": (
        {"structured_outputs": {"regex": "a"}, "controller": "regex"},
        "controller_arg",
        "combined",
    ),
    "an argument alone": ({"controller_arg": "a"}, "controller_arg", "without a controller"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(gateway: Gateway, name: str) -> None:
    body, param, what = REFUSED[name]
    answer = httpx.post(
        f"{gateway.url}/v1/completions",
        json={"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **body},
        timeout=300,
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert what in error["message"]
    if param is not None:
        assert error["param"] == param


def test_typed_errors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="nowhere", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        complete(api, "x " * 3000)
    assert long.value.code == "context_length_exceeded"


def test_fields_without_an_effect_are_named(api: openai.OpenAI) -> None:
    answer = api.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, user="ann", extra_body={"store": True, "echos": 1}
    )
    assert answer.headers["x-tokenbus-ignored"] == "user, store, echos"
    plain = api.completions.with_raw_response.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert "x-tokenbus-ignored" not in plain.headers


def test_prompt_tokens_in_the_cache_are_reported(api: openai.OpenAI) -> None:
    prompt = "# reused prompt\n" * 40
    complete(api, prompt)
    usage = complete(api, prompt).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 100


def live(client: Client) -> int:
    return len([s for s in client.status(streams=True).live if s.type == "GENERATE"])


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_cancels_its_generation(
    bus_client: Client, gateway: Gateway, streamed: bool
) -> None:
    until(lambda: live(bus_client) == 0, 120, "no stream")
    body = {
        "model": MODEL,
        "prompt": [PROMPT, "import "],
        "n": 16,
        "max_tokens": 900,
        "ignore_eos": True,
        "stream": streamed,
    }
    with contextlib.closing(request(gateway, body)) as connection:
        until(lambda: live(bus_client) == 2, 120, "both streams run")
        if streamed:
            assert connection.recv(1024).startswith(b"HTTP/1.1 200")
    until(lambda: live(bus_client) == 0, 120, "the streams are cancelled")


def request(gateway: Gateway, body: dict[str, Any]) -> socket.socket:
    """Opens a connection, and sends ``body`` to ``/v1/completions``. Does not read the answer."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=300)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_streams_that_nobody_reads_do_not_hold_up_others(
    api: openai.OpenAI, gateway: Gateway, bus_client: Client
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    body |= {"n": 4, "logprobs": 20}
    unread = [request(gateway, body) for _ in range(4)]
    try:
        until(lambda: live(bus_client) == 4, 120, "all streams run")
        assert complete(api).choices[0].finish_reason == "length"
        until(lambda: live(bus_client) == 0, 120, "the end of the unread streams at the broker")
    finally:
        for connection in unread:
            connection.close()


def test_a_body_that_is_not_one_is_refused(gateway: Gateway) -> None:
    def post(content: bytes, kind: str = "application/json", **headers: str) -> httpx.Response:
        return httpx.post(
            f"{gateway.url}/v1/completions",
            content=content,
            headers={"content-type": kind, **headers},
            timeout=300,
        )

    broken = post(b'{"prompt": ')
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    form = "application/x-www-form-urlencoded"
    assert post(b"prompt=x", form).json()["error"]["code"] == "invalid_json"
    assert post(b'{"prompt": "x", "max_tokens": 1}', form).status_code == 200
    assert post(b'{"prompt": "x"}', form, origin=gateway.url).status_code == 415
    assert post(b"[]").status_code == 400
    large = request_head(gateway, 200 * 1024 * 1024)
    assert b" 413 " in large.partition(b"\r\n")[0]


def request_head(gateway: Gateway, length: int) -> bytes:
    """Sends only the first bytes of a body, and returns the first bytes of the answer."""
    host, _, port = gateway.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}:{port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        connection.sendall(head.encode() + b'{"prompt": "')
        return connection.recv(4096)


def test_text_becomes_tokens_and_text_again(gateway: Gateway) -> None:
    def ask(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{gateway.url}/{path}", json=body, timeout=300)
        return answer.json() if answer.status_code == 200 else answer.json()["error"]

    text = "def füñ(x): return '→ 日本'"
    found = ask("tokenize", prompt=text, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert ask("detokenize", tokens=found["tokens"]) == {"prompt": text}
    assert ask("tokenize", prompt="x")["token_strs"] is None
    assert ask("detokenize", tokens=[5, 10**6])["param"] == "tokens[1]"
    assert "not both" in ask("tokenize")["message"]
    assert ask("tokenize", prompt="x", chat_template="y")["param"] == "chat_template"
    messages = [{"role": "user", "content": "hello"}]
    chat = ask("tokenize", messages=messages)
    assert ask("detokenize", tokens=chat["tokens"]) == {"prompt": "User: hello\nAssistant:"}
