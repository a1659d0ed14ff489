"""The clients' side of the broker: checks each message of a client and passes it to its handler."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

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
    Attach,
    Buffer,
    Cancel,
    DrainWorker,
    ModelInfoRequest,
    Msg,
    StatusRequest,
    StreamId,
)
from .admission import ROLES, Admission
from .adoption import Adoption
from .attaches import Attaches
from .buffers import Buffers
from .dispatch import Dispatcher
from .drains import Drains
from .keyring import Keyring
from .outgoing import Outgoing, Outgoings
from .sessions import Sessions
from .settings import BrokerSettings
from .status import Counters, add_metrics, check_lists, live_streams, status_of
from .tables import Session, SessionTable

log = logging.getLogger(__name__)


class Front:
    """Handles what clients send."""

    def __init__(
        self,
        settings: BrokerSettings,
        table: SessionTable,
        sessions: Sessions,
        admission: Admission,
        buffers: Buffers,
        dispatcher: Dispatcher,
        attaches: Attaches,
        adoption: Adoption,
        out: Outgoings,
        counters: Counters,
        drains: Drains,
        started: float,
        keyring: Keyring,
    ) -> None:
        self._attaches = attaches
        self._adoption = adoption
        self._settings = settings
        self._table = table
        self._sessions = sessions
        self._admission = admission
        self._buffers = buffers
        self._dispatcher = dispatcher
        self._out = out
        self._counters = counters
        self._drains = drains
        self._started = started
        self._keyring = keyring

    # --- events ---------------------------------------------------------------------------------

    def on_frames(self, peer: bytes, frames: list[bytes], key: str, now: float) -> None:
        """Handles a message of a client's connection; only the sender receives the error, if
        any."""
        session = self._table.by_peer.get(peer)
        if session is not None and session.key != key:
            # Another client has the routing id: the connection of this session has closed.
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
                kind = body_type(CLIENT_MESSAGES, message_type)
                if session is None:
                    session = self._sessions.open(peer, key, encoding_of(frames[1]), now)
                self._on_request(session, message_type, kind, frames, now)
        except TokenbusError as error:
            self.refuse(peer, frames, error)
        except Exception:
            self._counters.internal_errors += 1
            log.exception("a defect of the broker: a client's message %r failed", message_type[:40])
            defect = ServiceError(
                Code.INTERNAL, "the broker failed to handle this message; its log says why"
            )
            self.refuse(peer, frames, defect)

    def refuse(self, peer: bytes, frames: list[bytes], error: TokenbusError) -> None:
        """Answers a message with the ERROR that says why it is refused."""
        self._counters.refused += 1
        message_type = frames[0] if frames else b""
        body = frames[1] if len(frames) > 1 else b""
        session = self._table.by_peer.get(peer)
        encoding = session.encoding if session is not None else encoding_of(body)
        stream_id = _stream_id(body) if len(body) <= max_body_bytes(message_type) else None
        self._out.refuse(peer, error, stream_id, message_type, encoding)

    def on_slow(self, dropped: Outgoing) -> None:
        """Handles a client that does not read, after a message to it was dropped.

        Its streams end with errors that the client receives when it reads again. Streams that have
        ended already also get an error if their last tokens were in the dropped message.
        """
        session = self._table.by_peer.get(dropped.peer)
        if session is None:
            return
        error = TokenbusError(
            Code.SLOW_CLIENT,
            f"this client left more than {self._settings.max_pending_bytes} bytes unread, so its "
            "streams were ended; read faster, or open fewer streams",
        )
        closed = _closed_stream(dropped.frames)
        if closed is not None and closed not in session.streams:
            closing = dropped.frames
            if closing[0] != b"ERROR":
                closing = b"ERROR", encode_body(error_body(error, closed), session.encoding)
            self._dispatcher.ends.lost(session, closed, closing)
        ended = _ended_streams(dropped.frames) - session.streams.keys()
        if not session.streams and not ended:
            return
        self._counters.slow_clients += 1
        for stream_id in ended:
            self._dispatcher.ends.fail(session, stream_id, error)
        for request in list(session.streams.values()):
            self._dispatcher.abandon(request, error)

    def end_all(self, error: TokenbusError) -> None:
        """Ends every stream with ``error``, because the broker stops."""
        for session in self._table:
            for request in list(session.streams.values()):
                self._dispatcher.abandon(request, error)

    def revoke(self, key: str, error: TokenbusError) -> None:
        """Handles the revocation of a key: the sessions of its clients end, each stream with
        ``error``."""
        for session in self._table:
            if session.key == key:
                for request in list(session.streams.values()):
                    self._dispatcher.abandon(request, error)
                self._sessions.end(session)

    # --- requests -------------------------------------------------------------------------------

    def _on_request(
        self, session: Session, message_type: bytes, kind: Any, frames: list[bytes], now: float
    ) -> None:
        if message_type in ROLES and message_type != b"MODEL_INFO":
            self._admission.submit(session, message_type, frames, now)
            return
        if message_type in OPERATOR_MESSAGES and not self._is_operator(session):
            raise RequestError(
                Code.NOT_ALLOWED,
                f"this client may not send {message_type.decode()}: send it with the operator's "
                "key, or, if the broker has no keys, from a client that is not a gateway; a "
                "SIGTERM also drains a worker",
            )
        message = decode_as(kind, frames[1])
        match message:
            case Cancel():
                self._cancel(session, message, now)
            case Attach():
                self._adoption.on_attach(session, message, now)
            case Buffer():
                self._buffers.on_message(session, message, frames[2:])
            case DrainWorker():
                self._drains.ask(session, message)
            case ModelInfoRequest():
                self._model_info(session, message, frames, now)
            case StatusRequest():
                self._status(session, message, now)
            case _:
                raise AssertionError(f"no code handles {message_type!r}")

    def _status(self, session: Session, message: StatusRequest, now: float) -> None:
        shown = self._shown_to(session, message.own) if message.streams else []
        if shown and not self._is_operator(session):
            check_lists(session, shown, now)
        dispatcher, counters = self._dispatcher, self._counters
        status = status_of(dispatcher, len(self._table), counters, self._started, now)
        if message.streams:
            status.live = live_streams(dispatcher, shown, now)
        if message.metrics:
            add_metrics(status, dispatcher, counters)
        self._out.to_session(session, b"MSG", Msg(stream_id=message.stream_id, status=status))

    def _is_operator(self, session: Session) -> bool:
        """Whether a client may perform operator actions. A client without a key may, because it is
        on the broker's machine. A client with a key may if the key allows it. A gateway may not,
        because its users could then perform them."""
        allowed = self._keyring.client(session.key)
        local = not session.key
        return not session.carries_users and (local or (allowed is not None and allowed.operator))

    def _shown_to(self, session: Session, own: bool) -> list[Session] | None:
        """The sessions whose streams a client may see; None means all.

        The operator sees all sessions, and another client sees the sessions of its key. A gateway,
        or a client that asks for its ``own``, sees only its own session.
        """
        if own or session.carries_users:
            return [session]
        if self._is_operator(session):
            return None
        return self._table.of_key(session.key)

    def _cancel(self, session: Session, message: Cancel, now: float) -> None:
        if self._attaches.on_cancel(session, message.stream_id):
            self._adoption.on_cancel(session, message.stream_id, now)
        else:
            request = session.streams[message.stream_id]
            self._dispatcher.cancel(request, now, message.reason)

    def _model_info(
        self, session: Session, message: ModelInfoRequest, frames: list[bytes], now: float
    ) -> None:
        name = message.model or self._dispatcher.default_model()
        for worker in self._dispatcher.pools.serving("gpu", name).workers.values():
            if name in worker.models:
                answer = Msg(stream_id=message.stream_id, model_info=worker.models[name])
                self._out.to_session(session, b"MSG", answer)
                return
        self._admission.submit(session, b"MODEL_INFO", frames, now)


def _check(peer: bytes, frames: list[bytes]) -> None:
    """Raises an error if a message is malformed, before any part of it is decoded."""
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
            f"{MAX_FRAMES - 2} attachments",
        )
    check_body(frames[0], frames[1])
    attached = sum(map(len, frames[2:])) if len(frames) > 2 else 0
    if attached > MAX_ATTACHMENT_BYTES:
        raise RequestError(
            Code.TOO_LARGE,
            f"the attachments of this message have {attached} bytes together; "
            f"{MAX_ATTACHMENT_BYTES} are allowed",
        )


def _closed_stream(frames: Sequence[bytes]) -> int | None:
    """The stream that an ERROR or a MSG ends; None for another message."""
    if frames[0] not in (b"ERROR", b"MSG"):
        return None
    try:
        closing: _Closing = decode_as(_Closing, frames[1])
    except RequestError:
        return None
    return closing.stream_id if closing.attached is None else None


def _ended_streams(frames: Sequence[bytes]) -> set[int]:
    """The streams that end with a TOKEN message, except those that were cancelled.

    Bodies that cannot be decoded are skipped. The broker routes bodies without decoding them, so a
    malformed body can reach this function.
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
    """The fields of an ERROR or a MSG that show which stream it ends."""

    stream_id: StreamId | None = None
    attached: int | None = None
    """In a MSG that answers an ATTACH: the stream."""


def _stream_id(body: bytes) -> int | None:
    """The stream that a refused message names, if the message can be read that far."""
    try:
        only: _StreamIdOnly = decode_as(_StreamIdOnly, body)
    except RequestError:
        return None
    return only.stream_id
