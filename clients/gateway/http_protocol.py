"""HTTP/1.1 as uvicorn speaks it, with bounds for what comes before and after a request's body.

uvicorn itself keeps headers of any size, and waits for the rest of them for ever; both before
anybody has looked for an API key.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Most bytes of a request's headers and trailers together, and about the most of its first line."""
HEAD_S = 30.0
"""How long the headers of a request may take from their first byte to the last, in seconds."""

_REFUSAL = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection. Beyond a bound it is closed, where possible after a 431 or 408."""

    _head_bytes = 0
    """The headers and trailers of the current request."""
    _unfinished_bytes = 0
    """What has arrived since then of the first line, or of one header."""
    _finished = False
    _late: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        self._finished = False
        super().data_received(data)
        self._unfinished_bytes = 0 if self._finished else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")

    def send_400_response(self, msg: str) -> None:
        """The request is not valid; a header that ``on_header`` has refused is one reason."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        else:
            super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._in_time()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._finished = True
        self._head_bytes = 0
        self._in_time()
        self._late = self.loop.call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer behind a body in chunks."""
        self._finished = True
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are over."""
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._finished = True
        super().on_body(body)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(_REFUSAL % status)
        self.transport.close()
