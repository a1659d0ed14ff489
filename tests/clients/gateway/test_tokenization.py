"""The gateway tokenizes long texts in bounded time and outside the event loop. Users take turns."""

from __future__ import annotations

import asyncio
import importlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenbus.clients.gateway.app import build
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.models import MAX_NEW_TEXTS, ModelTable, ServedModel
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_input import read_items
from tokenbus.clients.gateway.openai.response_jobs import ResponseQuestion
from tokenbus.clients.gateway.tokenization import MAX_LOOP_ITEMS, MAX_PREPARE_S, Tokenization
from tokenbus.clients.gateway.users.turns import current_user
from tokenbus.protocol.errors import RequestError
from tokenbus.protocol.messages import ModelInfo, TokenizerFiles
from tokenbus.protocol.settings import Settings
from tokenbus.protocol.text_bounds import SEGMENT_CHARS, TokenSize
from tokenizers import Tokenizer, models, pre_tokenizers

LONG = SEGMENT_CHARS + 1
WAIT_S = 120.0


def served(context: int, size: TokenSize) -> ServedModel:
    """A model with a token for each digit. ``context`` is its maximum number of tokens."""
    tokenizer = Tokenizer(models.BPE({str(n): n for n in range(10)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    info = ModelInfo(
        name="m", vocab_size=10, context_length=context, eos_token_ids=[0], fingerprint="f"
    )
    return ServedModel(info, TokenizerFiles(fingerprint="f", json="{}"), tokenizer, token_size=size)


@pytest.mark.parametrize(
    ("length", "size", "message"),
    [
        (
            15_000_000,
            TokenSize(7, False),
            r"15000000 bytes .* \(100 tokens of at most 7 bytes each",
        ),
        (15_000_000, TokenSize(150_000, False), rf"the first {SEGMENT_CHARS} of 15000000 char"),
    ],
)
def test_a_text_that_cannot_fit_is_refused(length: int, size: TokenSize, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        asyncio.run(served(100, size).tokenize("1" * length))
    assert caught.value.code == "prompt_too_long"


def test_a_long_text_that_fits_is_tokenized_as_a_whole() -> None:
    model = served(LONG, TokenSize(1, False))
    assert asyncio.run(model.tokenize("7" * LONG)) == [7] * LONG


@pytest.mark.parametrize(("count", "on_loop"), [(MAX_NEW_TEXTS, True), (2000, False)])
def test_many_texts_of_tokens_are_computed_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, count: int, on_loop: bool
) -> None:
    model = served(LONG, TokenSize(1, False))
    threads: set[threading.Thread] = set()

    def text(_: ServedModel, token: int) -> str:
        threads.add(threading.current_thread())
        return str(token)

    monkeypatch.setattr(ServedModel, "_text", text)
    tokens = [*range(count), 0]
    assert asyncio.run(model.texts_of(tokens)) == list(map(str, tokens))
    assert (threads == {threading.current_thread()}) == on_loop


class Held:
    """Work of users that ends when the test releases it."""

    def __init__(self) -> None:
        self.tokenization = Tokenization()
        self.begun: list[str] = []
        self.released = threading.Semaphore(0)

    def work(self, name: str) -> str:
        self.begun.append(name)
        assert self.released.acquire(timeout=WAIT_S)
        return name

    def ask(self, user: str, name: str, size: int = LONG) -> asyncio.Task[str]:
        async def run() -> str:
            current_user.set(user)
            return await self.tokenization.run(size, lambda: self.work(name))

        return asyncio.create_task(run())


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not done():
            await asyncio.sleep(0)


def test_users_take_turns_and_short_texts_do_not_wait_for_long_ones() -> None:
    async def run() -> None:
        held = Held()
        tasks = [held.ask("ann", f"ann {n}") for n in range(3)]
        await until(lambda: held.begun == ["ann 0"])
        tasks.append(held.ask("ben", "ben"))
        tasks.append(held.ask("ben", "short", 5000))
        await until(lambda: len(held.begun) == 2)
        assert held.begun == ["ann 0", "short"]
        held.released.release(5)
        await asyncio.gather(*tasks)
        assert held.begun.index("ben") < held.begun.index("ann 2")

    asyncio.run(run())


def test_a_client_that_leaves_and_comes_back_has_one_text_in_work() -> None:
    async def run() -> None:
        held = Held()
        left = [held.ask("ann", f"left {n}") for n in range(2)]
        await until(lambda: held.begun == ["left 0"])
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        back = held.ask("ann", "back")
        for _ in range(20):
            await asyncio.sleep(0)
        assert held.begun == ["left 0"]
        held.released.release(2)
        assert await back == "back"
        assert held.begun == ["left 0", "back"]

    asyncio.run(run())


def test_a_pass_of_the_event_loop_encodes_one_short_text_and_users_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = served(LONG, TokenSize(1, False))
    passes, encoded = [0], list[tuple[int, str]]()

    def encode(_: ServedModel, text: str, *, special: bool = True) -> list[int]:
        encoded.append((passes[0], text))
        return []

    async def ask(user: str) -> None:
        current_user.set(user)
        for _ in range(3):
            await model.tokenize(user)

    async def run() -> None:
        tasks = [asyncio.create_task(ask(user)) for user in [*["ann"] * 20, "ben"]]
        while not all(task.done() for task in tasks):
            passes[0] += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(ServedModel, "encode", encode)
    asyncio.run(run())
    assert len({number for number, _ in encoded}) == len(encoded) == 63
    assert [text for _, text in encoded[:10]].count("ben") == 3


@pytest.mark.parametrize(("num_items", "on_loop"), [(MAX_LOOP_ITEMS, True), (4000, False)])
def test_a_long_conversation_is_prepared_outside_the_event_loop(
    num_items: int, on_loop: bool
) -> None:
    used = asyncio.run(Tokenization().prepare(num_items, threading.current_thread))
    assert (used is threading.current_thread()) == on_loop


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/chat/completions", {"content": [{"type": "text", "text": ""}] * 100}),
        ("/v1/messages", {"content": [{"type": "text", "text": ""}] * 100}),
        ("/v1/responses", {"content": [{"type": "text", "text": ""}] * 100}),
        ("/tokenize", {"content": [{"type": "text", "text": ""}] * 100}),
        ("/api/chat", {"content": "", "tool_calls": [{"function": {"name": "f"}}] * 100}),
    ],
)
def test_a_message_with_many_parts_is_translated_outside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, message: dict[str, Any]
) -> None:
    counted: list[int] = []

    class TranslatedError(Exception):
        """Ends the request."""

    async def prepare(self: Tokenization, num_items: int, work: object) -> None:
        counted.append(num_items)
        raise TranslatedError

    async def get(self: ModelTable, name: str = "") -> ServedModel:
        return served(100, TokenSize(7, False))

    monkeypatch.setattr(Tokenization, "prepare", prepare)
    monkeypatch.setattr(ModelTable, "get", get)
    ollama = importlib.import_module("tokenbus.clients.gateway.ollama.chat")
    monkeypatch.setattr(ollama, "served_name", get)
    messages = "input" if path == "/v1/responses" else "messages"
    body = {"model": "m", "max_tokens": 1, messages: [{"role": "user", **message}]}

    async def main() -> None:
        app = build(Settings(run_dir=str(tmp_path)), None)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                with pytest.raises(TranslatedError):
                    await http.post(path, json=body)

    asyncio.run(main())
    assert counted == [101]


