"""Runs the session of a client on a thread with its own socket.

The thread keeps the session alive and receives tokens, even while the caller is busy.
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
"""When a client is closed, its last messages are sent for at most this time, in milliseconds."""


class Connection:
    """Sends the calls of one client to a broker.

    ``key``: the client's key; None if the broker does not use keys. ``deliver`` receives the events
    of the calls on the connection's thread, and must not block. The thread starts with the first
    call. Raises AddressError if ``session.front`` is not a ZeroMQ address.
    """

    def __init__(
        self, session: ClientSession, key: OwnKey | None, deliver: Callable[[Delivery], None]
    ) -> None:
        self._commands: deque[Callable[[ClientSession, float], None]] = deque()
        self._lock = threading.RLock()
        """This lock is reentrant, because the garbage collector may close the client in a thread
        that has the lock."""
        self._closed: str | None = None
        """The reason why further calls are refused; None while calls are accepted."""
        self._session = session
        peer = _ClientPeer(session, self._commands, deliver, self._end)
        self._carrier = carrier(session.front, peer, "tokenbus", LINGER_MS, key=key)

    def carry_users(self) -> None:
        """Declares to the broker that the calls come from users without the operator's rights. Must
        be called before the first call."""
        self._session.capabilities = (*self._session.capabilities, CARRIES_USERS)

    def submit(self, call: Call) -> None:
        """Begins a call; raises RuntimeError if the connection does not accept calls any more."""
        if self._carrier.forked:
            raise RuntimeError(
                "this client was created before the process forked, so only the parent can use it; "
                "create a new client in the child"
            )
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            # The thread is started before the call is added to the commands. In the other order, if
            # the start failed, the call would be sent together with a later call.
            if not self._carrier.started:
                self._carrier.start()
            self._commands.append(lambda session, now: session.submit(call, now))
        self._carrier.wake()

    def cancel(self, call: Call) -> None:
        """Ends a call whose events are not needed any more. A finalizer may call this method,
        because the method does not take the lock."""
        if self._closed is None:
            self._commands.append(lambda session, now: session.cancel(call))
            self._carrier.wake()

    def send_input(
        self, call: Call, text: str, answered: Callable[[TokenbusError | None], None]
    ) -> None:
        """Sends an input to the program of a stream. ``answered`` is called on the connection's
        thread (``SentInput.answered``). Raises RuntimeError if the connection is closed."""
        with self._lock:
            if self._closed is not None:
                raise RuntimeError(self._closed)
            self._commands.append(
                lambda session, now: session.send_input(call, text, answered, now)
            )
        self._carrier.wake()

    @property
    def broker(self) -> str:
        """The address of the broker that the connection currently uses."""
        return self._carrier.address

    def close(self, keep: bool = False) -> None:
        """Ends every call that has not ended, and the session. If ``keep`` is true, the session
        does not end at the broker, and another client with its token can take it over."""
        if self._carrier.forked:
            return
        with self._lock:
            if self._closed is not None:
                return
            self._closed = "this client is closed"
            self._commands.append(lambda session, now: session.bye(keep))
        self._carrier.close()

    def _end(self, reason: str) -> None:
        """Refuses all further calls. Called when the connection's thread ends."""
        with self._lock:
            if self._closed is None:
                self._closed = f"this client's connection has ended: {reason}"


class _ClientPeer:
    """Handles the callbacks of the connection's thread (``transport.dealer.Peer``), and runs the
    commands that other threads have submitted."""

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
        """Runs the submitted commands and the due timers; yields the messages to send."""
        session = self._session
        while self._commands:
            self._commands.popleft()(session, now)
        session.on_time(now)
        self._hand_on()
        sent, session.outgoing = session.outgoing, []
        yield from sent

    def refused(self, error: TokenbusError) -> None:
        """Ends every call, because the broker has refused the connection. The broker would refuse
        the next connection for the same reason."""
        session, now = self._session, time.monotonic()
        while self._commands:
            self._commands.popleft()(session, now)
        session.end_all(error)
        self._hand_on()

    def ended(self, reason: str) -> None:
        """Ends every call with an error. Without this error, the readers would wait forever."""
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
