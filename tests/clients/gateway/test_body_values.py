"""Decoding an HTTP body or a WebSocket line blocks the gateway's event loop for a bounded time."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tokenbus.clients.gateway.aici import completions as aici
from tokenbus.clients.gateway.bodies import leniency
from tokenbus.clients.gateway.bodies.leniency import Ignored
from tokenbus.clients.gateway.bodies.reading import (
    MAX_FREE_BYTES,
    Body,
    body_turn,
    decode_body,
    decode_in_turn,
)
from tokenbus.clients.gateway.bodies.value_counts import (
    MAX_CONTAINERS,
    MAX_STRINGS,
    MAX_VALUES,
    SMALL_BODY_BYTES,
    ValueCounts,
)
from tokenbus.clients.gateway.context import Gateway
from tokenbus.clients.gateway.conversation.parts import Call, Turn
from tokenbus.clients.gateway.conversation.rendering import for_template
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.openai.chat_bodies import ChatRequest
from tokenbus.clients.gateway.openai.response_bodies import ResponsesRequest
from tokenbus.clients.gateway.openai.response_jobs import ResponseJob
from tokenbus.clients.gateway.stored.background import BackgroundTask
from tokenbus.clients.gateway.stored.inputs import ResponseInput
from tokenbus.clients.gateway.users.turns import current_user
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.body_bounds import MAX_PLAIN_BODY_BYTES
from tokenbus.protocol.decoders import convert
from tokenbus.protocol.errors import RequestError, UnavailableError
from tokenbus.protocol.lines import line_frames
from tokenbus.protocol.messages import MAX_BODY_BYTES
from tokenbus.protocol.settings import Settings

MAX_BYTES = 1_000_000
ANY_TEXT = 'a "quoted" \\ text, [with] {marks}: \\" '


class AnyBody(Body):
    value: Any


class NumberedBody(Body):
    value: dict[int, float]


def read(value: Any) -> Any:
    return decode_body(json.dumps({"value": value}).encode(), AnyBody).value


@pytest.mark.parametrize(
    "value",
    [
        [{"role": "user", "content": ""}] * (MAX_STRINGS // 4),
        ["\\"] * MAX_STRINGS,
        ['"'] * MAX_STRINGS,
        [1] * MAX_VALUES,
        [[]] * MAX_CONTAINERS,
        [{}] * MAX_CONTAINERS,
    ],
    ids=["messages", "backslashes", "quotes", "numbers", "lists", "maps"],
)
def test_a_body_with_too_many_values_is_refused_before_it_is_decoded(value: Any) -> None:
    with pytest.raises(ApiError) as refused:
        read(value)
    assert (refused.value.status, refused.value.code) == (413, "too_large")


def test_an_error_of_a_key_names_the_field() -> None:
    with pytest.raises(ApiError) as refused:
        decode_body(b'{"value": {"a": 1}}', NumberedBody)
    assert (refused.value.param, refused.value.message) == (
        "value",
        "value: expected a whole number, not a text",
    )


def conversation(arguments: str, times: int = 1) -> list[Turn]:
    """A conversation in which the assistant has called a function ``times`` times."""
    return [Turn("assistant", [Call("1", "f", arguments)])] * times


@pytest.mark.parametrize(
    ("arguments", "times"),
    [
        (json.dumps({"a": [[]] * MAX_VALUES}), 1),
        (json.dumps({"a": [""] * MAX_VALUES}), 1),
        (json.dumps({"a": [[]] * (MAX_STRINGS // 4)}), 8),
    ],
    ids=["lists", "strings", "several calls"],
)
def test_arguments_with_too_many_values_are_refused_before_they_are_decoded(
    arguments: str, times: int
) -> None:
    assert read(arguments) == arguments
    with pytest.raises(ApiError) as refused:
        for_template(conversation(arguments, times))
    assert (refused.value.status, refused.value.code) == (413, "too_large")


def test_a_long_text_in_arguments_is_one_value() -> None:
    text = ANY_TEXT * (SMALL_BODY_BYTES // len(ANY_TEXT))
    [message] = for_template(conversation(json.dumps({"file": text})))
    assert message["tool_calls"][0]["function"]["arguments"] == {"file": text}


def test_a_long_text_is_one_value() -> None:
    text = ANY_TEXT * (MAX_BODY_BYTES // 2 // len(ANY_TEXT))
    assert read(text) == text


def test_many_values_fit() -> None:
    ids = list(range(MAX_VALUES // 2))
    assert len(json.dumps(ids)) > SMALL_BODY_BYTES
    assert read(ids) == ids


def test_many_lists_fit() -> None:
    lists = [[0] * 3] * (MAX_CONTAINERS - 2)
    assert len(json.dumps(lists)) > SMALL_BODY_BYTES
    assert read(lists) == lists


class NotedBody(Body):
    """A body whose decoding appends its user to ``decoded``."""

    user: str
    text: str
    decoded: ClassVar[list[str]] = []

    def __post_init__(self) -> None:
        self.decoded.append(self.user)


@pytest.mark.parametrize("size", [MAX_FREE_BYTES, SMALL_BODY_BYTES])
def test_one_large_body_is_decoded_in_a_pass_of_the_loop_and_users_take_turns(
    tmp_path: Path, size: int
) -> None:
    async def main() -> list[list[str]]:
        gateway = Gateway(Settings(run_dir=str(tmp_path)))

        async def decode(user: str) -> None:
            current_user.set(user)
            body = {"user": user, "text": "a" * size}
            await decode_in_turn(gateway, json.dumps(body).encode(), NotedBody, Ignored())

        NotedBody.decoded.clear()
        users = ["eve"] * 4 + ["ann"] * 2
        tasks = [asyncio.create_task(decode(user)) for user in users]
        passes = []
        while not all(task.done() for task in tasks):
            known = len(NotedBody.decoded)
            await asyncio.sleep(0)
            passes.append(NotedBody.decoded[known:])
        await gateway.close()
        return passes

    passes = asyncio.run(main())
    assert max(map(len, passes)) == 1
    assert [user for one in passes for user in one] == ["eve", "eve", "ann", "eve", "ann", "eve"]


def test_aici_s_field_is_looked_for_in_a_turn(tmp_path: Path) -> None:
    body = b'{"prompt": "%b", "aici_module": "m"}' % (b"a" * MAX_FREE_BYTES)

    async def main() -> None:
        gateway = Gateway(Settings(run_dir=str(tmp_path)))
        async with body_turn(gateway, body):
            handled = asyncio.create_task(aici.handles(gateway, body))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not handled.done()
        assert await handled
        await gateway.close()

    asyncio.run(main())


def test_a_line_with_a_long_hello_is_refused_before_it_is_decoded() -> None:
    names = json.dumps({"capabilities": ["a"] * MAX_PLAIN_BODY_BYTES})
    with pytest.raises(RequestError, match=f"{MAX_PLAIN_BODY_BYTES} are allowed"):
        line_frames(f"HELLO {names}")


def test_the_memory_of_decoded_values_counts_towards_the_share(tmp_path: Path) -> None:
    async def decoded() -> list[int]:
        gateway = Gateway(Settings(run_dir=str(tmp_path)))
        gateway.shares = UserShares(8, MAX_BYTES)
        counts = []
        values: list[object] = ["x" * MAX_BYTES, [[]] * 1000, ["xy"] * 1000]
        for value in values:
            body = json.dumps({"value": value}).encode()
            with gateway.shares.request():
                for count in range(100):
                    try:
                        await decode_in_turn(gateway, body, AnyBody)
                    except UnavailableError:
                        counts.append(count)
                        break
                else:
                    counts.append(100)
        await gateway.close()
        return counts

    # The text was counted when it was read. The user may have half of ``MAX_BYTES``.
    assert asyncio.run(decoded()) == [100, 6, 8]


def test_a_response_in_the_background_counts_its_decoded_body_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    input = [{"role": "user", "content": "x", "unknown": [[]] * 1000}]
    data = json.dumps({"model": "m", "input": input}).encode()
    size = len(data) + ValueCounts.of([data]).memory

    async def main() -> None:
        gateway = Gateway(Settings(run_dir=str(tmp_path)))
        # The user may have half of the bytes.
        gateway.shares = UserShares(8, 2 * size)
        begun = asyncio.Event()

        async def begin(*_: object) -> ResponseJob:
            begun.set()
            return await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(ResponseJob, "begin", begin)
        body = await decode_in_turn(gateway, data, ResponsesRequest, Ignored())
        given = ResponseInput.of(input, [], Ignored())
        task = BackgroundTask(gateway, "resp_1", data)
        # Only the task has counts, because no request is open.
        task.start(body, given, Ignored())
        await begun.wait()
        with gateway.shares.request(), pytest.raises(UnavailableError):
            gateway.shares.take_bytes(1)
        await gateway.stored.running.close()
        with gateway.shares.request():
            gateway.shares.take_bytes(size)
            second = BackgroundTask(gateway, "resp_2", data).start(body, given, Ignored())
            with pytest.raises(UnavailableError):
                await second
        await gateway.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "faulty",
    [
        b'{"model": "m", "messages": [%b{"role": 1}]}'
        % (b'{"role": "user", "content": ""},' * 1000),
        b'{"model": 1, "messages": [%b1]}' % (b"{}," * 10_000),
    ],
    ids=["last element", "other field"],
)
def test_the_fault_of_a_long_list_is_searched_on_a_thread(
    faulty: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def recorded(value: Any, kind: Any, **options: bool) -> Any:
        threads.append(threading.current_thread())
        return convert(value, kind, **options)

    monkeypatch.setattr(leniency, "convert", recorded)

    async def main() -> None:
        gateway = Gateway(Settings(run_dir=str(tmp_path)))
        with pytest.raises(ApiError):
            await decode_in_turn(gateway, faulty, ChatRequest, Ignored())
        await gateway.close()

    asyncio.run(main())
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    "text", ["a", "é", "ж", "漢", "😀", "a" * 30 + "😀", "ж😀", "a漢", "\\😀\n"]
)
@pytest.mark.parametrize("ascii", [True, False])
def test_the_memory_of_decoded_texts_is_counted(text: str, ascii: bool) -> None:
    value = {"value": [text * 100, "plain" * 100]}
    data = json.dumps(value, ensure_ascii=ascii).encode()
    memory = sum(map(sys.getsizeof, [*value, *value["value"]]))
    counted = len(data) + ValueCounts.of([data]).memory
    assert memory <= counted
    # The estimate is not much too large.
    assert counted <= max(1.5 * memory, len(data) + 1000)
