"""The connection of a client: its session on a socket with a thread of its own.

The thread keeps the session alive and receives tokens, independently of the caller.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from ..protocol.errors import Code, ConnectionLostError, TokenbusError
from ..protocol.frames import Frames
from ..protocol.keys import OwnKey
from ..protocol.messages import CARRIES_USERS
from ..transport.carrier import carrier
from .calls import Call
from .lanes import Delivery
from .session import ClientSession

LINGER_MS = 500
"""How long a closed client continues to send submitted messages, in milliseconds."""


class Connection:
    """Carries the calls of one client to the broker at ``front``.

    ``deliver`` receives their events, on the connection's thread, and must not block. The thread
    starts with the first call. ``key``: the client's key, if the broker has keys. Raises
    AddressError if ``front`` is not a ZeroMQ address.
    """

    def __init__(
        self,
        front: str,
        deliver: Callable[[Delivery], None],
        patience_s: float = 30.0,
        key: OwnKey | None = None,
        session: str | None = None,
    ) -> None:
        """``session``: the token of a named session; None: a new one."""
        self._commands: deque[Callable[[ClientSession, float], None]] = deque()
        self._lock = threading.RLock()
        """Reentrant, because a client may be finalized, and so closed, within any allocation."""
        self._closed: str | None = None
        """Why no more calls are accepted."""
        own = self._session = ClientSession(front, patience_s, time.monotonic(), session)
        peer = _ClientPeer(own, self._commands, deliver, self._end)
        self._carrier = carrier(front, peer, "tokenbus", LINGER_MS, key=key)

    def carry_users(self) -> None:
        """Declares, before the first call, that calls come from other users: none of them has the
        operator's rights."""
        self._session.capabilities = (*self._session.capabilities, CARRIES_USERS)

    def submit(self, call: Call) -> None:
        """Begins a call; raises RuntimeError if calls cannot be carried any more."""
        if self._carrier.forked:
            raise RuntimeError(
                "this client was made before the process forked, and serves only the parent; make "
                "a new client in the child"
            )
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            # This is the first step, as it may fail: a refused call must not be sent together with
            # a later one.
            if not self._carrier.started:
                self._carrier.start()
            self._commands.append(lambda session, now: session.submit(call, now))
        self._carrier.wake()

    def cancel(self, call: Call) -> None:
        """Ends a call whose events are not needed any more. Safe in a finalizer: takes no lock."""
        if self._closed is None:
            self._commands.append(lambda session, now: session.cancel(call))
            self._carrier.wake()

    @property
    def broker(self) -> str:
        """The address of the broker to which it connects at the moment."""
        return self._carrier.address

    def close(self, keep: bool = False) -> None:
        """Ends the session, and every call that has not ended. With ``keep``, the broker keeps the
        session for another client that has its token."""
        if self._carrier.forked:
            return
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "this client is closed"
            self._commands.append(lambda session, now: session.bye(keep))
        self._carrier.close()

    def _end(self, reason: str) -> None:
        """The last action on the connection's thread: no call is accepted afterwards."""
        with self._lock:
            if self._closed is None:
                self._closed = f"this client's connection has ended: {reason}"


class _ClientPeer:
    """The session and the requests of the client's threads, as the connection's peer."""

    def __init__(
        self,
        session: ClientSession,
        commands: deque[Callable[[ClientSession, float], None]],
        deliver: Callable[[Delivery], None],
        ended: Callable[[str], None],
    ) -> None:
        self._session = session
        self._commands = commands
        self._deliver = deliver
        self._ended = ended
        self.connected = session.connected
        self.disconnected = session.disconnected
        self.wait_s = session.wait_s
        self.lost = session.lost

    def receive(self, messages: list[Frames], now: float) -> None:
        """Passes each message to the session, and delivers the events."""
        for frames in messages:
            self._session.on_frames(frames, now)
        self._hand_on()

    def outgoing(self, now: float) -> Iterator[Frames]:
        """The messages of submitted calls and due timers."""
        session = self._session
        while self._commands:
            self._commands.popleft()(session, now)
        session.on_time(now)
        self._hand_on()
        sent, session.outgoing = session.outgoing, []
        yield from sent

    def refused(self, error: TokenbusError) -> None:
        """Ends every call: another attempt would fail for the same reason."""
        session, now = self._session, time.monotonic()
        while self._commands:
            self._commands.popleft()(session, now)
        session.end_all(error)
        self._hand_on()

    def ended(self, reason: str) -> None:
        """Ends every call with an error; otherwise their readers would wait forever."""
        self._ended(reason)
        session, now = self._session, time.monotonic()
        while self._commands:
            self._commands.popleft()(session, now)
        what = f"the connection has ended: {reason}" if reason else "this client was closed"
        session.end_all(ConnectionLostError(Code.CONNECTION_LOST, what))
        self._hand_on()

    def _hand_on(self) -> None:
        session = self._session
        if session.ready:
            ready, session.ready = session.ready, []
            self._deliver(ready)
