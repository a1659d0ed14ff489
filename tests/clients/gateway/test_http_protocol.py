"""The gateway closes connections that send without an end, send too slowly or do not read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from tokenbus.clients.gateway.connections import http_protocol, paced_transport, unread_transport
from tokenbus.clients.gateway.connections.connection_memory import ORDINARY_BYTES, early_shares
from tokenbus.clients.gateway.connections.http_protocol import BoundedHttp
from tokenbus.clients.gateway.connections.idle_connections import IdleConnections
from uvicorn.server import ServerState

from ...processes import Gateway

HALF_A_REQUEST = b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-long: "
TRAILERS = (
    b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-long: "
)


@pytest.mark.parametrize(
    ("head", "endless"),
    [
        (b"GET /", b"x"),
        (HALF_A_REQUEST, b"x"),
        (HALF_A_REQUEST, b"x\r\nx-more: "),
        (TRAILERS, b"x"),
        (TRAILERS, b"x\r\nx-more: "),
    ],
)
def test_headers_without_an_end_close_the_connection(
    gateway: Gateway, head: bytes, endless: bytes
) -> None:
    address = urlsplit(gateway.url)
    answer = b""
    # The answer is lost if the gateway closes the connection before it has read all data, because
    # the kernel then resets the connection.
    with (
        socket.create_connection((address.hostname, address.port), timeout=300.0) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(head)
        connection.sendall(endless * 600_000)
        while part := connection.recv(4096):
            answer += part
    if answer:
        assert answer.split(b" ")[1] in (b"400", b"431")


class Transport(asyncio.Transport):
    """A transport that keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.unread = 0
        """Number of written bytes that the client has not read."""
        self.closed = asyncio.Event()
        self.aborted = asyncio.Event()

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data
        self.writes += 1

    def close(self) -> None:
        self.closed.set()

    def abort(self) -> None:
        self.aborted.set()
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unread

    async def ended(self) -> None:
        """Waits until the transport is closed."""
        await asyncio.wait_for(self.closed.wait(), 60.0)


