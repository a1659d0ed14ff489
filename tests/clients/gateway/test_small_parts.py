"""Connections that send many small requests, headers, chunks or frames at once."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from tokenbus.clients.gateway.connections import paced_transport
from tokenbus.clients.gateway.connections.connection_memory import ConnectionMemory, early_shares
from tokenbus.clients.gateway.connections.http_protocol import BoundedHttp
from tokenbus.clients.gateway.connections.paced_transport import PIECE_BYTES, PacedTransport
from tokenbus.clients.gateway.connections.websocket_protocol import (
    MAX_CONTROL_FRAMES,
    MAX_FRAGMENTS,
    MIN_FRAGMENT_BYTES,
    BoundedWebSocket,
)
from uvicorn.server import ServerState
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection

from ...processes import Gateway
from ...websocket import connect
from .test_http_protocol import Transport

REQUEST = b"GET /%d HTTP/1.1\r\nhost: localhost\r\n\r\n"
NUMBERED = b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-request-id: number-%d\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
PING = b"\x89\x80\0\0\0\0"
EMPTY_FRAGMENT = b"\x00\x80\0\0\0\0"


def connection_to(gateway: Gateway) -> socket.socket:
    address = urlsplit(gateway.url)
    return socket.create_connection((address.hostname, address.port), timeout=300.0)


# --- requests -----------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(gateway: Gateway) -> None:
    with connection_to(gateway) as connection:
        connection.sendall(b"".join(NUMBERED % i for i in range(200)))
        received = b""
        while b"number-199" not in received:
            part = connection.recv(65_536)
            assert part, received[-500:]
            received += part
    assert [int(number) for number in re.findall(rb"number-(\d+)", received)] == list(range(200))


@pytest.mark.anyio
async def test_while_a_request_waits_for_earlier_answers_nothing_more_is_read() -> None:
    waiting: list[int] = []
    started, answered, may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()
    protocols: list[BoundedHttp] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        waiting.append(len(protocols[0].pipeline))
        started.set()
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})
        if scope["path"] == "/999":
            answered.set()

    def protocol() -> BoundedHttp:
        protocols.append(BoundedHttp(uvicorn.Config(app), ServerState(), {}))
        return protocols[0]

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    async with server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(b"".join(REQUEST % i for i in range(1000)))
        await started.wait()
        assert not protocols[0].transport.is_reading()
        may_answer.set()
        await asyncio.wait_for(answered.wait(), 300.0)
        assert len(waiting) == 1000
        assert 0 < max(waiting) <= PIECE_BYTES // len(REQUEST)
        assert protocols[0].transport.is_reading()
        writer.close()


def test_many_empty_headers_are_refused(gateway: Gateway) -> None:
    with connection_to(gateway) as connection:
        connection.sendall(b"GET /live HTTP/1.1\r\n" + b"a:\r\n" * 250 + b"\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"live"}'):
            answer += connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GET /live HTTP/1.1\r\n" + b"a:\r\n" * 256 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 431 ")


# --- pieces -------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_connections_take_turns_to_be_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_transport, "PARSE_S", 0.0)
    loop = asyncio.get_running_loop()
    parsed: list[str] = []
    done = asyncio.Event()

    def connection(name: str) -> PacedTransport:
        def parse(data: bytes) -> None:
            parsed.append(name)
            if len(parsed) == 20:
                done.set()

        return PacedTransport(Transport(), loop, parse, lambda: False, lambda size: None)

    for one in (connection("a"), connection("b")):
        one.received(b" " * 10 * PIECE_BYTES)
    await done.wait()
    assert parsed == ["a", "b"] * 10


@pytest.mark.anyio
async def test_a_body_of_many_chunks_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced_transport, "PARSE_S", 0.0)
    bodies: asyncio.Queue[bytes] = asyncio.Queue()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        bodies.put_nowait(body)

    protocol = BoundedHttp(uvicorn.Config(app), ServerState(), {})
    protocol.connection_made(Transport())
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    numbers = b"".join(b"%05d" % i for i in range(20_000))
    chunks = b"".join(b"5\r\n%05d\r\n" % i for i in range(20_000))
    protocol.data_received(head + chunks + b"0\r\n\r\n")
    assert await bodies.get() == numbers
    protocol.connection_lost(None)


# --- WebSockets ---------------------------------------------------------------------------------


def closing_of(socket: ClientConnection) -> tuple[int, str]:
    """The code and the reason with which the gateway closes a WebSocket."""
    with pytest.raises(ConnectionClosedError) as closed:
        socket.recv(timeout=300.0)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_flood_of_pings_is_closed_and_others_are_answered(gateway: Gateway) -> None:
    with connect(gateway.ws_url) as flooding, connect(gateway.ws_url) as other:
        flooding.socket.sendall(PING * (MAX_CONTROL_FRAMES + 1))
        code, reason = closing_of(flooding)
        assert (code, reason) == (1008, "more than 64 pings and pongs in a second; send fewer")
        assert other.ping().wait(300.0)
        assert httpx.get(f"{gateway.url}/live", timeout=300.0).status_code == 200


@pytest.mark.parametrize(
    "middle",
    # The WebSocket library adds an empty last fragment.
    [[" "] * (MAX_FRAGMENTS - 3), [" " * 2 * MIN_FRAGMENT_BYTES] * (2 * MAX_FRAGMENTS)],
)
def test_a_message_of_many_fragments_is_answered(gateway: Gateway, middle: list[str]) -> None:
    with connect(gateway.ws_url) as socket:
        request = 'GENERATE {"stream_id": 1, "model": "embedded", "max_tokens": 1, "prompt": "'
        socket.send(iter([request, *middle, '"}']))
        answer = socket.recv(timeout=300.0)
    assert isinstance(answer, str)
    assert answer.startswith("TOKEN "), answer


def test_a_message_of_more_small_fragments_is_closed(gateway: Gateway) -> None:
    with connect(gateway.ws_url) as socket:
        socket.socket.sendall(b"\x01\x80\0\0\0\0" + EMPTY_FRAGMENT * MAX_FRAGMENTS)
        code, reason = closing_of(socket)
        assert (code, reason) == (
            1008,
            "more than 1024 fragments of a message; send fragments of at least 1024 bytes",
        )


def web_socket(config: uvicorn.Config) -> BoundedWebSocket:
    """The protocol of a WebSocket whose connection counts towards no other connection's share."""
    memory = ConnectionMemory(early_shares(), "")
    return BoundedWebSocket(config, ServerState(), {}, memory=memory)


class PausedTransport(Transport):
    """A transport that also records whether reading is paused."""

    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


@pytest.mark.anyio
async def test_while_pongs_are_unread_no_more_pings_are_read() -> None:
    accepted = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        accepted.set()
        await receive()

    transport = PausedTransport()
    protocol = web_socket(uvicorn.Config(app))
    protocol.connection_made(transport)
    protocol.data_received(UPGRADE)
    await accepted.wait()
    protocol.pause_writing()
    assert not transport.reading
    answer = transport.written
    protocol.data_received(PING)
    assert transport.written == answer
    protocol.resume_writing()
    await asyncio.sleep(0)
    assert transport.written == answer + b"\x8a\x00"
    assert transport.reading
    protocol.connection_lost(None)
