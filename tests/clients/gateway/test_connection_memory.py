"""The memory of each connection counts towards its user's share, and before towards its address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from tokenbus.clients.gateway.connections.connection_memory import (
    MAX_EARLY_BYTES,
    ORDINARY_BYTES,
    ConnectionMemory,
    Part,
    early_shares,
)
from tokenbus.clients.gateway.connections.connection_shares import (
    ConnectionShares,
    CountConnections,
)
from tokenbus.clients.gateway.connections.http_protocol import BoundedHttp
from tokenbus.clients.gateway.connections.memory import ByteShares
from tokenbus.clients.gateway.connections.websocket_protocol import BoundedWebSocket
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.errors import UnavailableError
from uvicorn.server import ServerState

from .test_message_memory import frame
from .test_small_parts import PausedTransport

MAX_BYTES = 4_000_000
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10000000\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
RECEIVED_BYTES = 256 * 1024
"""Number of bytes that uvloop delivers at once."""


class Switching(PausedTransport):
    """A transport that switches to the protocol of a WebSocket."""

    protocol: Any

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class Process:
    """The connections of one process. Their application sets the user "ann" and then waits."""

    def __init__(self, max_early: int = MAX_BYTES, app: Callable[..., Any] | None = None) -> None:
        self.early, self.users = early_shares(max_early), ByteShares(MAX_BYTES, "your requests")
        self._max_early = max_early
        self.knows = True
        """Whether the application sets the user."""
        self._config = uvicorn.Config(app or self._app, interface="asgi3", ws=BoundedWebSocket)
        self._config.load()
        self._kind: Any = type("OfProcess", (BoundedHttp,), {"early": self.early})

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if self.knows:
            memory: ConnectionMemory = scope[ConnectionMemory.SCOPE_KEY]
            memory.known(self.users, "ann")
        await asyncio.get_running_loop().create_future()

    def connected(self) -> Switching:
        transport = Switching()
        transport.protocol = self._kind(self._config, ServerState(), {})
        transport.protocol.connection_made(transport)
        return transport

    @property
    def counted(self) -> tuple[int, int]:
        """The bytes that count towards addresses, and the bytes that count towards users."""
        return self._max_early - self.early.free, MAX_BYTES - self.users.free


async def passes() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.anyio
async def test_unparsed_data_of_a_paused_connection_counts_towards_its_user() -> None:
    process = Process()
    connection = process.connected()
    # The application does not read the body.
    connection.protocol.data_received(POST + bytes(RECEIVED_BYTES))
    await passes()
    assert not connection.reading
    early, of_user = process.counted
    assert early == 0
    assert RECEIVED_BYTES - ORDINARY_BYTES < of_user < RECEIVED_BYTES + 1000
    connection.protocol.connection_lost(None)
    assert process.counted == (0, 0)


@pytest.mark.anyio
async def test_unparsed_data_of_unknown_users_has_a_bound() -> None:
    process = Process(max_early=2 * RECEIVED_BYTES)
    process.knows = False
    connections = [process.connected() for _ in range(4)]
    for connection in connections:
        connection.protocol.data_received(POST + bytes(RECEIVED_BYTES))
        await passes()
    closing = [connection.is_closing() for connection in connections]
    # All connections have one address, which may have half of the bytes.
    assert closing == [False, True, True, True]
    for connection in connections:
        connection.protocol.connection_lost(None)
    assert process.counted == (0, 0)


@pytest.mark.anyio
async def test_a_closing_connection_drops_its_unparsed_data_and_does_not_count_it() -> None:
    process = Process()
    connection = process.connected()
    connection.protocol.data_received(POST + bytes(RECEIVED_BYTES))
    await passes()
    connection.protocol.transport.close()
    connection.protocol._reading.proceed()
    assert process.counted == (0, 0)
    connection.protocol.connection_lost(None)


@pytest.mark.anyio
async def test_a_proxy_may_send_many_bodies_in_one_pass_of_the_event_loop() -> None:
    process = Process(max_early=MAX_EARLY_BYTES)
    connections = [process.connected() for _ in range(200)]
    for connection in connections:
        connection.protocol.data_received(POST + bytes(RECEIVED_BYTES))
    assert not any(connection.is_closing() for connection in connections)
    for connection in connections:
        connection.protocol.connection_lost(None)
    assert process.counted == (0, 0)


@pytest.mark.anyio
async def test_the_head_of_a_websocket_counts_until_its_end() -> None:
    process = Process()
    connection = process.connected()
    connection.protocol.data_received(UPGRADE + 10 * (b"x: " + b"x" * 3000 + b"\r\n") + b"\r\n")
    await passes()
    assert isinstance(connection.protocol, BoundedWebSocket)
    early, of_user = process.counted
    assert (early, of_user > 30_000 - ORDINARY_BYTES) == (0, True)
    connection.protocol.connection_lost(None)
    assert process.counted == (0, 0)


@pytest.mark.anyio
async def test_messages_before_the_upgrade_is_accepted_have_a_bound() -> None:
    process = Process(max_early=RECEIVED_BYTES // 2)
    process.knows = False
    connection = process.connected()
    connection.protocol.data_received(UPGRADE + b"\r\n")
    await passes()
    assert isinstance(connection.protocol, BoundedWebSocket)
    connection.protocol.data_received(frame(RECEIVED_BYTES))
    assert connection.aborted.is_set()
    connection.protocol.connection_lost(None)
    assert process.counted == (0, 0)


@pytest.mark.anyio
async def test_unread_answers_count() -> None:
    process = Process()
    connection = process.connected()
    connection.protocol.data_received(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await passes()
    connection.unread = 100_000
    connection.protocol.pause_writing()
    assert process.counted[1] > 100_000 - ORDINARY_BYTES
    connection.unread = 0
    connection.protocol.resume_writing()
    assert process.counted == (0, 0)
    connection.unread = MAX_BYTES * 2
    connection.protocol.pause_writing()
    assert connection.aborted.is_set()
    connection.protocol.connection_lost(None)


@pytest.mark.anyio
async def test_the_body_of_an_answered_request_is_not_kept() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = Process(app=app).connected()
    connection.protocol.data_received(POST + bytes(60_000))
    await passes()
    assert not connection.protocol.cycle.body
    connection.protocol.connection_lost(None)


def test_the_next_request_counts_towards_the_address_again() -> None:
    early, users = early_shares(MAX_BYTES), ByteShares(MAX_BYTES, "your requests")
    memory = ConnectionMemory(early, "127.0.0.1")
    memory.resize(Part.UNPARSED, ORDINARY_BYTES + 7)
    memory.known(users, "ann")
    assert (MAX_BYTES - early.free, MAX_BYTES - users.free) == (0, 7)
    memory.begin()
    assert (MAX_BYTES - early.free, MAX_BYTES - users.free) == (7, 0)
    with pytest.raises(UnavailableError):
        memory.resize(Part.HEAD, MAX_BYTES)
    assert MAX_BYTES - early.free == 7
    memory.lost()
    assert early.free == MAX_BYTES


@pytest.mark.anyio
@pytest.mark.parametrize(("max_bytes", "refused"), [(MAX_BYTES, False), (1000, True)])
async def test_the_bytes_count_towards_the_user_of_the_request(
    max_bytes: int, refused: bool
) -> None:
    gateway = SimpleNamespace(shares=UserShares(8, max_bytes), connections=ConnectionShares(8))
    served = SimpleNamespace(state=SimpleNamespace(gateway=gateway))

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await CountConnections(waits)({**scope, "app": served}, receive, send)

    process = Process(app=app)
    connection = process.connected()
    connection.protocol.data_received(POST + bytes(RECEIVED_BYTES))
    await passes()
    assert connection.written.startswith(b"HTTP/1.1 503 ") == refused
    if not refused:
        assert process.counted[0] == 0
        assert gateway.shares.memory.free < MAX_BYTES - RECEIVED_BYTES + ORDINARY_BYTES
    connection.protocol.connection_lost(None)
    assert (process.counted[0], gateway.shares.memory.free) == (0, max_bytes)


@pytest.mark.anyio
async def test_the_body_of_a_pipelined_request_arrives_after_the_answer_to_the_first_one() -> None:
    bodies: list[bytes] = []
    may_answer = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        bodies.append((await receive())["body"])
        await may_answer.wait()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    connection = Process(app=app).connected()
    head = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n"
    connection.protocol.data_received(head + b"first" + head + b"other")
    await passes()
    may_answer.set()
    await passes()
    assert bodies == [b"first", b"other"]
    connection.protocol.connection_lost(None)