async def _reads(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the body of a request to its end."""
    while (await receive()).get("more_body"):
        pass


async def _reads_nothing(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.get_running_loop().create_future()


def connected(app: Any = _reads) -> tuple[BoundedHttp, Transport]:
    """The protocol and the transport of a connection that has just been opened."""
    transport = Transport()
    protocol = BoundedHttp(uvicorn.Config(app), ServerState(), {})
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.anyio
async def test_a_head_is_written_with_the_first_part_or_alone_if_that_part_comes_later() -> None:
    later = asyncio.Event()

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/later":
            await later.wait()
        await send({"type": "http.response.body", "body": b"whole"})

    protocol, transport = connected(answers)
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while b"whole" not in transport.written:
        await asyncio.sleep(0)
    assert transport.writes == 1
    protocol, transport = connected(answers)
    protocol.data_received(b"GET /later HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while not transport.written.endswith(b"\r\n\r\n"):
        await asyncio.sleep(0)
    assert transport.writes == 1
    later.set()
    while b"whole" not in transport.written:
        await asyncio.sleep(0)
    assert transport.writes == 2


@pytest.mark.anyio
async def test_headers_that_take_too_long_are_answered_by_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)
    protocol, transport = connected()
    protocol.data_received(HALF_A_REQUEST)
    await transport.ended()
    assert transport.written.startswith(b"HTTP/1.1 408 ")


@pytest.mark.anyio
async def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)
    _, transport = connected()
    await transport.ended()
    assert transport.written.startswith(b"HTTP/1.1 408 ")


async def _answers(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"whole"})


@pytest.mark.anyio
async def test_line_breaks_between_requests_do_not_keep_a_connection_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)
    protocol, transport = connected(_answers)
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while b"whole" not in transport.written:
        await asyncio.sleep(0)
    assert not transport.is_closing()
    protocol.data_received(b"\r\n")
    await transport.ended()
    assert b"HTTP/1.1 408 " in transport.written


HALF_A_BODY = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4000\r\n\r\n{"


@pytest.mark.anyio
async def test_a_body_that_takes_too_long_is_answered_by_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_S", 0.01)
    protocol, transport = connected()
    protocol.data_received(HALF_A_BODY)
    await transport.ended()
    assert transport.written.startswith(b"HTTP/1.1 408 ")


@pytest.mark.anyio
async def test_a_long_body_has_more_time_and_one_that_nobody_reads_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "BODY_S", 0.01)
    # The long body has minutes, so its time does not end with that of the late one on a busy
    # machine.
    monkeypatch.setattr(http_protocol, "BODY_BYTES_S", 10)
    late, closed = connected()
    late.data_received(HALF_A_BODY)
    long, open_1 = connected()
    long.data_received(HALF_A_BODY + b" " * 2000)
    waiting, open_2 = connected(_reads_nothing)
    waiting.data_received(HALF_A_BODY.replace(b"4000", b"400000") + b" " * 70_000)
    whole, open_3 = connected(_reads_nothing)
    whole.data_received(HALF_A_BODY.replace(b"4000", b"1"))
    await closed.ended()
    assert [t.written for t in (open_1, open_2, open_3) if t.is_closing()] == []
    for protocol in (long, waiting, whole):
        protocol.connection_lost(None)


@pytest.mark.anyio
async def test_an_answer_of_which_nothing_is_read_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unread_transport, "UNREAD_S", 0.01)
    protocol, transport = connected(_reads_nothing)
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    slow, read = connected(_reads_nothing)
    slow.pause_writing()
    slow.resume_writing()
    protocol.pause_writing()
    await transport.ended()
    assert transport.aborted.is_set()
    assert not read.is_closing()
    for connection in (protocol, slow):
        connection.connection_lost(None)


# --- all connections of a process ---------------------------------------------------------------


def of_one_process(**attributes: Any) -> Callable[[], tuple[BoundedHttp, Transport]]:
    """Opens connections of one process, whose protocol class has these attributes."""
    kind: Any = type("OneProcess", (BoundedHttp,), attributes)
    config, state = uvicorn.Config(_answers), ServerState()

    def opened() -> tuple[BoundedHttp, Transport]:
        protocol, transport = kind(config, state, {}), Transport()
        protocol.connection_made(transport)
        return protocol, transport

    return opened


@pytest.mark.anyio
async def test_a_new_connection_replaces_the_one_that_is_idle_for_the_longest_time() -> None:
    opened = of_one_process(max_connections=2, idle=IdleConnections())
    first, first_end = opened()
    second, second_end = opened()
    first.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while b"whole" not in first_end.written:
        await asyncio.sleep(0)
    second.data_received(b"G")
    third, third_end = opened()
    assert (first_end.is_closing(), second_end.aborted.is_set()) == (False, True)
    # The end of the second connection has not been reported yet. It does not count any more.
    fourth, fourth_end = opened()
    assert first_end.aborted.is_set()
    assert (third_end.is_closing(), fourth_end.is_closing()) == (False, False)
    assert fourth.app is fourth.config.loaded_app
    for connection in (first, second, third, fourth):
        connection.connection_lost(None)
    assert not fourth.idle.aborted


@pytest.mark.anyio
async def test_large_heads_share_a_bound_and_ordinary_ones_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Otherwise, a slow machine does not parse a head in one turn. The rest, and the parsed part, of
    # the head would both be counted.
    monkeypatch.setattr(paced_transport, "PARSE_S", 300.0)
    opened = of_one_process(early=early_shares(2 * ORDINARY_BYTES))
    large = b"GET / HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"x" * 2 * ORDINARY_BYTES
    first, first_end = opened()
    first.data_received(large[:-1000])
    second, second_end = opened()
    second.data_received(large)
    assert second_end.written.startswith(b"HTTP/1.1 503 ")
    ordinary, ordinary_end = opened()
    ordinary.data_received(large[:ORDINARY_BYTES])
    assert (first_end.is_closing(), ordinary_end.is_closing()) == (False, False)
    first.connection_lost(None)
    second.connection_lost(None)
    third, third_end = opened()
    third.data_received(large[:-1000])
    assert not third_end.is_closing()
    for connection in (ordinary, third):
        connection.connection_lost(None)
