"""Accepts TLS connections, and bounds the number and the time of their handshakes.

uvloop's server allows each handshake 60 s, and the HTTP protocol does not see the connection before
the handshake is complete. So clients without an API key could open any number of connections.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

from ....protocol.shares import Shares

MAX_HANDSHAKES = 4096
"""Maximum number of unfinished handshakes of one process. Each takes about 60 KB. One address may
have half of them. This half is as long as the queue of the listening socket, so that a proxy may
open all of its connections at once."""
HANDSHAKE_S = 10.0
"""Maximum duration of a handshake, in seconds."""
MAX_ACCEPTED = 64
"""Maximum number of connections that one pass of the event loop accepts. Other connections are
served between the passes."""
RETRY_S = 1.0
"""Time after which connections are accepted again if the process has too many open files, in
seconds."""


class Handshakes:
    """The unfinished TLS handshakes of one gateway process. If there are too many, a new handshake
    replaces the oldest one: of its own address, if this address has used up its share."""

    def __init__(self, context: ssl.SSLContext, protocol: Callable[[], asyncio.Protocol]) -> None:
        """``protocol``: makes the protocol of a connection."""
        self._context = context
        self._protocol = protocol
        self._running: dict[asyncio.Task[None], str] = {}
        """The address of the client of each handshake. The oldest handshake is the first."""
        self._shares = Shares(MAX_HANDSHAKES)
        """The number of handshakes in ``_running``, by the client's address."""

    @property
    def busy(self) -> bool:
        """Whether a handshake is in progress."""
        return bool(self._running)

    def begin(self, connection: socket.socket) -> None:
        """Begins the handshake of an accepted connection."""
        address = _address_of(connection)
        if not self._shares.fits(address):
            self._abort_oldest(address if self._shares.of(address) else None)
        task = asyncio.ensure_future(self._shake(connection))
        self._running[task] = address
        self._shares.take(address)
        task.add_done_callback(self._forget)

    async def _shake(self, connection: socket.socket) -> None:
        # A client may end the handshake or send wrong data. asyncio logs all other errors.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, connection, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_S
            )

    def _abort_oldest(self, address: str | None) -> None:
        """Aborts the oldest handshake of an address, or of all addresses if ``address`` is None."""
        oldest = next((t for t, of in self._running.items() if address in (None, of)), None)
        if oldest is not None:
            self._forget(oldest)
            oldest.cancel()

    def _forget(self, task: asyncio.Task[None]) -> None:
        address = self._running.pop(task, None)
        if address is not None:
            self._shares.give_back(address)


class TlsListener:
    """Accepts the connections of a listening socket, and begins their handshakes. Has the methods
    of ``asyncio.Server`` that uvicorn uses."""

    def __init__(self, listener: socket.socket, handshakes: Handshakes) -> None:
        self._listener = listener
        self._handshakes = handshakes
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Stops accepting connections, and closes the socket, because a successor may listen on its
        address while this process finishes its requests."""
        if self._retry is not None:
            self._retry.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Does nothing, because ``close`` is complete when it returns."""

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        try:
            for connection in islice(accepted(self._listener), MAX_ACCEPTED):
                self._handshakes.begin(connection)
        except OSError:
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(RETRY_S, self._listen)


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The connections in the queue of a listening socket. Raises OSError if no connection can be
    accepted, for example because the process has too many open files."""
    listener.setblocking(False)
    while True:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        connection.setblocking(False)
        yield connection


def _address_of(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[0])
    except OSError:
        return ""
