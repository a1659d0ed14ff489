"""uvicorn's WebSockets with bounds for control frames, fragments, unread pongs and messages.

uvicorn bounds only the bytes of a message, answers any number of pings, and buffers the answers. It
waits forever for the rest of a message and for a client that does not read.
"""

from __future__ import annotations

import asyncio
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.protocol import State

from ....protocol.errors import UnavailableError
from .connection_memory import ConnectionMemory, Part
from .message_memory import MessageMemory
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
MESSAGE_S = 30.0
"""Time in which a message must arrive, in seconds. Each ``MESSAGE_BYTES_S`` received bytes extend
it by one second."""
MESSAGE_BYTES_S = 1024
"""Minimum rate at which a long message must arrive, in bytes per second."""
POLICY_VIOLATION, TRY_AGAIN_LATER = 1008, 1013
"""Close codes (RFC 6455, section 7.4.1, and IANA's registry)."""


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket. If the client exceeds a bound, the WebSocket is closed with 1008. If its
    messages do not fit the user's share of the memory, the WebSocket is closed with 1013."""

    _control_frames = 0
    """Number of pings and pongs since ``_counted_since``."""
    _counted_since = 0.0
    """The time from which pings and pongs are counted, by the event loop's clock."""
    _fragments_bytes = 0
    """Number of bytes of the fragments in ``frames``."""
    _began = 0.0
    """The time at which the first byte of the incomplete message arrived, by the event loop's
    clock."""
    _late: asyncio.TimerHandle | None = None
    """The timer that closes the WebSocket if the rest of a message arrives too late."""

    def __init__(self, *arguments: Any, memory: ConnectionMemory, **named: Any) -> None:
        """``memory``: the memory of the connection, which includes the head of the upgrade."""
        super().__init__(*arguments, **named)
        self._memory = memory

    def connection_made(self, transport: BaseTransport) -> None:
        """Handles the upgrade of a connection to a WebSocket."""
        self._reading = PacedTransport(
            cast(asyncio.Transport, transport),
            self.loop,
            self._parse,
            self._is_unread,
            self._count_unparsed,
        )
        self._messages = MessageMemory(self._reading.proceed)
        super().connection_made(cast(Any, self._reading))

    def connection_lost(self, exc: Exception | None) -> None:
        """Handles the end of the connection."""
        super().connection_lost(exc)
        self._in_time()
        self._messages.lost()
        self._memory.lost()
        self._reading.lost()

    async def run_asgi(self) -> None:
        """Runs the application, which finds the counted memory in the scope."""
        scope = cast(Any, self.scope)
        scope[MessageMemory.SCOPE_KEY] = self._messages
        scope[ConnectionMemory.SCOPE_KEY] = self._memory
        await super().run_asgi()

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
        self._memory.count_unread(self.transport)
        self._reading.proceed()

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffered messages."""
        super().resume_writing()
        self._reading.writing_resumed()
        self._memory.count_unread(self.transport)
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

    def handle_text(self, event: Frame) -> None:
        """Handles the first fragment of a text message."""
        self._fragments_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Handles the first fragment of a binary message."""
        self._fragments_bytes = len(event.data)
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Handles a further fragment of a message."""
        self._fragments_bytes += len(event.data)
        super().handle_cont(event)
        count = len(self.frames)
        if count % MAX_FRAGMENTS == 0 and self._fragments_bytes < count * MIN_FRAGMENT_BYTES:
            self._refuse(
                f"more than {MAX_FRAGMENTS} fragments of a message; "
                f"send fragments of at least {2 * MIN_FRAGMENT_BYTES} bytes"
            )

    def send_receive_event_to_app(self) -> None:
        """Passes a complete message to the application."""
        self._in_time()
        if not self.close_sent:
            self._messages.arrived(self._fragments_bytes)
        self._fragments_bytes = 0
        super().send_receive_event_to_app()

    def _parse(self, data: bytes) -> None:
        super().data_received(data)
        incomplete = self._incomplete_bytes()
        try:
            self._messages.hold(incomplete)
        except UnavailableError as error:
            self._refuse(error.message[:120], TRY_AGAIN_LATER)
            return
        if not (incomplete or self.frames):
            self._in_time()
        elif self._late is None:
            self._began = self.loop.time()
            self._late = self.loop.call_later(MESSAGE_S, self._check_message)

    def _incomplete_bytes(self) -> int:
        """Number of bytes of the incomplete message: its fragments, and the received part of a
        frame."""
        return len(self.conn.reader.buffer) + self._fragments_bytes

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _check_message(self) -> None:
        now = self.loop.time()
        if self._reading.waits:
            # The connection waits for the application, not for the client.
            self._began = now
        left_s = self._began + MESSAGE_S + self._incomplete_bytes() / MESSAGE_BYTES_S - now
        if left_s > 0:
            self._late = self.loop.call_later(left_s, self._check_message)
        else:
            self._late = None
            self._refuse("the rest of a message did not arrive in time; send faster")

    def _is_unread(self) -> bool:
        """Whether the client has not yet read most of the buffered messages, or the user of large
        messages is not known yet. If so, the gateway does not read from the client."""
        return not self.writable.is_set() or self._messages.waits

    def _count_unparsed(self, size: int) -> None:
        try:
            self._memory.resize(Part.UNPARSED, size)
        except UnavailableError as error:
            self._refuse(error.message[:120], TRY_AGAIN_LATER)

    def _count_control_frame(self) -> None:
        now = self.loop.time()
        if now - self._counted_since >= 1.0:
            self._control_frames, self._counted_since = 0, now
        self._control_frames += 1
        if self._control_frames > MAX_CONTROL_FRAMES:
            self._refuse(f"more than {MAX_CONTROL_FRAMES} pings and pongs in a second; send fewer")

    def _refuse(self, reason: str, code: int = POLICY_VIOLATION) -> None:
        if self.close_sent or self.conn.state is State.CONNECTING:
            # A close frame cannot be sent: it was sent before, or the application has not accepted
            # the WebSocket yet.
            self.transport.abort()
            return
        self.frames = []
        self._fragments_bytes = 0
        self.conn.fail(code, reason)
        self._messages.lost()
        self.handle_parser_exception()
