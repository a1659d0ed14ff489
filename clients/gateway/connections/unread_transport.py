"""Aborts the connection of a client that does not read.

uvloop's ``close`` waits until the client has read the buffered data, without a time limit. Until
then, the protocol is not notified that the connection has ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

UNREAD_S = 300.0
"""Time in which a client must read most of the buffered data, in seconds. A closing connection has
the same time for all of the data. After this time, the connection is aborted."""


class UnreadTransport:
    """A connection's transport, and the timer that aborts the connection if the client does not
    read."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._loop = loop
        self._unread: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def close(self) -> None:
        """Closes the connection when the client has read the buffered data."""
        self.transport.close()
        self.writing_paused()

    def writing_paused(self) -> None:
        """Starts the timer, unless it runs. The protocol calls this method when the client does not
        read as fast as the gateway writes."""
        if self._unread is None:
            self.abort_after(UNREAD_S)

    def writing_resumed(self) -> None:
        """Stops the timer, unless the connection is closing. The protocol calls this method when
        the client has read most of the buffered data."""
        if not self.transport.is_closing():
            self.lost()

    def abort_after(self, seconds: float) -> None:
        """Starts the timer with another time, in seconds."""
        self.lost()
        self._unread = self._loop.call_later(seconds, self.transport.abort)

    def lost(self) -> None:
        """Stops the timer. The protocol calls this method when the connection has ended."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
