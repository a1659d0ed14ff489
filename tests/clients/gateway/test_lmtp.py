"""Behaviour of LMTP over WebSocket that the other transports do not share."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenbus.clients import Client
from tokenbus.protocol.columns import TokenColumns, column_entries
from tokenbus.protocol.messages import Token
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from ...processes import Bus, Gateway, until
from ...websocket import connect, connect_async

pytestmark = pytest.mark.process

WAIT_S = 120.0
LONG: dict[str, Any] = {"prompt": [263, 305], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def socket(gateway: Gateway) -> Iterator[ClientConnection]:
    """A WebSocket whose client has not sent HELLO."""
    with connect(gateway.ws_url, max_size=None) as socket:
        yield socket


def send(socket: ClientConnection, kind: str, **body: Any) -> None:
    socket.send(f"{kind} {json.dumps(body)}")


def receive(socket: ClientConnection) -> tuple[str, Any]:
    message = socket.recv(WAIT_S)
    assert isinstance(message, str)
    kind, _, body = message.partition(" ")
    return kind, json.loads(body)


def test_without_hello_answers_are_lists_and_errors_are_entries(socket: ClientConnection) -> None:
    send(socket, "MODEL_INFO", stream_id=1)
    kind, [answer] = receive(socket)
    assert (kind, answer["stream_id"], answer["model_info"]["name"]) == ("MSG", 1, "embedded")
    send(socket, "MODEL_INFO", stream_id=2, model="unknown")
    kind, [answer] = receive(socket)
    assert (kind, answer["stream_id"], answer["code"]) == ("MSG", 2, "unknown_model")
    send(socket, "GENERATE", stream_id=3, prompt=[1], max_tokens=0)
    kind, [entry] = receive(socket)
    assert (kind, entry["stream_id"], entry["finish_reason"]) == ("TOKEN", 3, "error")
    assert (entry["code"], entry["token"]) == ("invalid_field", None)
    socket.send("GENERATE {")
    kind, error = receive(socket)
    assert (kind, error["code"], error["type"]) == ("ERROR", "bad_message", "GENERATE")


@pytest.mark.parametrize("hello", [None, {}, {"capabilities": ["ping"]}])
def test_a_user_of_a_gateway_is_not_the_operator(
    socket: ClientConnection, steered: Bus, hello: dict[str, Any] | None
) -> None:
    """A WebSocket may neither drain a worker nor see the streams of others."""
    if hello is not None:
        send(socket, "HELLO", **hello)
        assert receive(socket)[0] == "WELCOME"
    with steered.client() as client, client.generate("x", max_tokens=900, n=64) as stream:
        next(stream)
        send(socket, "STATUS", stream_id=1, streams=True, own=False)
        kind, answer = receive(socket)
        [answer] = answer if hello is None else [answer]
        assert kind == "MSG"
        assert answer["status"]["streams"] >= 1
        assert answer["status"].get("live", []) == []
        assert client.status(streams=True).live
        [worker] = [w for w in answer["status"]["workers"] if w["role"] == "gpu"]
        send(socket, "DRAIN", stream_id=2, worker=worker["name"])
        kind, answer = receive(socket)
        [answer] = answer if hello is None else [answer]
        assert (kind, answer["code"]) == ("TOKEN" if hello is None else "ERROR", "not_allowed")
        assert answer["stream_id"] == 2
        assert worker["name"] in [w.name for w in client.status().workers if w.state == "ready"]


def test_after_hello_messages_are_the_protocol_s_own(socket: ClientConnection) -> None:
    send(socket, "HELLO", encodings=["msgpack", "json"], client="test")
    kind, welcome = receive(socket)
    assert (kind, welcome["encoding"]) == ("WELCOME", "json")
    send(socket, "MODEL_INFO", stream_id=1)
    assert receive(socket)[1]["stream_id"] == 1
    send(socket, "GENERATE", stream_id=3, prompt=[1], max_tokens=0)
    kind, error = receive(socket)
    assert (kind, error["path"]) == ("ERROR", "$.max_tokens")


def test_a_client_that_asks_for_columns_gets_them_in_binary_messages(
    gateway: Gateway, socket: ClientConnection
) -> None:
    send(socket, "HELLO", encodings=["msgpack", "json"], capabilities=["columns"])
    kind, welcome = receive_binary(socket)
    assert (kind, welcome["encoding"]) == ("WELCOME", "msgpack")
    assert "columns" in welcome["capabilities"]
    request: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    send(socket, "GENERATE", stream_id=1, prompt=[263, 305], **request)
    bodies = list(token_bodies(socket))
    assert any(isinstance(body, dict) and body.get("s") for body in bodies)
    columns = [entry for body in bodies for entry in entries_of(body)]
    with connect(gateway.ws_url) as other:
        send(other, "GENERATE", stream_id=1, prompt=[263, 305], **request)
        entries: list[Any] = []
        while not (entries and entries[-1]["finish_reason"]):
            entries += receive(other)[1]
    assert [entry.token for entry in columns] == [entry["token"] for entry in entries]
    logprobs = [entry["logprob"] for entry in entries]
    assert [entry.logprob for entry in columns] == pytest.approx(logprobs, abs=1e-3)
    send(socket, "GENERATE", stream_id=2, prompt=[1], max_tokens=0)
    kind, error = receive_binary(socket)
    assert (kind, error["path"]) == ("ERROR", "$.max_tokens")
    socket.send(b"PING {}")
    assert receive(socket)[0] == "ERROR"  # The gateway itself sends this error, as text.
    send(socket, "PING", n=3)
    assert receive_binary(socket) == ("PONG", {"n": 3})


def receive_binary(socket: ClientConnection) -> tuple[str, Any]:
    """The type and the body of a binary message."""
    message = socket.recv(WAIT_S)
    assert isinstance(message, bytes)
    kind, _, body = message.partition(b" ")
    return kind.decode(), msgspec.msgpack.decode(body, strict=False)


def token_bodies(socket: ClientConnection) -> Iterator[Any]:
    """The bodies of all TOKEN messages until the only stream ends."""
    while True:
        kind, body = receive_binary(socket)
        assert kind == "TOKEN"
        yield body
        if any(entry.finish_reason for entry in entries_of(body)):
            return


def entries_of(body: Any) -> list[Token]:
    tokens: Any = msgspec.convert(body, TokenColumns if isinstance(body, dict) else list[Token])
    return column_entries(tokens) if isinstance(tokens, TokenColumns) else tokens


def test_a_binary_message_is_refused_and_the_next_one_is_served(socket: ClientConnection) -> None:
    socket.send(b"GENERATE {}")
    kind, error = receive(socket)
    assert (kind, error["code"]) == ("ERROR", "bad_message")
    send(socket, "MODEL_INFO", stream_id=1)
    assert receive(socket)[0] == "MSG"


def test_a_message_that_is_too_large_is_answered_or_ends_the_connection(
    socket: ClientConnection,
) -> None:
    send(socket, "GENERATE", stream_id=1, prompt="x" * (17 * 1024 * 1024))
    kind, error = receive(socket)
    assert (kind, error["code"]) == ("ERROR", "too_large")
    # This is the header of a text message of 25 MiB. It is refused before its contents are sent.
    socket.socket.sendall(struct.pack("!BBQ4x", 0x81, 0x80 | 127, 25 * 1024 * 1024))
    with pytest.raises(ConnectionClosed) as closed:
        socket.recv(WAIT_S)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


def test_a_websocket_that_closes_cancels_its_streams(gateway: Gateway, steered: Bus) -> None:
    with steered.client() as client:
        before = client.status().counters["token_bodies"]
        with connect(gateway.ws_url) as socket:
            # To generate this number of sequences to their ends would take long.
            send(socket, "GENERATE", stream_id=1, **LONG, n=64, temperature=1.0)
            receive(socket)
        until(lambda: not working(client), WAIT_S, "the end of the WebSocket's streams")
        assert client.status().counters["token_bodies"] - before < LONG["max_tokens"]


def working(client: Client) -> bool:
    """Whether the broker has streams, or a GPU worker has requests."""
    status = client.status()
    return bool(status.streams or any(w.requests for w in status.workers if w.role == "gpu"))


def test_many_websockets_that_open_and_vanish_leave_nothing_behind(
    gateway: Gateway, steered: Bus
) -> None:
    with steered.client() as client, connect(gateway.ws_url) as first:
        # After this answer, the gateway has opened everything that it keeps open for WebSockets.
        send(first, "MODEL_INFO", stream_id=1)
        receive(first)
        sessions, descriptors = client.status().sessions, open_files(gateway)
        asyncio.run(_open_and_vanish(gateway.ws_url, 500))

        def as_before() -> bool:
            return (
                # The gateway's own session may have begun after the count.
                client.status().sessions <= sessions + 1
                and open_files(gateway) <= descriptors
                and not working(client)
            )

        until(as_before, WAIT_S, "the end of sessions and streams")
        send(first, "MODEL_INFO", stream_id=2)
        assert receive(first)[0] == "MSG"
        assert "Traceback" not in gateway.process.log


async def _open_and_vanish(url: str, number: int) -> None:
    at_once = asyncio.Semaphore(50)

    async def one(index: int) -> None:
        async with at_once:
            socket = await connect_async(url)
            if index % 4 == 1:
                await socket.send(f"GENERATE {json.dumps({'stream_id': 1, **LONG})}")
            elif index % 4 == 2:
                await socket.send('HELLO {"client": "vanishes"}')
            elif index % 4 == 3:
                await socket.send('MODEL_INFO {"stream_id": 1}')
                await socket.recv()
            socket.transport.abort()

    await asyncio.gather(*(one(index) for index in range(number)))


def open_files(gateway: Gateway) -> int:
    return len(os.listdir(f"/proc/{gateway.process.pid}/fd"))


def test_a_slow_reader_neither_grows_the_gateway_nor_slows_others(
    gateway: Gateway, steered: Bus, socket: ClientConnection
) -> None:
    send(socket, "HELLO", client="fast")
    receive(socket)
    with connect(gateway.ws_url, max_queue=1, max_size=None) as slow:
        memory = resident_bytes(gateway)
        with steered.client() as client:
            for number in range(12_000):
                send(slow, "STATUS", stream_id=number)
                if number % 3000 == 0:
                    while not generates(socket, number):
                        pass
            assert client.status().workers
        # The answers have 15 MB. Unread answers wait at the broker, up to its bound.
        assert resident_bytes(gateway) - memory < 8 * 1024 * 1024
        send(slow, "PING", n=7)
        while True:
            kind, body = receive(slow)
            if kind == "PONG":
                break
        assert body["n"] == 7


def generates(socket: ClientConnection, stream_id: int) -> bool:
    """Generates two tokens. Returns False if the user of both connections has too many open
    streams."""
    send(socket, "GENERATE", stream_id=stream_id, prompt=[263], max_tokens=2)
    while True:
        kind, body = receive(socket)
        if kind == "ERROR":
            assert body["code"] == "client_limit"
            return False
        if body[-1]["finish_reason"] is not None:
            return True


def resident_bytes(gateway: Gateway) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return 1024 * int(line.split()[1])


def test_a_restart_of_the_broker_ends_the_websockets_that_it_knew(processes: None) -> None:
    with Bus(ping_s=0.2) as bus:
        gateway = bus.start_gateway()
        with connect(gateway.ws_url) as socket, connect(gateway.ws_url) as unused:
            send(socket, "HELLO")
            assert receive(socket)[0] == "WELCOME"
            bus.broker.kill()
            bus.start_broker()
            kind, error = receive(socket)
            assert (kind, error["code"]) == ("ERROR", "connection_lost")
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(WAIT_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1012
            send(unused, "HELLO")
            assert receive(unused)[0] == "WELCOME"
