"""Sends the head of an answer and the first part of its body in one write.

uvicorn writes both one after the other, and uvloop sends each write at once. A second system call
and a second packet would delay the first token.
"""

from __future__ import annotations

import asyncio
from typing import Any


class JoinedHeads:
    """A connection's transport that holds the head of an answer until the next write, but at most
    until the next pass of the event loop."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self.transport = transport
        self._loop = loop
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def write(self, data: bytes) -> None:
        """Writes data. A head begins with the version of the protocol."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self.transport.write(data)

    def close(self) -> None:
        """Closes the connection when the written data is sent."""
        self._flush()
        self.transport.close()

    def detach(self) -> asyncio.Transport:
        """Returns the transport, for use by another protocol, after all written data."""
        self._flush()
        return self.transport

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self.transport.is_closing():
            self.transport.write(head)
