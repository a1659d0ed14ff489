"""uvicorn's WebSockets with bounds for control frames, fragments, unread pongs and unread messages.

uvicorn bounds only the bytes of a message, answers any number of pings, and buffers the answers. It
waits forever for a client that does not read.
"""

from __future__ import annotations

import asyncio
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from .paced_transport import PacedTransport

MAX_CONTROL_FRAMES = 64
"""Maximum number of pings and pongs of a client in a second."""
MAX_FRAGMENTS = 1024
"""Maximum number of fragments of a message whose fragments are small."""
MIN_FRAGMENT_BYTES = 512
"""Minimum average size of the fragments of a message with more than ``MAX_FRAGMENTS`` fragments, in
bytes. The refusal recommends at least twice this size for each fragment, so that the average stays
above the minimum even if some fragments are shorter."""
PING_LOST_S = 10.0
"""Time from the close after an unanswered ping until the connection is aborted, in seconds."""
POLICY_VIOLATION = 1008
"""Close code (RFC 6455, section 7.4.1)."""


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket. If the client exceeds a bound, the WebSocket is closed with 1008."""

    _control_frames = 0
    """Number of pings and pongs since ``_counted_since``."""
    _counted_since = 0.0
    """The time from which pings and pongs are counted, by the event loop's clock."""

    def connection_made(self, transport: BaseTransport) -> None:
        """Handles the upgrade of a connection to a WebSocket."""
        self._reading = PacedTransport(
            cast(asyncio.Transport, transport), self.loop, self._parse, self._is_unread
        )
        super().connection_made(cast(Any, self._reading))

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        super().connection_lost(exc)
        self._reading.lost()

    def eof_received(self) -> None:
        """Handles the end of the client's data, after which the event loop closes the
        connection."""
        self._reading.close()

    def data_received(self, data: bytes) -> None:
        """Handles data from the client."""
        self._reading.received(data)

    def pause_writing(self) -> None:
        """Called when the client does not read as fast as the gateway writes."""
        super().pause_writing()
        self._reading.writing_paused()
        self._reading.proceed()

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffered messages."""
        super().resume_writing()
        self._reading.writing_resumed()
        self._reading.proceed()

    def keepalive_timeout(self) -> None:
        """Closes the WebSocket of a client that has not answered a ping."""
        super().keepalive_timeout()
        self._reading.abort_after(PING_LOST_S)

    def handle_ping(self) -> None:
        """Answers a ping."""
        self._count_control_frame()
        super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        """Handles a pong."""
        self._count_control_frame()
        super().handle_pong(event)

    def handle_cont(self, event: Frame) -> None:
        """Handles a further fragment of a message."""
        super().handle_cont(event)
        count = len(self.frames)
        if count % MAX_FRAGMENTS == 0 and sum(map(len, self.frames)) < count * MIN_FRAGMENT_BYTES:
            self._refuse(
                f"more than {MAX_FRAGMENTS} fragments of a message; "
                f"send fragments of at least {2 * MIN_FRAGMENT_BYTES} bytes"
            )

    def _parse(self, data: bytes) -> None:
        super().data_received(data)

    def _is_unread(self) -> bool:
        """Whether the client has not yet read most of the buffered messages. If so, the gateway
        does not read from the client."""
        return not self.writable.is_set()

    def _count_control_frame(self) -> None:
        now = self.loop.time()
        if now - self._counted_since >= 1.0:
            self._control_frames, self._counted_since = 0, now
        self._control_frames += 1
        if self._control_frames > MAX_CONTROL_FRAMES:
            self._refuse(f"more than {MAX_CONTROL_FRAMES} pings and pongs in a second; send fewer")

    def _refuse(self, reason: str) -> None:
        if not self.close_sent:
            self.frames = []
            self.conn.fail(POLICY_VIOLATION, reason)
            self.handle_parser_exception()
