"""Hostile requests are refused or bounded, and do not delay other requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tokenbus.clients.gateway.context import Gateway as InProcess
from tokenbus.clients.gateway.conversation.answer_turns import Ended
from tokenbus.clients.gateway.conversation.parts import Text
from tokenbus.clients.gateway.generation.counter import (
    MAX_ALTERNATIVES,
    MAX_ON_LOOP,
    Counter,
    compose,
)
from tokenbus.clients.gateway.generation.generations import MAX_BATCH, Generations
from tokenbus.clients.gateway.models import ServedModel
from tokenbus.clients.gateway.openai.completions import _count_echoes
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import InputItems
from tokenbus.clients.gateway.openai.response_jobs import ResponseJob
from tokenbus.clients.gateway.openai.response_output import Output
from tokenbus.clients.gateway.stored.inputs import ResponseInput
from tokenbus.clients.gateway.stored.responses import StoredResponses
from tokenbus.clients.gateway.stored.saving import SavedJob
from tokenbus.clients.gateway.users.turns import Turns, current_user
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import UnavailableError
from tokenbus.protocol.messages import MAX_BODY_BYTES, ModelInfo, Token, TokenizerFiles
from tokenbus.protocol.sampling import MAX_N, MAX_TOP_LOGPROBS
from tokenbus.workers.gpu import embedded
from tokenizers import Tokenizer

from ...processes import Gateway

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


def error_of(response: httpx.Response) -> tuple[int, object]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("origin", ["http://[", "http://]:80", "http://[::1"])
def test_an_origin_that_is_no_address_is_refused(gateway: Gateway, origin: str) -> None:
    response = httpx.get(gateway.url + "/live", headers={"origin": origin}, timeout=300)
    assert error_of(response) == (403, "origin_not_allowed")


@pytest.mark.parametrize("template", ["{{ '\\ud800' }}", "{{ raise_exception('\\ud800') }}"])
def test_a_template_writes_half_a_character(gateway: Gateway, template: str) -> None:
    body = {**HELLO, "chat_template": template}
    response = httpx.post(gateway.url + CHAT, json=body, timeout=300.0)
    assert error_of(response) == (400, "chat_template_error")


def test_a_template_says_at_length_why_it_cannot_be_rendered(gateway: Gateway) -> None:
    body = {**HELLO, "chat_template": "{{ raise_exception('x' * 3000000) }}"}
    response = httpx.post(gateway.url + CHAT, json=body, timeout=300.0)
    assert error_of(response) == (400, "chat_template_error")
    assert len(response.content) < 10_000


def test_the_arguments_of_a_call_in_a_message_are_nested_deeply(gateway: Gateway) -> None:
    function = {"name": "f", "arguments": '{"a":' * 10_000}
    call = {"id": "1", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages: Any = HELLO["messages"]
    body = {"messages": [*messages, assistant], "chat_template": "{{ messages | length }}"}
    response = httpx.post(gateway.url + "/tokenize", json=body, timeout=300.0)
    assert response.status_code == 200


def test_a_body_of_half_a_million_empty_lists_is_refused(gateway: Gateway) -> None:
    function = {"name": "f", "parameters": {"type": "object", "enum": [[]] * 500_000}}
    body = {**HELLO, "tools": [{"type": "function", "function": function}]}
    response = httpx.post(gateway.url + CHAT, json=body, timeout=300.0)
    assert error_of(response) == (413, "too_large")
    assert "65536 are allowed" in response.json()["error"]["message"]


@pytest.mark.parametrize("depth", [900, 1000, 500_000])
def test_bodies_that_are_nested_deeply(gateway: Gateway, depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    body = json.dumps(HELLO)[:-1] + ', "chat_template_kwargs": ' + nested + "}"
    headers = {"content-type": "application/json"}
    response = httpx.post(gateway.url + CHAT, content=body, headers=headers, timeout=300.0)
    assert response.status_code in (200, 400, 413)


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_a_million_alternatives_ends_early(
    gateway: Gateway, path: str, stream: bool
) -> None:
    num_tokens = MAX_ALTERNATIVES // (MAX_N * MAX_TOP_LOGPROBS)
    body: dict[str, Any] = {
        "n": MAX_N,
        "max_tokens": 4 * num_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    if path == CHAT:
        body |= {**HELLO, **body, "logprobs": True, "top_logprobs": MAX_TOP_LOGPROBS}
    else:
        body |= {"prompt": "Hello", "logprobs": MAX_TOP_LOGPROBS}
    response = httpx.post(gateway.url + path, json=body, timeout=300.0)
    if stream:
        error = json.loads(response.text.rstrip().rsplit("data: ", 1)[1])["error"]
    else:
        assert response.status_code == 400
        error = response.json()["error"]
    assert (error["code"], error["param"]) == ("too_large", "logprobs")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"echo": True, "logprobs": MAX_TOP_LOGPROBS}),
        ("/v1/completions", {"prompt_logprobs": MAX_TOP_LOGPROBS}),
        ("/v1/completions", {"return_token_ids": True, "prompt": [[1] * 1000] * 50}),
        ("/generate", {"logprob_start_len": 0, "top_logprobs_num": MAX_TOP_LOGPROBS}),
    ],
    ids=["echo", "prompt_logprobs", "token ids", "generate"],
)
def test_a_prompt_is_not_repeated_with_a_million_alternatives(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    body = {"prompt": "Hello, " * 40, "n": MAX_N, **body}
    if path == "/generate":
        body |= {"text": body.pop("prompt"), "sampling_params": {"n": body.pop("n")}}
        body["return_logprob"] = True
    response = httpx.post(gateway.url + path, json=body, timeout=300.0)
    assert error_of(response) == (400, "too_large")


@pytest.mark.anyio
async def test_many_alternatives_are_composed_on_another_thread() -> None:
    loop = threading.current_thread()
    assert await compose(Turns(), MAX_ON_LOOP, threading.current_thread) is loop
    assert await compose(Turns(), MAX_ON_LOOP + 1, threading.current_thread) is not loop


@pytest.mark.anyio
async def test_users_take_turns_with_answers_that_are_composed_on_a_thread() -> None:
    turns, may_end, order = Turns(), threading.Event(), list[str]()

    async def composed(user: str) -> None:
        def make() -> None:
            may_end.wait(60)
            order.append(user)

        current_user.set(user)
        await compose(turns, MAX_ON_LOOP + 1, make)

    tasks = [asyncio.create_task(composed(user)) for user in ("ann", "ann", "ann", "bob")]
    while sum(map(len, turns._waiting.values())) < 3:
        await asyncio.sleep(0)
    may_end.set()
    await asyncio.gather(*tasks)
    assert order == ["ann", "ann", "bob", "ann"]


@pytest.mark.anyio
async def test_the_alternatives_of_a_response_are_composed_on_another_thread(
    tmp_path: Path,
) -> None:
    threads: dict[str, threading.Thread] = {}

    class Composed(Output):
        def event(self, kind: str, **fields: Any) -> bytes:
            threads[kind] = threading.current_thread()
            return super().event(kind, **fields)

    class Answered(SimpleNamespace):
        async def events(self) -> AsyncGenerator[Ended, None]:
            yield Ended(cast(Any, None), [])

        def receipt(self, *, calls: bool) -> None:
            return None

    gateway = SimpleNamespace(large_answers=Turns(), stored=StoredResponses(tmp_path))
    counter = Counter()
    counter.alternatives = MAX_ON_LOOP + 1
    plan = SimpleNamespace(gateway=gateway, prepared=SimpleNamespace(name="m"))
    turns = Answered(plan=plan, counter=counter, end="stop", made=[None])
    output = Composed(0)
    b"".join(output._begin(Text("")))
    job = ResponseJob(ResponsesRequest(input="a", model="m"), cast(Any, turns), output, "resp_1")
    saved = SavedJob(cast(Any, gateway), ResponseInput([], InputItems([])), job)
    assert [part async for part in saved.events()]
    await gateway.stored.close()
    loop = threading.current_thread()
    for kind in ("output_text.done", "content_part.done", "output_item.done", "completed"):
        assert threads[f"response.{kind}"] is not loop


@pytest.mark.anyio
@pytest.mark.parametrize("named", [True, False])
async def test_other_requests_run_between_the_unread_entries_of_a_stream(named: bool) -> None:
    tops = dict.fromkeys(range(20), -1.0)
    unread = [
        Token(token=7, stream_id=1, logprob=-1.0, finish_reason=None, top_logprobs=tops)
        for _ in range(2 * MAX_BATCH)
    ]
    arrivals = [[entry] for entry in unread] if named else [unread]

    class Stream(SimpleNamespace):
        async def arrived(self) -> list[Token]:
            return arrivals.pop(0) if arrivals else []

    client = SimpleNamespace(generate=lambda *_: Stream(close=lambda: None))
    generations = Generations(cast(Any, client), ["a"], {}, None, Counter())
    read: list[Token] = []

    async def reads() -> None:
        async for _, entries in generations.batches():
            read.extend(entries)

    reading = asyncio.ensure_future(reads())
    steps = [0]
    while not reading.done():
        await asyncio.sleep(0)
        steps.append(len(read) - sum(steps))
    assert read == unread
    assert max(steps) * (1 + len(tops)) <= MAX_BATCH


def test_prompts_are_not_repeated_beyond_the_maximum_size_of_a_body(gateway: Gateway) -> None:
    prompt = "Hello, " * 80
    num_prompts = 1 + MAX_BODY_BYTES // (MAX_N * len(prompt))
    body = {"prompt": [prompt] * num_prompts, "n": MAX_N, "echo": True, "max_tokens": 0}
    response = httpx.post(gateway.url + "/v1/completions", json=body, timeout=300.0)
    assert error_of(response) == (413, "too_large")


def test_the_prompts_in_an_answer_count_towards_the_share_of_the_memory() -> None:
    shares = UserShares(8, max_body_bytes=1000)
    answers = cast(InProcess, SimpleNamespace(shares=shares))
    with shares.request():
        _count_echoes(answers, ["a" * 90], 4)
        assert shares.memory.free == 1000 - 368
        with pytest.raises(UnavailableError):
            _count_echoes(answers, ["a" * 90], 8)
    assert shares.memory.free == 1000


class Watched:
    """A tokenizer that counts how often the event loop ran during its last call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.turns = 0
        self.turns_meanwhile = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._tokenizer, name)

        def call(*args: Any, **options: Any) -> Any:
            before = self.turns
            try:
                return method(*args, **options)
            finally:
                self.turns_meanwhile = self.turns - before

        return call

    async def turn(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0.001)


@pytest.mark.anyio
async def test_long_texts_do_not_keep_the_event_loop() -> None:
    text = "some words " * 40_000
    folder = Path(embedded.__file__).parent / "model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    watched = Watched(tokenizer)
    info = ModelInfo(
        name="m", vocab_size=9, context_length=100_000, eos_token_ids=[0], fingerprint="f"
    )
    files = TokenizerFiles(fingerprint="f", json="{}")
    model = ServedModel(info, files, cast(Tokenizer, watched))
    turning = asyncio.create_task(watched.turn())
    try:
        # On a busy machine, the event loop's thread may not run during one of the calls.
        async with asyncio.timeout(300.0):
            while watched.turns_meanwhile < 2:
                ids = await model.tokenize(text, special=False)
            watched.turns_meanwhile = 0
            while watched.turns_meanwhile < 2:
                assert await model.detokenize(ids * 20) == tokenizer.decode(ids * 20)
    finally:
        turning.cancel()
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids
