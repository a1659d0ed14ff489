"""Before a gateway forwards a WebSocket's messages, it opens a session that watches the broker.

In the tests, a ROUTER socket replaces the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from starlette.websockets import WebSocket
from tokenbus.clients.gateway.connections.message_memory import MessageMemory
from tokenbus.clients.gateway.tunnels.arrivals import MAX_EARLY
from tokenbus.clients.gateway.tunnels.tunnels import Tunnels
from tokenbus.clients.gateway.users.user_shares import UserShares
from tokenbus.protocol.messages import PROTOCOL_VERSION, Pong, Welcome
from tokenbus.protocol.settings import Settings

BOUND_S = 120.0
"""Time limit of a wait, in seconds. Only a hang reaches this limit."""


class Broker:
    """A ROUTER socket that replaces a broker. The test reads the messages and sends the answers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"tcp://127.0.0.1:{port}"

    async def receive(self) -> tuple[bytes, bytes, Any]:
        # The poll is short, because the event loop waits for this thread when it closes.
        while not await asyncio.to_thread(self.socket.poll, 50):
            pass
        peer, kind, body = self.socket.recv_multipart()
        return peer, kind, msgspec.json.decode(body)

    def welcome(self, peer: bytes) -> None:
        answer = Welcome(
            version=PROTOCOL_VERSION, encoding="json", session="s" * 32, ping_s=0.1, expiry_s=60.0
        )
        self.socket.send_multipart([peer, b"WELCOME", msgspec.json.encode(answer)])

    def forgets(self, peer: bytes) -> None:
        """Answers a PING like a broker that does not know the session."""
        self.socket.send_multipart([peer, b"PONG", msgspec.json.encode(Pong(session=False))])


class Browser:
    """The client of a WebSocket that starlette serves."""

    def __init__(self) -> None:
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        scope = {"type": "websocket", MessageMemory.SCOPE_KEY: MessageMemory(lambda: None)}
        self.socket = WebSocket(scope, self._sent.get, self.received.put)

    async def accepted(self) -> None:
        self._sent.put_nowait({"type": "websocket.connect"})
        await self.socket.accept()
        assert (await self.received.get())["type"] == "websocket.accept"

    def send(self, line: str) -> None:
        self._sent.put_nowait({"type": "websocket.receive", "text": line})

    def leave(self) -> None:
        self._sent.put_nowait({"type": "websocket.disconnect", "code": 1000})


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_websocket_waits_until_the_broker_is_watched(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Regression test: the broker was replaced between the HELLO of a WebSocket and the HELLO of
    the watch. The watch began a session at the new broker, so the WebSocket waited for the old
    broker forever."""

    async def run() -> None:
        broker = Broker(context)
        tunnels = Tunnels(Settings(front=broker.address), UserShares(100))
        browser = Browser()
        await browser.accepted()
        browser.send('HELLO {"client": "a browser"}')
        serving = asyncio.create_task(tunnels.serve(browser.socket))
        watch, kind, hello = await broker.receive()
        assert (kind, hello["client"]) == (b"HELLO", "tokenbus gateway")
        # The watch sends a PING because its HELLO is not answered. The browser's HELLO still waits.
        assert (await broker.receive())[:2] == (watch, b"PING")
        broker.welcome(watch)
        kind = b"PING"
        while kind == b"PING":
            peer, kind, hello = await broker.receive()
        assert (kind, hello["client"]) == (b"HELLO", "a browser")
        broker.welcome(peer)
        assert (await browser.received.get())["text"].startswith("WELCOME ")
        # From here on, the socket acts as a new broker, which does not know the two sessions.
        sender = b""
        while sender != watch:
            sender, *_ = await broker.receive()
        broker.forgets(watch)
        assert "connection_lost" in (await browser.received.get())["text"]
        closed = await browser.received.get()
        assert (closed["type"], closed["code"]) == ("websocket.close", 1012)
        browser.leave()
        await serving
        await tunnels.close()
        broker.socket.close()

    asyncio.run(asyncio.wait_for(run(), BOUND_S))


def test_a_websocket_ends_if_the_broker_refuses_the_watch(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """Each PING of the watch is answered with an ERROR, so that the watch's session neither begins
    nor ends."""

    async def run() -> None:
        broker = Broker(context)
        tunnels = Tunnels(Settings(front=broker.address, session_timeout_s=1.0), UserShares(100))
        browser = Browser()
        await browser.accepted()
        browser.send('HELLO {"client": "a browser"}')
        serving = asyncio.create_task(tunnels.serve(browser.socket))

        async def refuse() -> None:
            while True:
                peer, *_ = await broker.receive()
                broker.socket.send_multipart([peer, b"ERROR", b"{}"])

        refusing = asyncio.create_task(refuse())
        closed = await asyncio.wait_for(browser.received.get(), BOUND_S)
        assert (closed["type"], closed["code"]) == ("websocket.close", 1013)
        await asyncio.wait_for(serving, BOUND_S)
        # The watch sends PINGs until it is closed, so that the receiving thread ends.
        refusing.cancel()
        await tunnels.close()

    asyncio.run(run())


def test_a_client_that_disconnects_while_no_broker_answers_is_noticed(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    """If the gateway did not notice, the WebSocket would stay open while the gateway waits for the
    broker."""

    async def run() -> None:
        broker = Broker(context)
        settings = Settings(front=broker.address, session_timeout_s=10 * BOUND_S)
        tunnels = Tunnels(settings, UserShares(100))
        browser = Browser()
        await browser.accepted()
        browser.send('HELLO {"client": "a browser"}')
        serving = asyncio.create_task(tunnels.serve(browser.socket))
        await broker.receive()
        browser.send("PING {}")
        browser.leave()
        await asyncio.wait_for(serving, BOUND_S)
        assert not tunnels.busy
        await tunnels.close()
        broker.socket.close()

    asyncio.run(run())


def test_messages_that_arrive_before_the_broker_answers_are_sent_in_their_order(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    async def run() -> None:
        broker = Broker(context)
        tunnels = Tunnels(Settings(front=broker.address), UserShares(100))
        browser = Browser()
        await browser.accepted()
        # The gateway reads only some of these messages while it waits for the broker.
        lines = [f'PING {{"number": {number}}}' for number in range(2 * MAX_EARLY)]
        for line in lines:
            browser.send(line)
        serving = asyncio.create_task(tunnels.serve(browser.socket))
        watch, *_ = await broker.receive()
        # The watch sends this PING after a second. During this second, the gateway has received
        # messages of the browser.
        assert (await broker.receive())[:2] == (watch, b"PING")
        broker.welcome(watch)
        numbers: list[int] = []
        while len(numbers) < len(lines):
            peer, _, body = await broker.receive()
            if peer != watch:
                numbers.append(body["number"])
        assert numbers == list(range(len(lines)))
        browser.leave()
        await asyncio.wait_for(serving, BOUND_S)
        await tunnels.close()
        broker.socket.close()

    asyncio.run(asyncio.wait_for(run(), BOUND_S))
