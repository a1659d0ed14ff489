"""A DEALER socket with a thread of its own. The thread sends and receives the messages of a
``Peer``.

A ``Peer`` is one side of the protocol: a worker's lease or a client's session. Its code does not
depend on sockets. A ``Dealer`` is the peer's connection to the broker. It owns the socket, and does
not depend on the content of messages. Other threads can wake it. It reconnects with growing pauses,
sends the remaining messages before it closes, and ends if its ZeroMQ context is terminated.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import select
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import zmq
from zmq.backend import Socket as BackendSocket

from ..protocol.endpoints import separate
from ..protocol.errors import Code, RequestError, TokenbusError
from ..protocol.frames import Frames
from ..protocol.keys import OwnKey
from ..protocol.packing import pack, unpack
from .greeting import mechanism_of

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]

_SEND = BackendSocket.send
_RECV = BackendSocket.recv
_GET: Callable[[zmq.Socket[bytes], int], Any] = BackendSocket.get
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

RECEIVE_AT_ONCE = 256
"""Maximum number of messages that are received before the peer handles them and may send."""
PAUSES_S = (0.05, 1.0)
"""The pause after the first of consecutive failures, and the longest pause, in seconds. Each pause
is twice the previous one."""
ELSEWHERE_S = 0.2
"""The longest pause before a connection to another broker, in seconds."""
OFFLINE_TICK_S = 0.1
"""Interval between checks of the peer's deadlines during a pause, in seconds."""
NEVER_MS = 600_000
"""Time in milliseconds after which ZeroMQ would reconnect a socket. ZeroMQ must never reconnect a
socket, because the queued messages would then reach a broker that has not received the peer's first
message. So the time is long: the dealer closes a socket without a connection much earlier."""
MIN_WAIT_S = 0.001
"""The shortest time that the thread waits for messages, in seconds."""
JOIN_S = 5.0
"""How long ``close`` waits for the thread, in seconds."""


_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
"""Events that show that the socket has no connection."""
_EVENT = struct.Struct("=hi")
"""The first frame of a message from a socket's monitor: an event and a value
(zmq_socket_monitor)."""
_TCP = re.compile(r"[][0-9A-Za-z:][][0-9A-Za-z.:%;_*-]*:[0-9]+", re.ASCII)
"""Matches the part of a TCP address after the scheme. The rules are those that ZeroMQ checks before
it resolves the host, and one more: the address has a host. ZeroMQ accepts an address without a
host, but never connects to it."""
MAX_PATH_BYTES = 107
"""Maximum number of bytes of the path of a Unix socket."""
CLOSED_OFTEN = 3
"""The dealer counts connections that a broker with keys closes during the handshake without a
reason. After this number of such connections in a row, the dealer reports that the key file is for
another broker. A broker that stops closes only one or two connections in this way."""


class AddressError(ValueError):
    """The text given as the broker's address is not a valid ZeroMQ address."""


class HandshakeError(OSError):
    """The broker does not accept the connection. The dealer then calls ``Peer.refused`` with
    ``refusal``."""

    def __init__(self, refusal: TokenbusError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class GoneError(OSError):
    """The broker has closed the connection, or cannot be reached."""


def open_dealer(
    context: Context, address: str, pipe_messages: int = 0, key: OwnKey | None = None
) -> zmq.Socket[bytes]:
    """A DEALER socket that connects to ``address``, and reconnects if necessary. ``key``: the key
    with which the socket connects, if any.

    ``pipe_messages``: the maximum number of messages that ZeroMQ queues in each direction; 0 if the
    number is not bounded. Raises AddressError if the address is not valid.
    """
    check_address(address)
    socket = make_dealer(context, pipe_messages, key)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    try:
        socket.connect(address)
    except Exception:
        socket.close()
        raise
    return socket


def make_dealer(
    context: Context, pipe_messages: int = 0, key: OwnKey | None = None
) -> zmq.Socket[bytes]:
    """A DEALER socket that is not connected yet, and does not reconnect by itself."""
    socket = context.socket(zmq.DEALER)
    if key is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(key.broker))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(key.public))
        socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(key.secret))
    socket.setsockopt(zmq.SNDHWM, pipe_messages)
    socket.setsockopt(zmq.RCVHWM, pipe_messages)
    socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def check_address(address: str) -> None:
    """Raises AddressError if an address is not valid. ZeroMQ checks addresses only when a socket
    connects, and each connection costs the broker a handshake."""
    scheme, _, place = address.partition("://")
    if scheme == "tcp" and _TCP.fullmatch(place):
        port = place.rpartition(":")[2]
        # ZeroMQ accepts a larger port number, but then never connects.
        if len(port) <= 5 and 1 <= int(port) <= 65535:
            return
        raise AddressError(f"{address!r} has no valid port; use a port from 1 to 65535")
    if scheme == "ipc" and place not in ("", "@") and len(os.fsencode(place)) <= MAX_PATH_BYTES:
        return
    raise AddressError(
        f"{address!r} is not a valid address of a broker; use one like tcp://127.0.0.1:5555"
    )


