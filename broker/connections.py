"""Tracks the connections of a bound ROUTER socket: finds the routing id of each connection, and
notices when a connection ends.

A routing id does not identify the sender. A peer may choose its id (``ZMQ_ROUTING_ID``), and libzmq
gives the id of a closed connection to the next peer that chooses it. So the number that ZAP gave to
a connection (``zap.py``) identifies the sender of a message, and the broker accepts a routing id
from one connection at a time.

libzmq's monitor reports only the descriptor of a closed connection. The first message of each
connection shows both its descriptor and its routing id, so the broker can find the routing id of a
closed connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket as sockets
import stat
import struct
from collections import Counter
from collections.abc import Callable, Iterator

import zmq

from ..protocol.shares import fits_share
from .tcp_counts import bytes_of_message, bytes_received, bytes_unread
from .zap import key_of, number_of

log = logging.getLogger(__name__)

QUIET_BYTES = 4096
"""Upper bound of the bytes of a connection's handshake and first heartbeats together. A handshake
has more bytes only if the peer adds properties of its own."""
KEPT_PART = 8
"""1/``KEPT_PART`` of the process's file descriptors is reserved for uses other than connections."""
EVENTS = int(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
EVENT = struct.Struct("=HI")
"""An event of libzmq's monitor: its type and its value, here a descriptor."""
_RESET = struct.pack("ii", 1, 0)


class Connection:
    """A connection that libzmq has accepted."""

    __slots__ = (
        *("counted", "fd", "inode", "key", "peer", "refused", "user"),
        *("grown", "received", "since", "spoke"),
    )

    def __init__(self, fd: int, inode: int) -> None:
        self.fd = fd
        self.inode = inode
        """The inode of the connection's socket. It shows whether the descriptor now belongs to
        another socket."""
        self.peer: bytes | None = None
        """The routing id of the connection; None before its first message."""
        self.user = ""
        """The ``User-Id`` of the connection's messages (``zap.py``); empty before the first
        message."""
        self.key = ""
        """The public key of the peer; empty without CURVE."""
        self.refused = False
        """Whether the peer chose a routing id that belonged to another connection, or its key had
        too many connections."""
        self.counted: int | None = 0
        """Bytes of the connection's messages on the wire, counted until the handshake is known to
        be small. Then the value is None. A handshake is small if the connection has received at
        most ``QUIET_BYTES`` apart from its messages."""
        self.spoke = False
        """Whether a message has arrived since ``Unfinished`` last visited the connection. Each
        message sets the flag, ``Unfinished`` clears it. Only ``Unfinished`` uses the fields
        below."""
        self.since = 0.0
        """The time at which ``Unfinished`` last found that a message had ended, in seconds. Before
        that, the time of its first visit."""
        self.received = 0
        """Bytes that the connection had received at ``since``. While messages are counted, a copy
        of ``counted``."""
        self.grown = 0
        """The value of ``Unfinished._grown``, in bytes, when ``Unfinished`` first found the present
        unfinished message."""

    def is_newer_than(self, user: str) -> bool:
        """Whether the connection was established after the connection with the ``User-Id``
        ``user``."""
        return bool(self.user) and number_of(self.user) > number_of(user)


class Connections:
    """All connections of one socket. Create this object before the socket is bound. Otherwise it
    would miss events.

    The callback ``closed`` is called when ``take_closed`` has ids to return.

    If there are too many connections, the oldest connection that has not sent a message is shut.
    Each key has a bounded share of the connections.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._most = max_connections()
        self._silent: dict[Connection, None] = {}
        """Open connections that have not sent a message and were not shut, oldest first."""
        self._of_key = Counter[str]()
        """Number of open connections that have sent a message, by key."""
        self.by_peer: dict[bytes, Connection] = {}
        self.closed: Callable[[], object] = lambda: None
        self.by_fd: dict[int, Connection] = {}
        """The open connections by descriptor."""
        self.taken = 0
        """Number of messages that were taken from the socket."""
        self._closed: list[Connection] = []
        address = f"inproc://connections-{id(self)}"
        socket.monitor(address, EVENTS)
        self._events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        # The queue of this socket has no bound, because ZeroMQ's thread would block if an event did
        # not fit.
        self._events.setsockopt(zmq.RCVHWM, 0)
        self._events.connect(address)
        self.fd = int(self._events.getsockopt(zmq.FD))
        """A descriptor that becomes readable when libzmq has reported events. ``look`` must then be
        called."""

    def __iter__(self) -> Iterator[Connection]:
        """The open connections."""
        return iter(self.by_fd.values())

    def has(self, connection: Connection) -> bool:
        """Whether a connection is open, as far as libzmq has reported."""
        return self.by_fd.get(connection.fd) is connection

    def close(self) -> None:
        """Stops the monitor. Call it before the socket itself is closed."""
        self.socket.monitor(None, 0)
        self._events.close(0)

    def look(self) -> None:
        """Takes the events that libzmq's monitor has reported."""
        before = len(self._closed)
        with contextlib.suppress(zmq.Again):
            while True:
                kind, fd = EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])
                if kind == zmq.EVENT_ACCEPTED:
                    self._accept(Connection(fd, _inode(fd)))
                elif (connection := self.by_fd.pop(fd, None)) is not None:
                    self._forget(connection)
                    self._closed.append(connection)
        if len(self._closed) > before:
            self.closed()

    def meet(self, peer: bytes, user: str, fd: int) -> Connection | None:
        """Finds the connection of a message that has a new routing id, or another ``User-Id`` than
        the previous message with this routing id.

        The new connection is shut if its peer chose the id of another connection, or if its key has
        too many connections. The message is then dropped, and the result is None.
        """
        connection = self._of(user, fd)
        connection.user, connection.key = user, key_of(user)
        self._silent.pop(connection, None)
        owner = self.by_peer.get(peer)
        if owner is not None or connection.refused:
            if not connection.refused:
                log.warning("a connection was shut: it chose the id %s of another", peer.hex())
            if owner is not None:
                self._end(owner)
            connection.refused = True
            shut(connection)
            return None
        if connection.peer is None and self.has(connection):
            if not self._fits(connection.key):
                connection.refused = True
                shut(connection)
                return None
            self._of_key[connection.key] += 1
        connection.peer = peer
        self.by_peer[peer] = connection
        return connection

    def _of(self, user: str, fd: int) -> Connection:
        """The connection of a message with this ``User-Id``, which arrived at this descriptor."""
        self.look()
        connection = self.by_fd.get(fd)
        if connection is not None and connection.user and connection.user != user:
            if connection.is_newer_than(user):
                connection = None
            else:
                # The previous connection on this descriptor has closed, but its first message was
                # read late. So its ``User-Id`` was assigned to the present connection.
                self._forget(connection)
                self._end(connection)
                connection = self.by_fd[fd] = Connection(fd, connection.inode)
        if connection is None:
            connection = Connection(fd, 0)
            self._end(connection)
        return connection

    def count(self, connection: Connection, frames: list[bytes]) -> None:
        """Adds the size of a message to ``counted`` of its connection. Ends the count if the
        handshake proves small."""
        assert connection.counted is not None
        connection.counted += bytes_of_message(frames, bool(connection.key))
        received = bytes_received(connection.fd)
        if received is not None:
            received -= bytes_unread(connection.fd)
        if received is None or received - connection.counted <= QUIET_BYTES:
            connection.counted = None

    def take_closed(self) -> list[bytes]:
        """Returns the routing ids whose connections have closed. New connections may then use these
        ids."""
        closed, self._closed = self._closed, []
        peers = []
        for connection in closed:
            peer = connection.peer
            if peer is not None and self.by_peer.get(peer) is connection:
                del self.by_peer[peer]
                peers.append(peer)
        return peers

    def _fits(self, key: str) -> bool:
        """Whether a key may have one more connection. Without keys, only the bound of the socket
        applies."""
        own = self._of_key[key]
        fits = not key or fits_share(own, self._of_key.total(), self._most)
        if not fits:
            why = "the key %s has %d connections, which is its share; further ones are closed"
            log.warning(why, key, own)
        return fits

    def _accept(self, connection: Connection) -> None:
        """Adds an accepted connection. If there are too many connections, the oldest connection
        that has not sent a message is shut, even if this is the new one."""
        before = self.by_fd.get(connection.fd)
        if before is not None:
            self._forget(before)
        self.by_fd[connection.fd] = connection
        self._silent[connection] = None
        if len(self.by_fd) > self._most:
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            shut(oldest)

    def _forget(self, connection: Connection) -> None:
        """Removes a closed connection from the counts."""
        self._silent.pop(connection, None)
        if connection.peer is not None:
            self._of_key[connection.key] -= 1
            if not self._of_key[connection.key]:
                del self._of_key[connection.key]

    def _end(self, connection: Connection) -> None:
        self._closed.append(connection)
        self.closed()


def max_connections() -> int:
    """Maximum number of connections of a socket of this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        limit = 1024 * 1024
    return limit - limit // KEPT_PART


def shut(connection: Connection) -> None:
    """Closes a connection; libzmq then notices the end.

    The peer receives a reset. Without the reset, a peer that has more to send could wait for a
    minute.
    """
    with contextlib.suppress(OSError), open_socket(connection) as socket:
        socket.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
        socket.shutdown(sockets.SHUT_RDWR)


@contextlib.contextmanager
def open_socket(connection: Connection) -> Iterator[sockets.socket]:
    """The socket of a connection, under a duplicated descriptor. Raises OSError if the connection
    has closed, because the descriptor may then belong to another connection."""
    if not connection.inode or _inode(connection.fd) != connection.inode:
        raise OSError("the connection is closed")
    # libzmq's thread may close the original descriptor at any time; this duplicate stays valid.
    with sockets.socket(fileno=os.dup(connection.fd)) as socket:
        if _inode(socket.fileno()) != connection.inode:
            raise OSError("the connection is closed")
        yield socket


def _inode(fd: int) -> int:
    """The inode of the socket with this descriptor; 0 if the descriptor is not an open socket."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else 0
