"""A client that does not read has bounds: its answer counts towards its share, and the connection
ends after some time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.responses import Response, StreamingResponse
from tokenbus.clients.gateway.connections import unread_transport, websocket_protocol
from tokenbus.clients.gateway.connections.http_protocol import BoundedHttp
from tokenbus.clients.gateway.connections.websocket_protocol import BoundedWebSocket
from tokenbus.clients.gateway.traffic import PART_BYTES, Counts, Traffic
from tokenbus.clients.gateway.users.open_programs import OpenPrograms
from tokenbus.clients.gateway.users.user_shares import UserShares
from uvicorn.server import ServerState

from .test_http_protocol import Transport, connected
from .test_small_parts import UPGRADE, web_socket

REQUEST = b"%b / HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET = REQUEST % b"GET"
WAIT_S = 60.0


class Switching(Transport):
    """A transport that records the protocol to which the connection switches."""

    protocol: asyncio.BaseProtocol | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


# --- upgrades -----------------------------------------------------------------------------------


class Answering:
    """A connection whose application begins an answer, and ends the answer on request."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.events: list[str] = []
        self.transport = Switching()
        config = uvicorn.Config(self._app, interface="asgi3", ws=BoundedWebSocket)
        config.load()
        self.protocol = BoundedHttp(config, ServerState(), {})
        self.protocol.connection_made(self.transport)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            return
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        self.begun.set()
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"last"})
        self.events.append((await receive())["type"])

    async def answer(self) -> None:
        """Ends the answer, and waits until the request has ended."""
        self.may_end.set()
        while not self.events:
            await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("pipelined", [True, False])
async def test_an_upgrade_during_an_answer_aborts_the_connection(pipelined: bool) -> None:
    connection = Answering()
    if pipelined:
        connection.protocol.data_received(GET + UPGRADE)
    else:
        connection.protocol.data_received(GET)
        await connection.begun.wait()
        connection.protocol.data_received(UPGRADE)
    assert connection.transport.aborted.is_set()
    assert connection.transport.protocol is None
    connection.protocol.connection_lost(None)
    await connection.answer()
    assert connection.events == ["http.disconnect"]


@pytest.mark.anyio
@pytest.mark.parametrize("read", [True, False])
async def test_an_upgrade_after_an_answer_needs_a_client_that_has_read_it(read: bool) -> None:
    connection = Answering()
    connection.protocol.data_received(GET)
    await connection.answer()
    connection.protocol.pause_writing()
    if read:
        connection.protocol.resume_writing()
    connection.protocol.data_received(UPGRADE)
    assert connection.transport.aborted.is_set() != read
    assert isinstance(connection.transport.protocol, BoundedWebSocket) == read
    (connection.transport.protocol or connection.protocol).connection_lost(None)  # type: ignore[attr-defined]


# --- the shares of users ------------------------------------------------------------------------

