"""Handles the messages of clients: checks each message, and passes it to the handler of its
type."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from ..protocol.bodies import body_type, decode_as, encode_body, encoding_of, error_body
from ..protocol.body_bounds import check_body, max_body_bytes
from ..protocol.columns import TokenBody
from ..protocol.errors import Code, RequestError, ServiceError, TokenbusError
from ..protocol.messages import (
    CLIENT_MESSAGES,
    MAX_ATTACHMENT_BYTES,
    MAX_FRAMES,
    OPERATOR_MESSAGES,
    InputAnswer,
    StreamId,
)
from .dispatch import Dispatcher
from .ends import Ends
from .outgoing import Outgoing
from .session import Session
from .sessions import Sessions
from .state import BrokerState

log = logging.getLogger(__name__)

Handler = Callable[[Session, list[bytes]], None]
"""Handles the frames of a client's message; raises TokenbusError if the message is refused."""


class Front:
    """Handles the messages of clients."""

    def __init__(
        self,
        state: BrokerState,
        sessions: Sessions,
        dispatcher: Dispatcher,
        ends: Ends,
        handlers: Mapping[bytes, Handler],
    ) -> None:
        """``handlers``: the handler of each message type except PING, HELLO and BYE."""
        self._state = state
        self._table = state.sessions
        self._out = state.out
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._ends = ends
        self._handlers = handlers

    # --- events ---------------------------------------------------------------------------------

    def on_frames(self, peer: bytes, frames: list[bytes], key: str, now: float) -> None:
        """Handles a message of a client's connection; only the sender receives the error, if
        any."""
        session = self._table.by_peer.get(peer)
        if session is not None and session.key != key:
            # Another client now has the routing id. So the connection of the session with this
            # routing id has closed.
            self._sessions.on_gone(peer, now)
            session = None
        if session is not None:
            session.last_seen = now
        message_type = frames[0] if frames else b""
        try:
            _check(peer, frames)
            if message_type == b"PING":
                self._sessions.ping(peer, session, frames)
            elif message_type == b"HELLO":
                self._sessions.hello(peer, session, frames, key, now)
            elif message_type == b"BYE":
                self._sessions.bye(peer, session, frames, now)
            else:
                body_type(CLIENT_MESSAGES, message_type)
                if session is None:
                    session = self._sessions.open(peer, key, encoding_of(frames[1]), now)
                self._check_right(session, message_type)
                self._handlers[message_type](session, frames)
        except TokenbusError as error:
            self.refuse(peer, frames, error)
        except Exception as error:
            shown = message_type[:40].decode("ascii", "backslashreplace")
            self._dispatcher.on_defect(f"a client's message {shown}", error)
            defect = ServiceError(
                Code.INTERNAL, "the broker failed to handle this message; the broker's log says why"
            )
            self.refuse(peer, frames, defect)

    def _check_right(self, session: Session, message_type: bytes) -> None:
        if message_type in OPERATOR_MESSAGES and not self._state.is_operator(session):
            raise RequestError(
                Code.NOT_ALLOWED,
                f"this client may not send {message_type.decode()}, because it is not an "
                "operator; connect with the operator's key (without keys, every client except a "
                "gateway is an operator)"
                + (", or send SIGTERM to the worker" if message_type == b"DRAIN" else ""),
            )

    def refuse(self, peer: bytes, frames: list[bytes], error: TokenbusError) -> None:
        """Answers a message with an ERROR that says why the message is refused."""
        self._state.counters.refused += 1
        message_type = frames[0] if frames else b""
        body = frames[1] if len(frames) > 1 else b""
        session = self._table.by_peer.get(peer)
        encoding = session.encoding if session is not None else encoding_of(body)
        stream_id = _stream_id(body) if len(body) <= max_body_bytes(message_type) else None
        self._out.refuse(peer, error, stream_id, message_type, encoding)

    def on_slow(self, dropped: Outgoing) -> None:
        """Handles a client that does not read, after a message to it was dropped.

        The client's streams end with errors, which the client receives when it reads again. A
        stream that has already ended also gets an error if its last tokens were in the dropped
        message.
        """
        session = self._table.by_peer.get(dropped.peer)
        if session is None:
            return
        most = self._state.settings.max_pending_bytes
        error = TokenbusError(
            Code.SLOW_CLIENT,
            f"more than {most} bytes for this client were unread, so its streams were ended; read "
            "faster, or open fewer streams",
        )
        self._ends.fail_answers(session, error)
        closed = _closed_stream(dropped.frames)
        if closed is not None and closed not in session.streams:
            closing = dropped.frames
            if closing[0] != b"ERROR":
                closing = b"ERROR", encode_body(error_body(error, closed), session.encoding)
            self._ends.lost(session, closed, closing)
        ended = _ended_streams(dropped.frames) - session.streams.keys()
        if not session.streams and not ended:
            return
        self._state.counters.slow_clients += 1
        for stream_id in ended:
            self._ends.fail(session, stream_id, error)
        for request in list(session.streams.values()):
            self._dispatcher.abandon(request, error)

    def end_all(self, error: TokenbusError) -> None:
        """Ends every stream with ``error``, because the broker stops."""
        for session in self._table:
            for request in list(session.streams.values()):
                self._dispatcher.abandon(request, error)

    def revoke(self, key: str, error: TokenbusError) -> None:
        """Handles the revocation of a key: the sessions of the key's clients end, and each of their
        streams ends with ``error``."""
        for session in self._table:
            if session.key == key:
                for request in list(session.streams.values()):
                    self._dispatcher.abandon(request, error)
                self._sessions.end(session)


