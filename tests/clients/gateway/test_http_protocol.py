"""Connections that send headers without an end, or too slowly."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import uvicorn
from tokenbus.clients.gateway import http_protocol
from tokenbus.clients.gateway.http_protocol import BoundedHttp
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
    # The answer is lost where the kernel resets a connection that is closed with data unread.
    with (
        socket.create_connection((address.hostname, address.port), timeout=60.0) as connection,
        suppress(ConnectionError),
    ):
        connection.sendall(head)
        connection.sendall(endless * 600_000)
        while part := connection.recv(4096):
            answer += part
    if answer:
        assert answer.split(b" ")[1] in (b"400", b"431")


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data: object) -> None:
        assert isinstance(data, bytes)
        self.written += data

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()


async def _no_app(scope: object, receive: object, send: object) -> None:
    pass


@pytest.mark.anyio
async def test_headers_that_take_too_long_are_answered_by_408(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_S", 0.01)
    transport = Transport()
    protocol = BoundedHttp(uvicorn.Config(_no_app), ServerState(), {})
    protocol.connection_made(transport)
    protocol.data_received(HALF_A_REQUEST)
    await asyncio.wait_for(transport.closed.wait(), 30.0)
    assert transport.written.startswith(b"HTTP/1.1 408 ")
