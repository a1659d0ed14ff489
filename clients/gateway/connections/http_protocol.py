"""uvicorn's HTTP/1.1 with bounds for connections, requests, headers, times and unread answers.

uvicorn accepts any number of connections and of pipelined requests, and stores headers of any size.
It waits forever for the rest of a request and for a client that does not read. This module's bounds
apply before the API key is checked.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ....protocol.errors import UnavailableError
from ..errors import ApiError
from ..traffic import PROBES
from .connection_memory import ConnectionMemory, Part, early_shares
from .idle_connections import IdleConnections
from .joined_heads import JoinedHeads
from .paced_transport import PacedTransport

MAX_HEAD_BYTES = 64 * 1024
"""Maximum number of bytes in a request's headers and trailers. The first line has approximately the
same bound."""
HEADER_COST = 256
"""Number of bytes that each header counts towards ``MAX_HEAD_BYTES`` in addition to its text. Two
bytes objects, a tuple and an entry of a list take up to 170 bytes more than the text. So a request
has at most 255 headers."""
HEAD_S = 30.0
"""Maximum time from the first byte of a request's headers to the last, in seconds. A new
connection must also receive its first byte within this time."""
BODY_S = 30.0
"""Time in which a body must arrive, in seconds. Each ``BODY_BYTES_S`` received bytes extend it by
one second."""
BODY_BYTES_S = 1024
"""Minimum rate at which a long body must arrive, in bytes per second."""
MAX_SENT_BYTES = 16 * 1024
"""Number of sent bytes that a client may leave unread before the gateway pauses and counts them.
The event loop's own limit is 64 KiB, or 512 KiB with TLS."""
MAX_ENCRYPTED_BYTES = 32 * 1024
"""Number of received encrypted bytes that a paused connection with TLS holds before it stops
reading. These bytes are not counted. The event loop's own limit is 256 KiB. The limit must exceed
the size of a TLS record, which has at most 16 KiB and a few hundred bytes."""
RESERVE = 64
"""Number of connections that are accepted beyond the maximum. They may only request ``PROBES``."""