def _check(peer: bytes, frames: list[bytes]) -> None:
    """Checks the frames of a message before any part of the message is decoded. Raises an error if
    the message is malformed."""
    if peer[:1] != b"\0":
        raise RequestError(
            Code.NOT_ALLOWED,
            f"this socket has set its own routing id {peer!r} (ZMQ_ROUTING_ID); leave it unset, "
            "the broker assigns one to each connection",
        )
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise RequestError(
            Code.BAD_MESSAGE,
            f"this message has {len(frames)} frames; a message has a type, a body and at most "
            "one attachment",
        )
    check_body(frames[0], frames[1])
    attached = sum(map(len, frames[2:])) if len(frames) > 2 else 0
    if attached > MAX_ATTACHMENT_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"the attachment of this message has {attached} bytes; {MAX_ATTACHMENT_BYTES} are "
            "allowed",
        )


def _closed_stream(frames: Sequence[bytes]) -> int | None:
    """The stream that an ERROR or a MSG ends; None if the message does not end a stream."""
    if frames[0] not in (b"ERROR", b"MSG"):
        return None
    try:
        closing: _Closing = decode_as(_Closing, frames[1])
    except RequestError:
        return None
    ends = closing.attached is None and closing.input is None
    return closing.stream_id if ends else None


def _ended_streams(frames: Sequence[bytes]) -> set[int]:
    """The streams that a TOKEN message ends, except cancelled streams.

    Bodies that cannot be decoded are skipped. The broker does not decode the bodies that it routes,
    so a malformed body can reach this function.
    """
    if frames[0] != b"TOKEN":
        return set()
    ended: set[int] = set()
    for encoded in frames[1:]:
        try:
            body: TokenBody = decode_as(TokenBody, encoded)
        except RequestError as error:
            log.warning("a TOKEN body that was dropped cannot be decoded: %s", error)
            continue
        # Columns do not contain the last entry of a stream.
        entries = body if isinstance(body, list) else body.entries
        for entry in entries:
            if entry.live == 0 and entry.finish_reason not in (None, "cancelled"):
                ended.add(entry.stream_id)
    return ended


class _StreamIdOnly(Struct):
    stream_id: StreamId


class _Closing(Struct):
    """The fields of an ERROR or a MSG that show whether the message ends a stream, and which."""

    stream_id: StreamId | None = None
    attached: int | None = None
    """``Msg.attached``; None if the message does not answer an ATTACH."""
    input: InputAnswer | None = None
    """``Msg.input``; None if the message does not answer an INPUT."""


def _stream_id(body: bytes) -> int | None:
    """The ``stream_id`` of a refused message, if this field can be decoded."""
    try:
        only: _StreamIdOnly = decode_as(_StreamIdOnly, body)
    except RequestError:
        return None
    return only.stream_id
