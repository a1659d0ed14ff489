"""The messages of a WebSocket count towards the memory share of its user, and arrive in a bounded
time."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest
import uvicorn
from starlette.websockets import WebSocket
from tokenbus.clients.gateway.connections import websocket_protocol
from tokenbus.clients.gateway.connections.memory import ByteShares
from tokenbus.clients.gateway.connections.message_memory import (
    BYTE_COST,
    SMALL_BYTES,
    MessageMemory,
)
from tokenbus.clients.gateway.connections.paced_transport import PacedTransport
from tokenbus.protocol.errors import UnavailableError

from .test_http_protocol import Transport
from .test_small_parts import UPGRADE, PausedTransport, web_socket

TEXT, CONTINUATION, LAST = 1, 0, 0x80


def shares_of(max_bytes: int) -> ByteShares:
    return ByteShares(max_bytes, "your messages")


def frame(size: int, kind: int = LAST | TEXT) -> bytes:
    """A frame with a payload of ``size`` spaces, masked with zeros."""
    return struct.pack(">BBQ", kind, 0xFF, size) + bytes(4) + b" " * size


class Served:
    """A WebSocket of the user "ann". Its application handles a message when the test lets it."""

    def __init__(self, shares: ByteShares) -> None:
        self._shares = shares
        self.transport = PausedTransport()
        self.may_begin, self.accepted = asyncio.Event(), asyncio.Event()
        self.may_handle = asyncio.Semaphore(0)
        self.handled = 0
        config = uvicorn.Config(self._app, interface="asgi3", ws_per_message_deflate=False)
        self.protocol = web_socket(config)
        self.protocol.connection_made(self.transport)
        self.protocol.data_received(UPGRADE)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        self.accepted.set()
        messages: MessageMemory = scope[MessageMemory.SCOPE_KEY]
        await self.may_begin.wait()
        try:
            messages.begin(self._shares, "ann")
            while (await socket.receive())["type"] == "websocket.receive":
                await self.may_handle.acquire()
                messages.handled()
                self.handled += 1
        finally:
            messages.ended()

    async def begin(self) -> None:
        """Waits until the application has set the user."""
        await self.accepted.wait()
        self.may_begin.set()
        await passes()

    async def receives(self, data: bytes) -> None:
        """Receives the data, unless the WebSocket is closed before."""
        self.protocol.data_received(data)
        while self.protocol._reading._rest and not self.protocol._reading.waits:
            await asyncio.sleep(0)
        await passes()

    async def end(self) -> None:
        self.protocol.connection_lost(None)
        for _ in range(8):
            self.may_handle.release()
        await passes()

    @property
    def close_code(self) -> int | None:
        sent = self.protocol.conn.close_sent
        return None if sent is None else int(sent.code)


async def passes() -> None:
    """Lets the application run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def left(shares: ByteShares) -> int:
    """Number of bytes that a user without requests may take."""
    return shares.free


@pytest.mark.anyio
async def test_an_incomplete_message_counts_until_it_is_handled() -> None:
    size = 4 * SMALL_BYTES
    shares = shares_of(100 * size)
    served = Served(shares)
    await served.begin()
    message = frame(size)
    await served.receives(message[:-1])
    assert shares.free == 100 * size - BYTE_COST * (size - 1)
    await served.receives(message[-1:])
    assert shares.free == (100 - BYTE_COST) * size
    served.may_handle.release()
    await passes()
    assert (served.handled, shares.free) == (1, 100 * size)
    await served.end()


@pytest.mark.anyio
async def test_fragments_count() -> None:
    shares = shares_of(100 * SMALL_BYTES)
    served = Served(shares)
    await served.begin()
    await served.receives(frame(SMALL_BYTES, TEXT) + frame(SMALL_BYTES, CONTINUATION))
    assert shares.free == (100 - 2 * BYTE_COST) * SMALL_BYTES
    await served.end()
    assert shares.free == 100 * SMALL_BYTES


@pytest.mark.anyio
async def test_small_messages_do_not_count() -> None:
    shares = shares_of(1)
    served = Served(shares)
    await served.begin()
    await served.receives(frame(SMALL_BYTES))
    assert (shares.free, served.close_code) == (1, None)
    await served.end()


