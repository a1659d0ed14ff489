"""What clients may say, and what the broker answers: sessions, admission, buffers, status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from msgspec import Meta, Struct

from ..protocol.bodies import Encoding, body_type, decode_as, encoding_of, error_body
from ..protocol.buffers import buffer_bytes
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.ids import new_session_token
from ..protocol.messages import (
    CLIENT_MESSAGES,
    ENCODINGS,
    MAX_ATTACHMENT_BYTES,
    MAX_BODY_BYTES,
    MAX_FRAMES,
    PROTOCOL_VERSION,
    Attach,
    Buffer,
    Cancel,
    Hello,
    ModelInfoRequest,
    Msg,
    Name,
    Ping,
    Pong,
    StatusRequest,
    StreamId,
    Welcome,
    module_too_large,
)
from .dispatch import Dispatcher
from .outgoing import Outgoing, Outgoings, Side
from .settings import BrokerSettings
from .status import Counters, status_of
from .tables import Request, Session


class RoutingFields(Struct, kw_only=True):
    """All that the broker reads of a request: it decodes these once, and nothing else."""

    stream_id: StreamId
    model: str = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    buffers: list[Name] = []
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    controller: str | None = None


ROLES = {
    b"GENERATE": "gpu",
    b"SCORE": "gpu",
    b"UPLOAD": "controller",
    b"TAG": "controller",
    b"TAGS": "controller",
    b"DELETE": "controller",
}
"""Requests that a worker answers, and of which role it is."""

Handler = Callable[["Front", Session, list[bytes], float], None]


class Front:
    """The clients' half of the broker."""

    def __init__(
        self,
        settings: BrokerSettings,
        dispatcher: Dispatcher,
        out: Outgoings,
        ids: Iterator[int],
        counters: Counters,
        started: float,
    ) -> None:
        self._settings = settings
        self._dispatcher = dispatcher
        self._out = out
        self._ids = ids
        self._counters = counters
        self._started = started
        self._closing: TokenbusError | None = None
        self.sessions: dict[int, Session] = {}
        self._by_peer: dict[bytes, Session] = {}
        self._by_token: dict[str, Session] = {}

    # --- events ---------------------------------------------------------------------------------

    def on_frames(self, peer: bytes, frames: list[bytes], key: str, now: float) -> None:
        """One message of a client's connection; whatever is wrong with it, only it hears of it."""
        session = self._by_peer.get(peer)
        if session is not None:
            session.last_seen = now
        word = frames[0] if frames else b""
        try:
            self._check(peer, frames)
            if word == b"PING":
                self._ping(peer, session, frames)
            elif word == b"HELLO":
                self._hello(peer, session, frames, key, now)
            elif word == b"BYE":
                if session is not None:
                    self.end(session)
            else:
                kind = body_type(CLIENT_MESSAGES, word)
                if session is None:
                    session = self._open(peer, key, encoding_of(frames[1]), now)
                self._request(session, word, kind, frames, now)
        except TokenbusError as error:
            self._refuse(peer, session, word, frames, error)

    def on_gone(self, peer: bytes, now: float) -> None:
        """A client's connection is gone."""
        session = self._by_peer.pop(peer, None)
        if session is None:
            return
        session.peer = None
        if session.greeted:
            session.detached_at = now
        else:
            self.end(session)

    def on_slow(self, peer: bytes) -> None:
        """A client does not read: its streams end, with errors that it sees when it reads again."""
        session = self._by_peer.get(peer)
        if session is None or not session.streams:
            return
        self._counters.slow_clients += 1
        error = TokenbusError(
            Code.SLOW_CLIENT,
            f"this client left more than {self._settings.max_pending_bytes} bytes unread, so its "
            "streams were ended; read faster, or open fewer streams",
        )
        for request in list(session.streams.values()):
            self._dispatcher.abandon(request, error)

    def tick(self, now: float) -> None:
        """Ends sessions whose client has gone without a word."""
        settings = self._settings
        for session in list(self.sessions.values()):
            silent = now - session.last_seen
            if session.detached_at is not None:
                if now - session.detached_at > settings.session_grace_s:
                    self.end(session)
            elif session.pings and silent > settings.session_expiry_s:
                peer = session.peer
                if peer is not None:
                    self.on_gone(peer, now)
            elif not session.streams and silent > settings.session_idle_s:
                self.end(session)

    def end(self, session: Session) -> None:
        """Ends a session and every stream of it."""
        for request in list(session.streams.values()):
            self._dispatcher.abandon(request)
        self.sessions.pop(session.id, None)
        self._by_token.pop(session.token, None)
        if session.peer is not None:
            self._by_peer.pop(session.peer, None)
            session.peer = None

    def close(self, error: TokenbusError) -> None:
        """No new requests from now on; those that wait for a worker end with ``error``."""
        self._closing = error
        for session in list(self.sessions.values()):
            for request in list(session.streams.values()):
                if request.worker is None:
                    self._dispatcher.abandon(request, error)

    def end_all(self, error: TokenbusError) -> None:
        """The broker stops: every stream ends with ``error``."""
        for session in list(self.sessions.values()):
            for request in list(session.streams.values()):
                self._dispatcher.abandon(request, error)

    # --- verbs ----------------------------------------------------------------------------------

    def _request(
        self, session: Session, word: bytes, kind: Any, frames: list[bytes], now: float
    ) -> None:
        if word in ROLES:
            self._submit(session, word, frames, ROLES[word], now)
            return
        message = decode_as(kind, frames[1])
        match message:
            case Cancel():
                request = session.streams.get(message.stream_id)
                if request is not None:
                    self._dispatcher.cancel(request, message.reason)
            case Attach():
                self._attach(session, message, frames)
            case Buffer():
                self._buffer(session, message, tuple(frames[2:]))
            case ModelInfoRequest():
                self._model_info(session, message, frames, now)
            case StatusRequest():
                status = status_of(
                    self._dispatcher, len(self.sessions), self._counters, self._started, now
                )
                self._out.to_session(
                    session, b"MSG", Msg(stream_id=message.stream_id, status=status)
                )
            case _:
                raise AssertionError(f"no handler for {word!r}")

    def _hello(
        self, peer: bytes, session: Session | None, frames: list[bytes], key: str, now: float
    ) -> None:
        hello: Hello = decode_as(Hello, frames[1])
        if PROTOCOL_VERSION not in hello.versions:
            raise RequestError(
                Code.UNSUPPORTED_VERSION,
                f"this broker speaks version {PROTOCOL_VERSION}, the client {hello.versions}",
                path="$.versions",
            )
        encoding = next((e for e in hello.encodings if e in ENCODINGS), None)
        if encoding is None:
            raise RequestError(
                Code.UNSUPPORTED,
                f"this broker speaks {', '.join(ENCODINGS)}, the client {list(hello.encodings)}",
                path="$.encodings",
            )
        known = self._by_token.get(hello.session) if hello.session else None
        resumed = known is not None and known.key == key
        if known is not None and resumed:
            self._take_over(known, peer, session)
            session = known
        if session is None:
            session = self._open(peer, key, "json", now)
        session.greeted = True
        session.encoding = "msgpack" if encoding == "msgpack" else "json"
        session.pings = "ping" in hello.capabilities
        session.client = hello.client
        session.last_seen = now
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            encoding=encoding,
            session=session.token,
            resumed=resumed,
            streams=list(session.streams) if resumed else [],
            server="tokenbus",
            capabilities=["buffers", "attach", "text"],
            ping_s=self._settings.ping_s,
            expiry_s=self._settings.session_expiry_s,
        )
        self._out.to_session(session, b"WELCOME", welcome)

    def _take_over(self, known: Session, peer: bytes, session: Session | None) -> None:
        if session is not None and session is not known:
            self.end(session)
        if known.peer is not None and known.peer != peer:
            taken = TokenbusError(
                Code.SESSION_TAKEN, "another connection has taken this session over"
            )
            self._out.to_session(known, b"ERROR", error_body(taken))
            self._by_peer.pop(known.peer, None)
        known.peer = peer
        known.detached_at = None
        self._by_peer[peer] = known

    def _ping(self, peer: bytes, session: Session | None, frames: list[bytes]) -> None:
        ping: Ping = decode_as(Ping, frames[1])
        encoding = session.encoding if session is not None else encoding_of(frames[1])
        known = session is not None and session.greeted
        self._out.to_peer(peer, b"PONG", Pong(n=ping.n, session=known), encoding)

    def _submit(
        self, session: Session, word: bytes, frames: list[bytes], role: str, now: float
    ) -> None:
        fields: RoutingFields = decode_as(RoutingFields, frames[1])
        if self._closing is not None:
            raise self._closing
        buffers = [self._buffer_named(session, name, i) for i, name in enumerate(fields.buffers)]
        if word == b"UPLOAD" and (large := module_too_large(sum(map(len, frames[2:])))) is not None:
            raise large
        controller = (fields.controller or "") if word == b"GENERATE" else ""
        if controller:
            self._dispatcher.controller_worker(controller)
        request = Request(
            id=next(self._ids),
            session=session,
            stream_id=fields.stream_id,
            type=word,
            role=role,
            model=fields.model,
            priority=fields.priority,
            deadline=now + fields.timeout_s if fields.timeout_s is not None else None,
            controller=controller,
            frames=[*frames[1:], *buffers, *([session.tenant] if role == "controller" else [])],
        )
        self._admit(request)

    def _admit(self, request: Request) -> None:
        streams = request.session.streams
        if request.stream_id in streams:
            raise RequestError(
                Code.DUPLICATE_STREAM,
                f"stream {request.stream_id} is still running; give each live stream its own id",
                path="$.stream_id",
            )
        if len(streams) >= self._settings.max_streams:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"this session has {len(streams)} live streams, which is the most",
                retry_after_s=1.0,
            )
        self._counters.requests += 1
        self._dispatcher.submit(request)

    def _attach(self, session: Session, message: Attach, frames: list[bytes]) -> None:
        request = session.streams.get(message.stream_id)
        if request is None:
            raise RequestError(
                Code.UNKNOWN_STREAM, f"this session has no live stream {message.stream_id}"
            )
        if request.worker is None:
            self._out.to_session(session, b"MSG", Msg(stream_id=message.stream_id, attached=0))
        else:
            self._out.to_worker(request.worker, b"ATTACH", message, request.id)

    def _buffer(self, session: Session, message: Buffer, attachments: tuple[bytes, ...]) -> None:
        kept = buffer_bytes(message, attachments)
        if kept is None:
            session.buffer_bytes -= len(session.buffers.pop(message.name, b""))
        else:
            self.keep_buffer(session, message.name, kept)

    def keep_buffer(self, session: Session, name: str, kept: bytes) -> None:
        """Keeps a buffer for a session, or raises ``too_large``."""
        total = session.buffer_bytes - len(session.buffers.get(name, b"")) + len(kept)
        if total > self._settings.max_buffer_bytes:
            raise RequestError(
                Code.TOO_LARGE,
                f"the buffers of a session hold {self._settings.max_buffer_bytes} bytes at most; "
                f"with {name!r} they would hold {total}",
            )
        session.buffers[name] = kept
        session.buffer_bytes = total

    @staticmethod
    def _buffer_named(session: Session, name: str, index: int) -> bytes:
        kept = session.buffers.get(name)
        if kept is None:
            raise RequestError(
                Code.UNKNOWN_BUFFER,
                f"this session has no buffer {name!r}; send it with BUFFER first",
                path=f"$.buffers[{index}]",
            )
        return kept

    def _model_info(
        self, session: Session, message: ModelInfoRequest, frames: list[bytes], now: float
    ) -> None:
        name = message.model or self._dispatcher.default_model()
        for worker in self._dispatcher.workers.values():
            if name in worker.models:
                answer = Msg(stream_id=message.stream_id, model_info=worker.models[name])
                self._out.to_session(session, b"MSG", answer)
                return
        self._submit(session, b"MODEL_INFO", frames, "gpu", now)

    # --- inside ---------------------------------------------------------------------------------

    def _check(self, peer: bytes, frames: list[bytes]) -> None:
        if peer[:1] != b"\0":
            raise RequestError(
                Code.NOT_ALLOWED,
                "this socket has a routing id of its own (ZMQ_ROUTING_ID); leave it unset, the "
                "broker gives each connection its own",
            )
        if not 2 <= len(frames) <= MAX_FRAMES:
            raise RequestError(
                Code.BAD_MESSAGE,
                f"a message has a type, a body and at most {MAX_FRAMES - 2} attachments; this one "
                f"has {len(frames)} frames",
            )
        if len(frames[1]) > MAX_BODY_BYTES:
            raise RequestError(
                Code.TOO_LARGE,
                f"a body has at most {MAX_BODY_BYTES} bytes; this one has {len(frames[1])}",
            )
        attached = sum(map(len, frames[2:])) if len(frames) > 2 else 0
        if attached > MAX_ATTACHMENT_BYTES:
            raise RequestError(
                Code.TOO_LARGE,
                f"a message's attachments have at most {MAX_ATTACHMENT_BYTES} bytes together; "
                f"these have {attached}",
            )

    def _open(self, peer: bytes, key: str, encoding: Encoding, now: float) -> Session:
        if len(self.sessions) >= self._settings.max_sessions:
            self._make_room()
        session = Session(
            id=next(self._ids),
            token=new_session_token(),
            key=key,
            encoding=encoding,
            peer=peer,
            last_seen=now,
        )
        self.sessions[session.id] = session
        self._by_peer[peer] = session
        self._by_token[session.token] = session
        return session

    def _make_room(self) -> None:
        idle = [s for s in self.sessions.values() if not s.streams]
        if not idle:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"{len(self.sessions)} sessions are open, which is the most",
                retry_after_s=1.0,
            )
        for session in sorted(idle, key=lambda s: s.last_seen)[: max(1, len(idle) // 10)]:
            self.end(session)

    def _refuse(
        self,
        peer: bytes,
        session: Session | None,
        word: bytes,
        frames: list[bytes],
        error: TokenbusError,
    ) -> None:
        self._counters.refused += 1
        body = frames[1] if len(frames) > 1 else b""
        encoding = session.encoding if session is not None else encoding_of(body)
        stream_id = _stream_id(body) if len(body) <= MAX_BODY_BYTES else None
        self._out.to_peer(peer, b"ERROR", error_body(error, stream_id, word), encoding)

    def forward(self, session_id: int, frames: tuple[bytes, ...], must: bool) -> None:
        """Passes a worker's message on to a client as it is."""
        session = self.sessions.get(session_id)
        if session is not None and session.peer is not None:
            self._out.append(Outgoing(Side.FRONT, session.peer, frames, must))


class _StreamIdOnly(Struct):
    stream_id: StreamId


def _stream_id(body: bytes) -> int | None:
    """The stream that a refused message names, where it can be read that far."""
    try:
        only: _StreamIdOnly = decode_as(_StreamIdOnly, body)
    except RequestError:
        return None
    return only.stream_id