def test_the_tools_and_parts_of_a_response_are_counted() -> None:
    tool = {"type": "function", "name": "f"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 5},
        {"type": "additional_tools", "tools": [tool] * 5},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}] * 5},
    ]
    namespace = {"type": "namespace", "name": "n", "description": "d", "tools": [tool] * 5}
    given = {"model": "m", "input": items, "tools": [namespace]}
    body = msgspec.convert(given, ResponsesRequest)
    question = ResponseQuestion(body, read_items(items, Ignored()), Ignored())
    # The tools of the item are counted with the item, and again with the tools of the request.
    assert question.num_items == 3 + 3 * 5 + 5 + 1 + 5


def test_a_long_conversation_does_not_wait_for_a_long_text() -> None:
    async def run() -> None:
        held = Held()
        text = held.ask("ann", "text")
        await until(lambda: held.begun == ["text"])
        assert await held.tokenization.prepare(MAX_LOOP_ITEMS + 1, lambda: "prepared") == "prepared"
        held.released.release()
        await text

    asyncio.run(run())


def test_many_small_schemas_are_prepared_in_several_passes_and_users_take_turns() -> None:
    """Each piece of work takes over 1 ms, so that two of them use up the time of a pass."""
    tokenization = Tokenization()
    passes = [0]
    done: list[tuple[str, int]] = []

    async def request(user: str, count: int) -> None:
        current_user.set(user)

        def work() -> None:
            time.sleep(0.6 * MAX_PREPARE_S)
            done.append((user, passes[0]))

        for _ in range(count):
            await tokenization.prepare(1, work)

    async def main() -> None:
        tasks = [asyncio.create_task(request("eve", 10)) for _ in range(5)]
        tasks.append(asyncio.create_task(request("ann", 3)))
        while not all(task.done() for task in tasks):
            passes[0] += 1
            await asyncio.sleep(0)

    asyncio.run(main())
    assert max(Counter(number for _, number in done).values()) <= 4
    assert [user for user, _ in done[:20]].count("ann") == 3