def receive(socket: zmq.Socket[bytes]) -> Frames | None:
    """The next message that has arrived; None if no message waits.

    The function calls pyzmq's backend, which takes 0.7 µs for a frame; ``recv_multipart`` takes 1.1
    µs. Frames are received without a copy, because only an uncopied frame shows whether another
    frame of the message follows.
    """
    try:
        frame = _RECV(socket, _NOBLOCK, False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more:
        frame = _RECV(socket, _NOBLOCK, False)
        frames.append(frame.bytes)
    return frames


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has arrived on the socket."""
    return bool(_GET(socket, _EVENTS) & _POLLIN)


def send(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Sends a message without waiting; raises zmq.Again if the queue is full."""
    more = _MORE
    for frame in frames[:-1]:
        _SEND(socket, frame, more)
    _SEND(socket, frames[-1], _NOBLOCK)


class _Events:
    """Detects that the handshake of a socket has failed, or that the socket's connection was lost.

    The object must be created before the socket connects, because ZeroMQ reports an event only
    once.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], address: str, key: OwnKey | None, closed: Counter[str]
    ) -> None:
        """``closed``: for each address, the number of consecutive connections that the broker has
        closed during the handshake without a reason."""
        self._socket = socket
        self._address = address
        self._key = key
        self._closed = closed
        self._events: zmq.Socket[bytes] = socket.get_monitor_socket(_HANDSHAKE_FAILED | _LOST)
        self.fd = int(self._events.getsockopt(zmq.FD))

    def check(self) -> None:
        """Raises HandshakeError if the broker has refused the connection, GoneError if the
        connection is lost."""
        while (event := receive(self._events)) is not None:
            number, value = _EVENT.unpack(event[0])
            if number & _LOST:
                raise GoneError("the broker closed the connection or cannot be reached")
            refusal = self._refusal(number, value)
            if refusal is not None:
                raise HandshakeError(RequestError(Code.NOT_ALLOWED, refusal))

    def close(self) -> None:
        """Stops watching the socket. The caller must hold the lock ``Dealer._turn``."""
        self._socket.disable_monitor()
        self._events.close(0)

    def _refusal(self, event: int, value: int) -> str | None:
        """An error message for a failed handshake; None if the failure may be temporary.

        A side's security mechanism says whether it uses keys. If only one side uses keys, the
        broker usually closes the connection before it has sent its mechanism. ZeroMQ then reports
        no reason. So this method requests the broker's mechanism (``greeting.py``).
        """
        broker, key = f"the broker at {self._address}", self._key
        mechanism = None
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            mechanism = mechanism_of(self._address)
        mismatch = (
            event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            and value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        )
        if key is None:
            if not mismatch and mechanism != "CURVE":
                return None
            return (
                f"{broker} accepts only connections with a key; if its run directory is on this "
                "machine, set TOKENBUS_RUN_DIR to the directory; if not, make a key file on the "
                "broker's machine with 'tokenbus keys new NAME' and set TOKENBUS_KEY to the file"
            )
        shown = f"the key of the {key.role} {key.name!r} ({key.public})"
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                f"{broker} refuses {shown}: the key was never allowed or is revoked, or it has "
                "another role than the address; 'tokenbus keys list' on the broker's machine "
                "prints the allowed keys"
            )
        if mismatch or mechanism == "NULL":
            return (
                f"{broker} has no keys, but {shown} requires an encrypted connection; connect "
                "without a key, or make keys on the broker's machine with 'tokenbus keys new'"
            )
        if mechanism != "CURVE":
            return None
        self._closed[self._address] += 1
        if self._closed[self._address] < CLOSED_OFTEN:
            return None
        return (
            f"{broker} closes each connection: it does not have the key that the file of {shown} "
            f"expects; the file names {key.broker}, and 'tokenbus keys list' on the broker's "
            "machine prints the broker's key"
        )


class Peer(Protocol):
    """One side of the protocol. All methods are called on the connection's thread.

    If a method raises an exception while a socket is open, the socket is closed, and a new socket
    is opened after a pause. If a method raises an exception during the pause, it is only logged.
    Times are seconds of the monotonic clock.
    """

    def connected(self, now: float) -> None:
        """Called when a new socket was opened. The peer must discard messages that were not sent on
        the old socket."""

    def disconnected(self, now: float) -> None:
        """Called when the connection has failed and the socket was closed. A pause follows. Until
        the next ``connected``, messages that the peer yields are discarded."""

    def receive(self, messages: list[Frames], now: float) -> None:
        """Called with the messages that have arrived, in order. The list is never empty."""

    def outgoing(self, now: float) -> Iterable[Frames]:
        """Yields the messages to send now, and checks the peer's deadlines.

        Called after ``receive``, after each wake-up, and when ``wait_s`` has passed. Also called
        during a pause between two sockets. The messages are discarded in this case.
        """

    def wait_s(self, now: float) -> float:
        """Seconds after which ``outgoing`` must be called again. If a wake-up or a message comes
        earlier, ``outgoing`` is called earlier."""

    def lost(self, now: float) -> bool:
        """Whether the connection counts as lost, because the broker was silent for too long. The
        dealer then opens a new socket."""

    def refused(self, error: TokenbusError) -> None:
        """Called when the broker does not accept the connection. The next connection is opened
        after a pause."""

    def ended(self, reason: str) -> None:
        """Called when the thread ends. ``reason`` is empty if the owner closed the connection."""


class Dealer:
    """Connects ``peer`` to the broker at ``address``; ``name`` is the name of the thread.

    ``address`` may be several addresses of brokers, separated by commas. The dealer connects to one
    of these brokers. If this broker fails, is silent or refuses the connection, the dealer connects
    to the next broker.

    ZeroMQ's queue of sent messages is not bounded, so a send does not block. The queue is discarded
    when the socket is closed. If the broker does not read, the socket is closed when the peer
    reports ``lost``. ``linger_ms``: maximum time in milliseconds that ``close`` spends on sending
    the remaining messages.

    The connection's thread receives messages and checks deadlines. Any thread may call ``send``,
    because sending a message takes less time than waking the connection's thread.

    ``packed``: whether messages are packed, as between broker and workers
    (``protocol/packing.py``). ``key``: the key for the connection, or None. Raises AddressError if
    an address is not valid.
    """

    def __init__(
        self,
        address: str,
        peer: Peer,
        name: str,
        linger_ms: int,
        *,
        packed: bool = False,
        key: OwnKey | None = None,
    ) -> None:
        self._addresses = separate(address)
        # A random start spreads the clients over the brokers.
        self._at = random.randrange(len(self._addresses))
        self._key = key
        self._peer = peer
        self._name = name
        self._linger_ms = linger_ms
        self._packed = packed
        self._context: Context = zmq.Context.instance()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._turn = threading.Lock()
        """A lock that a thread holds while it uses the socket."""
        self._socket: zmq.Socket[bytes] | None = None
        """The socket, as long as other threads may send on it. None at all other times."""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._received = False
        self._dropped = ""
        """The last error for which a received message was dropped. If further messages have the
        same error, they are not logged."""
        self._refusals = Counter[str]()
        for valid in self._addresses:
            check_address(valid)

    @property
    def address(self) -> str:
        """The address of the broker to which this dealer connects at the moment."""
        return self._addresses[self._at]

    @property
    def started(self) -> bool:
        """Whether the thread was started."""
        return self._thread is not None

    @property
    def forked(self) -> bool:
        """Whether this object is a copy in a forked process, in which no thread serves the
        connection."""
        return os.getpid() != self._process

    def start(self) -> None:
        """Starts the thread, which opens the socket.

        Raises RuntimeError if the system cannot start another thread; ``start`` may then be called
        again.
        """
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        thread.start()
        self._thread = thread

    def wake(self) -> None:
        """Makes the connection's thread call the peer's ``outgoing`` soon. Any thread and any
        finalizer may call this method."""
        with contextlib.suppress(OSError):
            os.write(self._wake_w, b"!")

    def send(self, queue: deque[Frames]) -> None:
        """Sends the messages of ``queue`` in order, on the calling thread if no other thread uses
        the socket.

        If another thread uses the socket, the connection's thread soon calls the peer's
        ``outgoing``, which must yield the messages of ``queue``. Any thread may call ``send``.
        """
        if self._turn.acquire(blocking=False):
            try:
                if self._sent_here(queue):
                    return
            finally:
                self._turn.release()
        self.wake()

    def _sent_here(self, queue: deque[Frames]) -> bool:
        """Sends the queue on the calling thread. Returns False if the connection's thread must be
        woken: messages are left in the queue, or messages may have arrived."""
        socket = self._socket
        if socket is None:
            return False
        try:
            while queue:
                frames = queue[0]
                send(socket, pack(frames) if self._packed else frames)
                queue.popleft()
            # A send can clear the signal that a message has arrived. The connection's thread must
            # then be woken.
            return not readable(socket)
        except zmq.ZMQError:
            # The connection's thread will get the same error, and handles it.
            return False

    def close(self) -> None:
        """Sends the peer's remaining messages, closes the socket and ends the thread."""
        self._closing = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=JOIN_S)

    def __del__(self) -> None:
        # ``close`` does not close the pipe, because another thread may be about to write to it.
        for end in ("_wake_r", "_wake_w"):
            if hasattr(self, end):
                os.close(getattr(self, end))

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        reason = "its thread failed"
        try:
            self._keep_connected()
            reason = ""
        except zmq.ContextTerminated:
            reason = "the ZeroMQ context was terminated"
        finally:
            self._peer.ended(reason)

    def _keep_connected(self) -> None:
        first, longest = PAUSES_S
        if len(self._addresses) > 1:
            longest = ELSEWHERE_S
        pause_s = 0.0
        while not self._closing:
            self._received = False
            try:
                self._serve()
                self._next()
                continue
            except zmq.ContextTerminated:
                raise
            except Exception as error:
                if self._context.closed:
                    raise zmq.ContextTerminated from None
                pause_s = first if self._received else min(pause_s * 2 or first, longest)
                refused = error.refusal if isinstance(error, HandshakeError) else None
                level = logging.WARNING
                if refused is not None or isinstance(error, GoneError):
                    # The peer itself logs a refusal. While a broker is down, failures after the
                    # first are logged at the level DEBUG, because they may continue for long.
                    level = logging.INFO if self._received or refused else logging.DEBUG
                log.log(
                    level,
                    "the connection to %s failed (%s); opening a new one in %g s",
                    self.address,
                    error,
                    pause_s,
                    # For an error of the operating system, the message suffices without traceback.
                    exc_info=not isinstance(error, OSError | zmq.ZMQError),
                )
            self._next()
            try:
                if refused is not None:
                    self._peer.refused(refused)
                self._peer.disconnected(time.monotonic())
            except Exception:
                log.exception("the loss of the connection to %s was not handled", self.address)
            self._pause(pause_s)

    def _next(self) -> None:
        """Selects the next broker of the list for the next connection."""
        self._at = (self._at + 1) % len(self._addresses)

    def _pause(self, pause_s: float) -> None:
        """Waits between two sockets. Meanwhile, the peer's deadlines are still checked, and the
        peer's messages are discarded."""
        until = time.monotonic() + pause_s
        while (left_s := until - time.monotonic()) > 0 and not self._closing:
            poller = zmq.Poller()
            poller.register(self._wake_r, zmq.POLLIN)
            poller.poll(int(min(left_s, OFFLINE_TICK_S) * 1000) + 1)
            self._clear_wake()
            try:
                for _ in self._peer.outgoing(time.monotonic()):
                    pass
            except Exception:
                log.exception(
                    "the peer's deadlines were not checked while disconnected from %s", self.address
                )

    def _serve(self) -> None:
        """Serves one socket, until ``close`` or until the peer reports ``lost``."""
        socket = make_dealer(self._context, key=self._key)
        try:
            events = _Events(socket, self.address, self._key, self._refusals)
        except Exception:
            socket.close()
            raise
        try:
            socket.connect(self.address)
            self._exchange(socket, events)
        finally:
            with self._turn:
                self._socket = None
                events.close()
                socket.close(linger=self._linger_ms if self._closing else 0)

    def _exchange(self, socket: zmq.Socket[bytes], events: _Events) -> None:
        # zmq.Poller would use the socket itself, which is not safe while another thread sends on
        # it.
        poller = select.poll()
        poller.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        poller.register(self._wake_r, select.POLLIN)
        poller.register(events.fd, select.POLLIN)
        with self._turn:
            self._peer.connected(time.monotonic())
        while True:
            # A refusal is reported before the peer checks its deadlines. If the deadlines were
            # checked first, a peer on a busy machine could report a timeout instead of the refusal.
            try:
                events.check()
            except GoneError:
                with self._turn:
                    self._take_rest(socket)
                raise
            try:
                with self._turn:
                    wait_s = self._take_turn(socket)
            except zmq.Again:
                # If the connection was refused, the socket's queue counts as full. So each send
                # raises ``zmq.Again``.
                events.check()
                raise
            if wait_s is None:
                return
            if wait_s and any(fd == self._wake_r for fd, _ in poller.poll(1000 * wait_s)):
                self._clear_wake()

    def _take_turn(self, socket: zmq.Socket[bytes]) -> float | None:
        """Receives and sends messages. Returns how many seconds to wait for the next event, or None
        if the socket is to be closed."""
        peer = self._peer
        messages = self._receive(socket)
        now = time.monotonic()
        if messages:
            self._received = True
            self._refusals.pop(self.address, None)
            peer.receive(messages, now)
        # The flag ``_closing`` is read before ``outgoing`` is called. So all messages that were
        # queued before ``close`` are sent.
        closing = self._closing
        for frames in peer.outgoing(now):
            send(socket, pack(frames) if self._packed else frames)
        # The peer's first message has been sent, so other threads may send from now on.
        self._socket = socket
        if closing or peer.lost(now):
            return None
        return 0.0 if readable(socket) else max(peer.wait_s(now), MIN_WAIT_S)

    def _take_rest(self, socket: zmq.Socket[bytes]) -> None:
        """Receives the messages that arrived before the connection was lost."""
        while messages := self._receive(socket):
            self._received = True
            self._peer.receive(messages, time.monotonic())

    def _receive(self, socket: zmq.Socket[bytes]) -> list[Frames]:
        """The messages that have arrived, up to ``RECEIVE_AT_ONCE``."""
        messages: list[Frames] = []
        while len(messages) < RECEIVE_AT_ONCE:
            # A check for a message takes half as long as a receive that fails. Usually at most one
            # message has arrived, so the check saves time.
            if len(messages) < 2 and not readable(socket):
                break
            frames = receive(socket)
            if frames is None:
                break
            messages.append(frames)
        return self._unpacked(messages) if self._packed else messages

    def _unpacked(self, messages: list[Frames]) -> list[Frames]:
        unpacked = []
        for frames in messages:
            try:
                unpacked.append(unpack(frames))
            except RequestError as error:
                # If the address belongs to a wrong broker, the same answer arrives about once a
                # second.
                if error.message != self._dropped:
                    self._dropped = error.message
                    log.warning("dropped a message from the broker at %s: %s", self.address, error)
        return unpacked

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)