LONG = b"".join(b"%08d" % i for i in range(10 * PART_BYTES // 8))


class Served:
    """The layer ``Traffic`` around an application whose answer counts towards a share."""

    def __init__(self, chunked: bool = False) -> None:
        self.shares = UserShares(1, 2 * len(LONG))
        self._chunked = chunked
        state = SimpleNamespace(
            traffic=Counts(), shares=self.shares, programs=OpenPrograms(), draining=False
        )
        self._self: Any = SimpleNamespace(state=SimpleNamespace(gateway=state))

    @property
    def held_bytes(self) -> int:
        """Number of bytes that count towards the shares of users."""
        return 2 * len(LONG) - self.shares.memory.free

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await Traffic(self._app)({**scope, "app": self._self}, receive, send)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.shares.take_bytes(len(LONG))
        response = StreamingResponse(_parts()) if self._chunked else Response(LONG)
        await response(scope, receive, send)


async def _parts() -> AsyncIterator[bytes]:
    yield LONG


class Buffering(Transport):
    """A transport that keeps the written bytes in a buffer until ``read``."""

    protocol: BoundedHttp
    buffered = 0

    def write(self, data: object) -> None:
        before = len(self.written)
        super().write(data)
        self.buffered += len(self.written) - before
        if self.buffered >= PART_BYTES:
            self.protocol.pause_writing()

    def read(self) -> None:
        """Reads the whole buffer."""
        self.buffered = 0
        self.protocol.resume_writing()


def _buffering(app: Any) -> Buffering:
    transport = Buffering()
    transport.protocol = BoundedHttp(uvicorn.Config(app), ServerState(), {})
    transport.protocol.connection_made(transport)
    return transport


@pytest.mark.anyio
async def test_an_unread_answer_counts_towards_the_share_of_its_user() -> None:
    served = Served()
    transport = _buffering(served)
    transport.protocol.data_received(GET)
    for _ in range(len(LONG) // PART_BYTES):
        while transport.buffered < PART_BYTES:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert transport.buffered < 2 * PART_BYTES
        assert served.held_bytes == len(LONG)
        transport.read()
    while served.held_bytes:
        await asyncio.sleep(0)
    assert transport.written.endswith(LONG)
    transport.protocol.connection_lost(None)


@pytest.mark.anyio
async def test_a_client_that_leaves_an_unread_answer_frees_its_share() -> None:
    served = Served()
    transport = _buffering(served)
    transport.protocol.data_received(GET)
    while transport.buffered < PART_BYTES:
        await asyncio.sleep(0)
    assert len(transport.written) < len(LONG)
    transport.protocol.connection_lost(None)
    while served.held_bytes:
        await asyncio.sleep(0)


@pytest.mark.anyio
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
async def test_a_long_answer_is_whole(method: bytes, chunked: bool) -> None:
    served = Served(chunked)
    protocol, transport = connected(served)
    protocol.data_received(REQUEST % method)
    while protocol.cycle is None or not protocol.cycle.response_complete:
        await asyncio.sleep(0)
    while b"\r\n\r\n" not in transport.written:
        await asyncio.sleep(0)
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert (b"content-length: %d" % len(LONG) in head) != chunked
    if method == b"HEAD":
        assert body == b""
    elif chunked:
        assert b"".join(body.split(b"\r\n")[1::2]) == LONG
    else:
        assert body == LONG
    assert not transport.is_closing()
    protocol.connection_lost(None)


# --- times --------------------------------------------------------------------------------------


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives clients almost no time to read."""
    monkeypatch.setattr(unread_transport, "UNREAD_S", 0.01)


def _web_socket(app: Any, **options: Any) -> tuple[BoundedWebSocket, Transport]:
    transport = Transport()
    protocol = web_socket(uvicorn.Config(app, **options))
    protocol.connection_made(transport)
    protocol.data_received(UPGRADE)
    return protocol, transport


async def _accepts(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "websocket.accept"})
    await receive()


@pytest.mark.anyio
@pytest.mark.usefixtures("brief")
async def test_a_websocket_whose_messages_are_not_read_is_aborted() -> None:
    slow, read = _web_socket(_accepts)
    slow.pause_writing()
    slow.resume_writing()
    protocol, transport = _web_socket(_accepts)
    protocol.pause_writing()
    await asyncio.wait_for(transport.aborted.wait(), WAIT_S)
    assert not read.is_closing()
    for connection in (slow, protocol):
        connection.connection_lost(None)


@pytest.mark.anyio
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("made", [connected, _web_socket])
async def test_a_closing_connection_whose_rest_is_not_read_is_aborted(made: Any) -> None:
    protocol, transport = made(_accepts)
    # The client sends no more data, and has not read all data of the gateway.
    protocol.eof_received()
    protocol.resume_writing()
    await asyncio.wait_for(transport.aborted.wait(), WAIT_S)
    protocol.connection_lost(None)


@contextmanager
def _on_uvloop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@asynccontextmanager
async def _unread_socket(app: Any) -> AsyncIterator[BoundedWebSocket]:
    """A WebSocket on uvloop, from a client that does not read. Its pings get no answers."""
    config = uvicorn.Config(
        app, ws_ping_interval=0.01, ws_ping_timeout=0.01, ws_per_message_deflate=False
    )
    config.load()
    client, server = socket.socketpair()
    server.setblocking(False)
    with client:
        _, protocol = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: web_socket(config), server
        )
        client.sendall(UPGRADE)
        yield protocol


def test_an_unread_websocket_ends_soon_after_an_unanswered_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(websocket_protocol, "PING_LOST_S", 0.01)

    async def run() -> str:
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "bytes": bytes(20 << 20)})
            ended.set_result((await receive())["type"])

        async with _unread_socket(app):
            return await asyncio.wait_for(ended, WAIT_S)

    with _on_uvloop() as runner:
        assert runner.run(run()) == "websocket.disconnect"