_REFUSAL = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """One connection. If the client exceeds a bound, the connection is closed. Before that, the
    client receives a 431, 408 or 503, unless an earlier answer is not complete yet."""

    max_connections = 10_000
    """Maximum number of connections of one process, including WebSockets."""
    early = early_shares()
    """The memory of the connections of one process whose user is not known. ``http_protocol`` sets
    ``early`` and ``idle``."""
    idle = IdleConnections()
    """The connections of one process that have no request in progress."""

    url = b""
    _head_bytes = 0
    """Number of bytes in the headers and trailers of the current request, with ``HEADER_COST``."""
    _unfinished_bytes = 0
    """Number of received bytes of an incomplete first line or header."""
    _finished = False
    """Whether the parser has reported an event, such as a header, for the last received data."""
    _late: asyncio.TimerHandle | None = None
    """The timer that closes the connection if headers arrive too late."""
    _body_late: asyncio.TimerHandle | None = None
    """The timer that closes the connection if the body arrives too late."""
    _body_due = 0.0
    """The time by which the rest of the body must have arrived, by the event loop's clock. Before
    ``_body_late`` is set, the value is instead the number of seconds that the received bytes add to
    ``BODY_S``."""
    _in_body = False
    """Whether the headers of the current request are complete but its body is not."""
    _upgraded = False

    # --- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handles a new connection of a client."""
        self._joined = joined = cast(Any, JoinedHeads(transport, self.loop))
        self._reading = PacedTransport(
            joined,
            self.loop,
            self._parse,
            self._is_pipelined,
            partial(self._count, Part.UNPARSED),
        )
        super().connection_made(cast(Any, self._reading))
        transport.set_write_buffer_limits(high=MAX_SENT_BYTES)
        if limit_encrypted := getattr(transport, "set_read_buffer_limits", None):
            limit_encrypted(high=MAX_ENCRYPTED_BYTES)
        self._memory = ConnectionMemory(self.early, self.client[0] if self.client else "")
        beyond = len(self.connections) - self.idle.aborted - self.max_connections
        if beyond > 0 and self.idle.abort_oldest():
            beyond -= 1
        self.idle.add(self)
        if beyond > RESERVE:
            self._refuse(b"503 Service Unavailable")
        elif beyond > 0:
            self.app = self._probes_only
        self._late = self.loop.call_later(HEAD_S, self._check_head)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        self._in_time()
        self._body_in_time()
        self.idle.remove(self)
        self._memory.lost()
        super().connection_lost(exc)
        self._reading.lost()

    def abort(self) -> None:
        """Closes the connection without waiting for the client to read the buffered data."""
        self.transport.abort()

    def eof_received(self) -> None:
        """Handles the end of the client's data, after which the event loop closes the
        connection."""
        self._reading.close()

    def handle_websocket_upgrade(self) -> None:
        """Handles the upgrade to a WebSocket. Afterwards, this object does not receive events of
        the connection. The connection is aborted if an earlier answer is not complete or not read,
        because that answer would have no bounds after the upgrade."""
        if self._is_answering() or self.flow.write_paused:
            self.transport.abort()
            return
        self._in_body = False
        self._in_time()
        self._body_in_time()
        if self.app == self._probes_only:
            self._refuse(b"503 Service Unavailable")
        else:
            self._upgraded = True
            self._reading.detach()
            self.transport = self._joined.detach()
            # The WebSocket keeps the head, and continues to count the connection's memory.
            websocket = cast(Any, self.ws_protocol_class)
            self.ws_protocol_class = cast(Any, partial(websocket, memory=self._memory))
            super().handle_websocket_upgrade()

    # --- received data --------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Handles data from the client."""
        self._reading.received(data)

    def _parse(self, data: bytes) -> None:
        self._finished = False
        super().data_received(data)
        self._unfinished_bytes = 0 if self._finished else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        if not self._upgraded:
            self._count(Part.HEAD, len(self.url) + self._head_bytes + self._unfinished_bytes)
        if self._late is None and not (self._in_body or self._is_answering() or self._upgraded):
            # The client may have sent only line breaks, which the parser skips. They end uvicorn's
            # timer for idle connections, so a new timer is necessary.
            self._late = self.loop.call_later(HEAD_S, self._check_head)
        if self._in_body and self._body_late is None:
            self._body_due += self.loop.time() + BODY_S
            self._body_late = self.loop.call_later(BODY_S, self._check_body)

    def send_400_response(self, msg: str) -> None:
        """Answers an invalid request, for example one whose header ``on_header`` has refused."""
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Handles the first byte of a request."""
        super().on_message_begin()
        try:
            self._memory.begin()
        except UnavailableError:
            self._refuse(b"503 Service Unavailable")
        self._finished = True
        self._head_bytes = 0
        self._in_time()
        self._late = self.loop.call_later(HEAD_S, self._check_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handles a header, or a trailer after a chunked body."""
        self._finished = True
        self._head_bytes += len(name) + len(value) + HEADER_COST
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the headers are too long")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Handles the end of the headers."""
        self._in_time()
        self.idle.busy(self)
        self._in_body = True
        self._body_due = 0.0
        cast(Any, self.scope)[ConnectionMemory.SCOPE_KEY] = self._memory
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handles a part of the body."""
        self._finished = True
        self._body_due += len(body) / BODY_BYTES_S
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Handles the end of the request."""
        self._in_body = False
        self._body_in_time()
        super().on_message_complete()

    def _count(self, part: Part, size: int) -> None:
        """Counts the bytes of the current head or of unparsed data. The head is in memory until the
        next request begins or the connection ends."""
        try:
            self._memory.resize(part, size)
        except UnavailableError:
            self._refuse(b"503 Service Unavailable")

    def _is_answering(self) -> bool:
        """Whether the answer to the last received request is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _is_pipelined(self) -> bool:
        """Whether a received request waits for the answers to earlier requests of this connection.
        While a request waits, the connection is not read."""
        return bool(self.pipeline)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _body_in_time(self) -> None:
        if self._body_late is not None:
            self._body_late.cancel()
            self._body_late = None

    def _check_head(self) -> None:
        if self._reading.waits:
            # The connection waits for the application, not for the client.
            self._late = self.loop.call_later(HEAD_S, self._check_head)
        else:
            self._refuse(b"408 Request Timeout")

    def _check_body(self) -> None:
        left_s = self._body_due - self.loop.time()
        if self._reading.waits:
            # The connection waits for the application, not for the client.
            left_s = BODY_S
            self._body_due = self.loop.time() + left_s
        if left_s > 0:
            self._body_late = self.loop.call_later(left_s, self._check_body)
        else:
            self._refuse(b"408 Request Timeout")

    # --- sent data ------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Handles the end of an answer: starts the next request of the connection, and continues to
        read."""
        if self.cycle.response_complete:
            # The application cannot read the rest of the body any more. If another request waits
            # for this answer, ``cycle`` is the waiting request.
            self.cycle.body = bytearray()
        super().on_response_complete()
        if self.parser is not None and not self._is_answering():
            # After the end of the connection, uvicorn has no parser.
            self.idle.add(self)
        self._reading.proceed()

    def pause_writing(self) -> None:
        """Called when the client does not read as fast as the gateway writes."""
        super().pause_writing()
        self._reading.writing_paused()
        self._memory.count_unread(self.transport)

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffered answer."""
        self._reading.writing_resumed()
        self._memory.count_unread(self.transport)
        super().resume_writing()

    # --- refusals -------------------------------------------------------------------------------

    async def _probes_only(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application for a connection above the maximum: serves probes, and answers other
        requests with 503."""
        if scope["path"] in PROBES:
            await self.config.loaded_app(scope, receive, send)
            return
        refusal = ApiError(
            503,
            f"this gateway has its maximum of {self.max_connections} open connections; close some, "
            "or try again later",
            code="too_many_connections",
            retry_after_s=1.0,
            headers={"connection": "close"},
        )
        await refusal.response(scope["path"])(scope, receive, send)

    def _refuse(self, status: bytes) -> None:
        if self.transport.is_closing():
            return
        answered = self.cycle is not None and self.cycle.response_started
        if self.cycle is None or (not answered if self._in_body else self.cycle.response_complete):
            self.transport.write(_REFUSAL % status)
        self.transport.close()


def http_protocol(max_connections: int) -> type[BoundedHttp]:
    """The protocol class for a gateway process with at most ``max_connections`` connections."""
    own = {
        "max_connections": max_connections,
        "early": early_shares(),
        "idle": IdleConnections(),
    }
    return type("GatewayHttp", (BoundedHttp,), own)
