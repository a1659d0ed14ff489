"""The TLS handshakes of a gateway are bounded in time and number."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tokenbus.clients.gateway.connections import handshakes
from tokenbus.clients.gateway.connections.http_protocol import MAX_ENCRYPTED_BYTES
from tokenbus.clients.gateway.connections.server import GatewayServer
from tokenbus.protocol.settings import Settings

from .certificates import self_signed

pytestmark = pytest.mark.process

WAIT_S = 60.0
REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while True:
            what = (await receive())["type"]
            await send({"type": f"{what}.complete"})
            if what == "lifespan.shutdown":
                return
    if scope["path"] == "/unread":
        await asyncio.get_running_loop().create_future()
    size, more = 0, True
    while more:
        part = await receive()
        size, more = size + len(part["body"]), part["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"whole %d" % size})


class Listening:
    """A server with TLS on a port of its own."""

    def __init__(self, server: GatewayServer, folder: Path, listener: socket.socket) -> None:
        self.server = server
        self.listener = listener
        self.address: tuple[str, int] = listener.getsockname()
        self._writers: list[asyncio.StreamWriter] = []
        self._trust = ssl.create_default_context(cafile=str(folder / "cert.pem"))

    async def connected(self, address: str = "127.0.0.1") -> asyncio.StreamReader:
        """Opens a connection from an address, and does not begin a handshake."""
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(address, 0))
        self._writers.append(writer)
        return reader

    async def in_small_pieces(self, request: bytes) -> asyncio.StreamWriter:
        """Sends a request, and lets the server read each piece. A server reads up to 256 KiB at a
        time if more has arrived."""
        _, writer = await asyncio.open_connection(*self.address, ssl=self._trust)
        self._writers.append(writer)
        for start in range(0, len(request), 8192):
            writer.write(request[start : start + 8192])
            for _ in range(20):
                await asyncio.sleep(0)
        return writer

    async def answer(self, request: bytes = REQUEST) -> bytes:
        """The answer to a request."""
        reader, writer = await asyncio.open_connection(*self.address, ssl=self._trust)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[Listening]:
    cert, key = self_signed(folder)
    settings = Settings(tls_cert=str(cert), tls_key=str(key), run_dir=str(folder))
    server: Any = GatewayServer(app, settings)  # type: ignore[arg-type]
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        await server.startup([listener])
        yield Listening(server, folder, listener)
        for one in server.servers:
            one.close()
        await server.lifespan.shutdown()


def run(main: Any) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(main, WAIT_S))


def test_a_handshake_that_takes_too_long_is_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)

    async def main() -> None:
        async with listening(tmp_path) as place:
            silent = await place.connected()
            assert await silent.read() == b""
            while place.server._is_shaking_hands:
                await asyncio.sleep(0)
            monkeypatch.undo()
            assert b"whole" in await place.answer()

    run(main())


def test_a_new_handshake_replaces_the_oldest_one_of_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 10 * WAIT_S)
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 8)

    async def main() -> None:
        async with listening(tmp_path) as place:
            other = await place.connected("127.0.0.2")
            silent = [await place.connected() for _ in range(20)]
            for reader in silent[:15]:
                assert await reader.read() == b""
            # An address has at most half of the handshakes. Handshakes of other addresses continue.
            assert not any(reader.at_eof() for reader in (other, *silent[-3:]))
            assert b"whole" in await place.answer()
            assert len(place.server._handshakes._running) < 8  # type: ignore[union-attr]

    run(main())


def test_connections_that_one_proxy_opens_at_once_are_all_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 10 * WAIT_S)

    async def main() -> None:
        async with listening(tmp_path) as place:
            # More than 512 handshakes of one address are in progress before the first one ends.
            silent = [await place.connected() for _ in range(600)]
            assert b"whole" in await place.answer()
            assert not any(reader.at_eof() for reader in silent)

    run(main())


def test_a_successor_can_listen_while_the_requests_are_finished(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as place:
            await place.server._stop_listening([place.listener])
            with socket.create_server(place.address):
                # The successor has the address now.
                pass

    run(main())


def post(path: str, size: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n"
    return f"{head}connection: close\r\n\r\n".encode() + bytes(size)


def test_a_paused_connection_holds_few_encrypted_bytes(tmp_path: Path) -> None:
    async def main() -> None:
        async with listening(tmp_path) as place:
            assert b"whole 5000000" in await place.answer(post("/", 5_000_000))
            writer = await place.in_small_pieces(post("/unread", 2_000_000))
            connections: Any = place.server.server_state.connections
            [connection] = connections
            assert connection._reading._stopped
            size = connection._reading.transport.get_read_buffer_size()
            assert MAX_ENCRYPTED_BYTES <= size < MAX_ENCRYPTED_BYTES + 64 * 1024
            # Other connections are served.
            assert b"whole 1000000" in await place.answer(post("/", 1_000_000))
            writer.close()

    run(main())