@pytest.mark.anyio
async def test_the_messages_of_all_websockets_of_a_user_have_one_share() -> None:
    size = 2 * SMALL_BYTES
    # One message leaves less than what two messages need.
    shares = shares_of(3 * BYTE_COST * size)
    first, second = Served(shares), Served(shares)
    for served in (first, second):
        await served.begin()
    await first.receives(frame(size)[:-1])
    await second.receives(frame(size)[:-1])
    assert (first.close_code, second.close_code) == (None, 1013)
    # The closed WebSocket holds no message any more.
    assert not second.protocol.conn.reader.buffer
    for served in (first, second):
        await served.end()
    assert shares.free == 3 * BYTE_COST * size


@pytest.mark.anyio
async def test_a_message_counts_while_it_is_handled_after_the_connection() -> None:
    size = 2 * SMALL_BYTES
    shares = shares_of(100 * size)
    served = Served(shares)
    await served.begin()
    await served.receives(frame(size))
    served.protocol.connection_lost(None)
    await passes()
    assert shares.free == (100 - BYTE_COST) * size
    served.may_handle.release()
    await passes()
    assert shares.free == 100 * size


@pytest.mark.anyio
async def test_before_the_user_is_known_only_little_is_read() -> None:
    shares = shares_of(100 * SMALL_BYTES)
    served = Served(shares)
    await served.accepted.wait()
    message = frame(4 * SMALL_BYTES)
    await served.receives(message)
    assert len(served.protocol.conn.reader.buffer) <= 2 * SMALL_BYTES
    assert not served.transport.reading
    await served.begin()
    served.may_handle.release()
    while not served.handled:
        await asyncio.sleep(0)
    assert served.transport.reading
    await served.end()


@pytest.mark.anyio
@pytest.mark.parametrize("part", [frame(100)[:-1], frame(0, TEXT), b"\x89"])
async def test_a_message_without_its_rest_closes_the_websocket(
    monkeypatch: pytest.MonkeyPatch, part: bytes
) -> None:
    monkeypatch.setattr(websocket_protocol, "MESSAGE_S", 0.01)
    served = Served(shares_of(10**9))
    await served.begin()
    await served.receives(part)
    await served.transport.ended()
    assert served.close_code == 1008
    await served.end()


@pytest.mark.anyio
async def test_a_long_message_has_more_time_and_a_complete_one_has_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_protocol, "MESSAGE_S", 0.01)
    shares = shares_of(10**9)
    late, long, complete, ping = [Served(shares) for _ in range(4)]
    for served in (late, long, complete, ping):
        await served.begin()
    await long.receives(frame(400_000)[:-1])
    await complete.receives(frame(100)[:-1])
    await complete.receives(frame(100)[-1:])
    await ping.receives(b"\x89")
    await ping.receives(b"\x80\0\0\0\0")
    await late.receives(frame(100)[:-1])
    await late.transport.ended()
    assert [served.close_code for served in (long, complete, ping)] == [None] * 3
    for served in (late, long, complete, ping):
        await served.end()


def test_a_user_beyond_its_share_is_refused_and_loses_nothing() -> None:
    shares = shares_of(10 * BYTE_COST * SMALL_BYTES)
    messages = MessageMemory(lambda: None)
    messages.begin(shares, "ann")
    messages.arrived(4 * SMALL_BYTES)
    messages.hold(0)
    messages.arrived(3 * SMALL_BYTES)
    with pytest.raises(UnavailableError):
        messages.hold(0)
    messages.handled()
    messages.hold(0)
    messages.ended()
    assert shares.free == 10 * BYTE_COST * SMALL_BYTES


@pytest.mark.anyio
async def test_parsed_data_is_not_kept() -> None:
    data = b" " * 5000
    parsed: list[int] = []
    counted: list[int] = []
    transport = PacedTransport(
        Transport(),
        asyncio.get_running_loop(),
        lambda piece: parsed.append(len(piece)),
        lambda: False,
        counted.append,
    )
    transport.received(data)
    while sum(parsed) < len(data):
        await asyncio.sleep(0)
    assert transport._rest.obj == b""
    assert counted[-1] == 0
