"""The connection of a client: its session on a socket with a thread of its own.

So the session is kept alive, and tokens are taken off the network, whatever the caller does.
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
"""How long a client that is closed goes on sending what was submitted."""


class Connection:
    """Carries the calls of one client to the broker at ``front``.

    ``deliver`` receives their events, on the connection's thread, and must not block. The thread
    starts with the first call. ``key``: the client's, where the broker has keys. Raises
    AddressError where ``front`` is not a ZeroMQ address.
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
        """Reentrant, as a client may be finalized, and so closed, within any allocation."""
        self._closed: str | None = None
        """Why no more calls are taken."""
        own = self._session = ClientSession(front, patience_s, time.monotonic(), session)
        peer = _ClientPeer(own, self._commands, deliver, self._end)
        self._carrier = carrier(front, peer, "tokenbus", LINGER_MS, key=key)

    def carry_users(self) -> None:
        """Declares that calls are of other users, before the first one: none is the operator's."""
        self._session.capabilities = (*self._session.capabilities, CARRIES_USERS)

    def submit(self, call: Call) -> None:
        """Begins a call; raises RuntimeError where no call can be carried."""
        if self._carrier.forked:
            raise RuntimeError(
                "this client was made before the process forked, and serves only the parent; make "
                "a new client in the child"
            )
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            # First, as it may fail: a call that was refused must not be sent by a later one.
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
        """The address of the broker that it connects to at the moment."""
        return self._carrier.address

    def close(self, keep: bool = False) -> None:
        """Ends the session, and every call that has not ended; with ``keep``, the broker keeps the
        session for another client that names it."""
        if self._carrier.forked:
            return
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "this client is closed"
            self._commands.append(lambda session, now: session.bye(keep))
        self._carrier.close()

    def _end(self, reason: str) -> None:
        """The last thing on the connection's thread: from here on no call is taken."""
        with self._lock:
            if self._closed is None:
                self._closed = f"this client's connection has ended: {reason}"


class _ClientPeer:
    """The session, and what the client's threads want of it, as the connection sees them."""

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
        """Lets the session see each message, and hands the events on."""
        for frames in messages:
            self._session.on_frames(frames, now)
        self._hand_on()

    def outgoing(self, now: float) -> Iterator[Frames]:
        """Submitted calls, and due timers."""
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
        """Ends every call with an error; without this, their readers would wait for ever."""
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
