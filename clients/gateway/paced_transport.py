"""Parses the received data of a connection in small pieces, between which other connections run.

uvloop delivers up to 256 KB at once. These may be thousands of requests, headers, chunks or pings,
and Python code runs for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

PIECE_BYTES = 1024
"""Maximum size of a piece in bytes. A piece contains at most 56 requests."""
PARSE_S = 0.0005
"""Time after which a connection leaves the event loop to others, in seconds. A piece that was begun
is parsed to its end, and a long body is parsed in many pieces at once."""


class PacedTransport:
    """A connection's transport, and the received data that is not parsed yet.

    The kernel buffers further data as long as some is not parsed.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        parse: Callable[[bytes], None],
        held: Callable[[], bool],
    ) -> None:
        """Data is not parsed while ``held`` returns True. The owner calls ``proceed`` when the
        result may have changed."""
        self.transport = transport
        self._loop = loop
        self._parse = parse
        self._held = held
        self._rest = memoryview(b"")
        """Received data that is not parsed yet."""
        self._paused = False
        """Whether the protocol has paused reading."""
        self._stopped = False
        """Whether the transport does not read."""
        self._next: asyncio.Handle | None = None
        """The next call of ``_parse_pieces``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    @property
    def waits(self) -> bool:
        """Whether data from the client would not be parsed now."""
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

    def proceed(self) -> None:
        """Parses the rest of the data soon, and reads more data when all is parsed."""
        if self.transport.is_closing():
            self._rest = memoryview(b"")
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

    def detach(self) -> asyncio.Transport:
        """The transport, for another protocol. Drops the data that is not parsed. Afterwards, this
        object does not pause the transport."""
        self._rest = memoryview(b"")
        self._paused = False
        self._held = lambda: False
        self.proceed()
        return self.transport

    def _parse_pieces(self) -> None:
        self._next = None
        ends = perf_counter() + PARSE_S
        while self._rest and not self.waits and not self.transport.is_closing():
            piece, self._rest = bytes(self._rest[:PIECE_BYTES]), self._rest[PIECE_BYTES:]
            self._parse(piece)
            if perf_counter() >= ends:
                break
        self.proceed()
