"""Parses the received data of a connection in small pieces, between which the event loop serves
other connections.

uvloop delivers up to 256 KB at once. These may be thousands of requests, headers, chunks or pings,
and Python code runs for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import cast

from .unread_transport import UnreadTransport

PIECE_BYTES = 1024
"""Maximum size of a piece in bytes. The shortest request has 18 bytes, so a piece contains at most
56 requests."""
PARSE_S = 0.0005
"""Time for which a connection's pieces are parsed before the event loop serves other connections,
in seconds. The time is checked after each piece. Many pieces of a long body can be parsed in this
time."""


class PacedTransport(UnreadTransport):
    """A connection's transport, and the received data that is not parsed yet.

    While there is such data, the transport does not read, and the kernel buffers further data.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        parse: Callable[[bytes], None],
        held: Callable[[], bool],
        count: Callable[[int], None],
    ) -> None:
        """``parse`` receives the pieces. Data is not parsed while ``held`` returns True. The owner
        calls ``proceed`` when the result of ``held`` may have changed. ``count`` receives the
        number of bytes that the unparsed data occupies, and may close the transport."""
        super().__init__(transport, loop)
        self._parse = parse
        self._held = held
        self._count = count
        self._rest = memoryview(b"")
        """Received data that is not parsed yet."""
        self._paused = False
        """Whether the protocol has paused reading."""
        self._stopped = False
        """Whether this object has paused the transport."""
        self._next: asyncio.Handle | None = None
        """The next call of ``_parse_pieces``."""

    @property
    def waits(self) -> bool:
        """Whether parsing is stopped, by ``pause_reading`` or by ``held``."""
        return self._paused or self._held()

    def pause_reading(self) -> None:
        """Stops parsing and reading."""
        self._paused = True
        self.proceed()

    def resume_reading(self) -> None:
        """Continues parsing and reading."""
        self._paused = False
        self.proceed()

    def received(self, data: bytes) -> None:
        """Handles data from the client."""
        self._rest = memoryview(bytes(self._rest) + data if self._rest else data)
        if self._next is None:
            self._parse_pieces()
        else:
            self._count(self._rest_bytes)

    def proceed(self) -> None:
        """Schedules the parsing of the remaining data. Lets the transport read only if all data is
        parsed and parsing is not stopped."""
        if not self.transport.is_closing():
            self._count(self._rest_bytes)
        if self.transport.is_closing():
            # ``count`` may have closed the transport.
            self._rest = memoryview(b"")
            self._count(0)
            return
        waits = self.waits
        if self._rest and not waits and self._next is None:
            self._next = self._loop.call_soon(self._parse_pieces)
        stop = waits or bool(self._rest)
        if stop and not self._stopped:
            self.transport.pause_reading()
        elif self._stopped and not stop:
            self.transport.resume_reading()
        self._stopped = stop

    def detach(self) -> None:
        """Drops the data that is not parsed. Afterwards, this object does not pause the transport,
        so that another protocol can use it."""
        self._rest = memoryview(b"")
        self._paused = False
        self._held = lambda: False
        self.proceed()

    @property
    def _rest_bytes(self) -> int:
        """Number of bytes that ``_rest`` occupies. A part of the received data keeps all of the
        data in memory."""
        return len(cast(bytes, self._rest.obj))

    def _parse_pieces(self) -> None:
        self._next = None
        ends = perf_counter() + PARSE_S
        while self._rest and not self.waits and not self.transport.is_closing():
            piece, self._rest = bytes(self._rest[:PIECE_BYTES]), self._rest[PIECE_BYTES:]
            if not self._rest:
                # An empty part of a memoryview keeps all of the data in memory.
                self._rest = memoryview(b"")
            self._parse(piece)
            if perf_counter() >= ends:
                break
        self.proceed()
