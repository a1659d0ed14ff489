"""Opens the sessions of clients, resumes sessions on new connections, and ends sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ..protocol.bodies import Encoding, decode_as, encoding_of, error_body
from ..protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ..protocol.ids import is_session_token, new_session_token, session_id
from ..protocol.messages import (
    ENCODINGS,
    PROTOCOL_VERSION,
    Bye,
    Hello,
    Ping,
    Pong,
    Welcome,
)
from ..protocol.shares import fits_share
from .adoption import Adoption
from .buffers import Buffers
from .dispatch import Dispatcher
from .ends import Ends
from .request import Attachment, Request
from .session import Session
from .state import BrokerState
from .stream_log import End
from .sweep import Sweep

SESSIONS_AT_ONCE = 500
"""Minimum number of sessions that one tick checks. With very many sessions, a tick checks more."""
MAX_SEARCHED = 256
"""Maximum number of sessions that one HELLO checks to find idle sessions if the table is full."""
MAX_ENDED = 250
"""Maximum number of streams and stored ends of ended sessions that are removed between two
ticks."""


class Sessions:
    """Opens, resumes and ends the sessions of the table."""

    def __init__(
        self,
        state: BrokerState,
        dispatcher: Dispatcher,
        buffers: Buffers,
        adoption: Adoption,
        ends: Ends,
    ) -> None:
        self._state = state
        self._settings = state.settings
        self._table = state.sessions
        self._out = state.out
        self._dispatcher = dispatcher
        self._buffers = buffers
        self._adoption = adoption
        self._ends = ends
        self._visited = Sweep(state.sessions.by_id, SESSIONS_AT_ONCE)
        self._ending: deque[tuple[Session, Request | End]] = deque()
        """Streams and stored ends of ended sessions. A tick removes some of them."""
        self._room = MAX_ENDED
        """Number of elements of ``_ending`` that may still be removed before the next tick."""

    def open(
        self, peer: bytes, key: str, encoding: Encoding, now: float, chosen: str | None = None
    ) -> Session:
        """Opens a session on the connection ``peer``. ``chosen``: the token that the client
        requests. The session gets this token if the token is valid and no session of ``key`` has
        it.

        Raises ``client_limit`` if the sessions of ``key`` have reached the key's share, and
        ``queue_full`` if the table is full.
        """
        self._check_room(key)
        token = chosen if chosen and self._is_free(chosen, key) else new_session_token()
        number = session_id(token, key)
        session = Session(
            id=number,
            token=token,
            key=key,
            encoding=encoding,
            peer=peer,
            last_seen=now,
        )
        self._table.add(session)
        return session

    def _is_free(self, token: str, key: str) -> bool:
        """Whether a client with this key may begin a session with a token of its own choice."""
        return is_session_token(token) and session_id(token, key) not in self._table.by_id

    def hello(
        self, peer: bytes, session: Session | None, frames: list[bytes], key: str, now: float
    ) -> None:
        """Opens a session or takes one over, and answers with WELCOME."""
        hello: Hello = decode_as(Hello, frames[1])
        encoding = _encoding_of(hello)
        # If the session still has this connection and is not ``displaced``, the client has not used
        # another broker in the meantime.
        here = session is not None and session.token == hello.session and not session.displaced
        hello.elsewhere = hello.elsewhere and not here
        known = self._known(hello, key, peer, now)
        if known is not None:
            self._take_over(known, peer, session)
            session = known
        if session is None:
            session = self.open(peer, key, "json", now, hello.session if hello.begin else None)
        session.greet(hello, encoding, now)
        session.keep_s = min(hello.keep_s, self._settings.max_keep_s)
        recovering = self._adoption.waits_for(session)
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            encoding=encoding,
            session=session.token,
            # A session of an earlier run or of another broker does not count as resumed, because
            # its buffers are lost.
            resumed=known is not None and not recovering and not hello.elsewhere,
            streams=[*session.streams, *session.log.ends] if known is not None else [],
            recovering=recovering,
            server="tokenbus",
            capabilities=["buffers", "attach", "text", *session.granted],
            ping_s=self._settings.ping_s,
            expiry_s=self._settings.session_expiry_s,
        )
        self._out.to_session(session, b"WELCOME", welcome)

    def _known(self, hello: Hello, key: str, peer: bytes, now: float) -> Session | None:
        """Finds the session that a HELLO takes over; None if the client begins a new session."""
        if not hello.session:
            return None
        known = self._table.of(hello.session, key)
        recovers = "recover" in hello.capabilities
        if known is not None and not (hello.elsewhere and recovers):
            return known
        if not recovers:
            return None
        if known is None:
            self._check_room(key)
        if hello.elsewhere:
            if known is not None:
                self._buffers.drop_all(known)
            return self._adoption.pick_up(hello.session, key, peer, now)
        return self._adoption.claim(hello.session, key, now)

    def ping(self, peer: bytes, session: Session | None, frames: list[bytes]) -> None:
        """Answers a PING with PONG.

        The PONG makes the client send HELLO again if its session is unknown, or if another broker
        has claimed the session's streams while the client was connected here
        (``Session.displaced``).
        """
        ping: Ping = decode_as(Ping, frames[1])
        encoding = session.encoding if session is not None else encoding_of(frames[1])
        known = session is not None and session.greeted and not session.displaced
        self._table.unread.add(peer, 0)
        pong = Pong(n=ping.n, session=known)
        if session is not None and session.acks:
            self._ends.acknowledge(session, ping.ack)
            pong.position = session.log.position
        self._out.to_peer(peer, b"PONG", pong, encoding)

    def bye(self, peer: bytes, session: Session | None, frames: list[bytes], now: float) -> None:
        """Handles BYE: ends the session, or with ``keep`` only its connection."""
        bye: Bye = decode_as(Bye, frames[1])
        if bye.keep:
            self.on_gone(peer, now)
        elif session is not None:
            self.end(session)

    def on_gone(self, peer: bytes, now: float) -> None:
        """Handles the end of a connection: the connection's session ends, or waits for some time
        until its client connects again."""
        session = self._table.by_peer.get(peer)
        if session is None:
            return
        self._table.detach(session)
        if session.greeted:
            session.detached_at = now
        else:
            self.end(session)

    @property
    def behind(self) -> bool:
        """Whether streams or stored ends of ended sessions are left for the next tick."""
        return bool(self._ending)

    def renew(self, now: float) -> None:
        """Renews all sessions after this process was paused, because messages that clients sent
        during the pause have not been read yet."""
        for session in self._table:
            session.last_seen = now
            if session.detached_at is not None:
                session.detached_at = now

    def tick(self, now: float) -> None:
        """Ends sessions that are idle or were not resumed in time, and checks the connections of
        silent clients."""
        settings = self._settings
        self._room = MAX_ENDED
        self._end_streams()
        for session in self._visited.part():
            if self._table.by_id.get(session.id) is not session:
                continue
            if session.log.ends:
                self._ends.tick(session)
            silent = now - session.last_seen
            if session.detached_at is not None:
                grace_s = settings.session_cut_s if session.cut else settings.session_grace_s
                if now - session.detached_at > max(grace_s, session.keep_s):
                    self.end(session)
            elif session.pings and silent > settings.session_expiry_s / 2:
                self._look(session, silent, now)
            elif not session.streams and silent > settings.session_idle_s:
                self.end(session)

    def _look(self, session: Session, silent: float, now: float) -> None:
        """Checks the connection of a silent client.

        First, the broker sends a PONG to the client. If the client has exited, sending fails, and
        the broker notices that the connection has closed. If the client stays silent, the
        connection is removed and the session waits, because the client may be paused, or its link
        may be cut.
        """
        peer = session.peer
        if peer is None:
            return
        if session.probed != session.last_seen:
            session.probed = session.last_seen
            self._out.to_peer(peer, b"PONG", Pong(session=True), session.encoding)
        elif silent > self._settings.session_expiry_s:
            self.on_gone(peer, now)
            session.cut = True

    def end(self, session: Session) -> None:
        """Ends a session and every stream of it; if there are many streams, some end in later
        ticks."""
        self._table.remove(session)
        self._adoption.on_ended(session)
        self._buffers.drop_all(session)
        ending: Iterable[Request | End] = (
            *session.streams.values(),
            *session.log.ends.values(),
        )
        self._ending.extend((session, each) for each in ending)
        self._end_streams()

    def _end_streams(self) -> None:
        """Removes streams and stored ends of sessions that have ended."""
        while self._ending and self._room > 0:
            self._room -= 1
            session, ending = self._ending.popleft()
            if isinstance(ending, End):
                session.log.drop(ending)
            elif self._state.requests.get(ending.id) is ending:
                self._dispatcher.abandon(ending)

    def _take_over(self, known: Session, peer: bytes, session: Session | None) -> None:
        if session is not None and session is not known:
            self.end(session)
        if known.peer != peer:
            taken = TokenbusError(
                Code.SESSION_TAKEN, "another connection has taken this session over"
            )
            self._out.to_session(known, b"ERROR", error_body(taken))
            known.log.on_taken_over(self._state.now)
        # Incomplete answers are dropped, because the client attaches again to each stream whose end
        # it has not received.
        known.log.answering.clear()
        known.log.reading = None
        self._table.attach(known, peer)
        known.detached_at, known.cut = None, False
        for request in known.streams.values():
            if request.attachment is Attachment.ATTACHED:
                request.attachment = Attachment.RESUMED

    def _check_room(self, key: str) -> None:
        """Makes room for one more session of a key. If the table is full, or the key has its whole
        share, idle sessions end. Raises UnavailableError if no session is idle."""
        most = self._settings.max_sessions
        own = self._table.num_of_key(key)
        if key and not fits_share(own, min(len(self._table), most - 1), most):
            self._make_room(
                key,
                Code.CLIENT_LIMIT,
                f"this key has {own} sessions, all with live streams; of the broker's {most} "
                "sessions, one key may have at most half of those that other keys leave free",
            )
        elif len(self._table) >= most:
            keys = self._table.keys()
            crowd = max(keys, key=keys.__getitem__, default="")
            self._make_room(
                crowd,
                Code.QUEUE_FULL,
                f"this broker has {most} sessions, its maximum, and all of them have live streams",
            )

    def _make_room(self, key: str, code: Code, full: str) -> None:
        """Examines some sessions of a key, or of all clients if ``key`` is empty, and ends those
        that have been idle for longest. Raises an error if all examined sessions have streams. The
        next call examines other sessions."""
        idle = [s for s in self._table.some(key, MAX_SEARCHED) if not s.streams]
        if not idle:
            raise UnavailableError(code, f"{full}; try again later", retry_after_s=1.0)
        for session in sorted(idle, key=lambda s: s.last_seen)[: max(1, len(idle) // 10)]:
            self.end(session)


def _encoding_of(hello: Hello) -> Encoding:
    """The encoding of a client's session; raises RequestError if the broker supports none of the
    client's versions or encodings."""
    if PROTOCOL_VERSION not in hello.versions:
        raise RequestError(
            Code.UNSUPPORTED_VERSION,
            f"none of the versions {list(hello.versions)} is supported; this broker speaks "
            f"version {PROTOCOL_VERSION}",
            path="$.versions",
        )
    for encoding in hello.encodings:
        if encoding in ENCODINGS:
            return "msgpack" if encoding == "msgpack" else "json"
    raise RequestError(
        Code.UNSUPPORTED,
        f"none of the encodings {list(hello.encodings)} is supported; this broker speaks "
        f"{' and '.join(ENCODINGS)}",
        path="$.encodings",
    )
