"""Closes connections whose peer sends a message that never ends.

libzmq bounds a frame (``ZMQ_MAXMSGSIZE``) and the complete messages in a pipe (``ZMQ_RCVHWM``). It
does not bound the number of frames in one message. Its function ``pipe_t::write`` counts a message
only at the last frame. Until then, it stores at least 64 bytes for each frame. libzmq has neither
an option nor an event for unfinished messages.

So this module asks the kernel how many bytes a TCP connection has received since its last complete
message. With CURVE, a frame has at least 35 bytes on the wire, so a bound of these bytes also
bounds the memory. Without keys, an empty frame has only two bytes on the wire. So in this case, the
memory of the process is measured too.

A handshake may have properties of any number and size, which libzmq stores as long as the
connection exists. A small property takes 40 times its bytes in memory. So all bytes that a
connection has received, except those of its messages, count as an unfinished message. They stop
counting when a check finds that they are at most ``QUIET_BYTES``.

Unix sockets do not count bytes, and are not checked. Only processes of the broker's own user can
open them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections import Counter
from collections.abc import Callable

from .connections import QUIET_BYTES, Connection, Connections, shut
from .sockets import MAX_MESSAGE_BYTES, MAX_PIPE_MESSAGES
from .sweep import Sweep
from .tcp_counts import bytes_received, bytes_unread

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
"""Seconds between two checks, each of one part of the connections."""
CONNECTIONS_AT_ONCE = 128
"""Number of connections that one check visits. If ``TICKS`` checks would not visit all connections,
a check visits more."""
TICKS = 32
"""All connections are visited once within this number of checks."""
MAX_UNFINISHED_BYTES = MAX_MESSAGE_BYTES
"""Maximum bytes of one message on the wire. A complete message between the protocol's limit and
this bound is refused with an ERROR."""
MAX_KEY_UNFINISHED_BYTES = 256 * 1024 * 1024
"""Maximum bytes of all unfinished messages of a key. Connections that have not sent a complete
message yet, and connections without a key, count as connections of one key."""
MAX_GROWTH_BYTES = 512 * 1024 * 1024
"""Maximum bytes by which the memory of the process may grow during one unfinished message of a peer
without a key. To a peer with a key, the bound applies as long as its handshake counts as
unfinished."""
QUIET_BYTES_PER_S = 16
"""Maximum rate of ZeroMQ's heartbeats. An idle connection may receive ``QUIET_BYTES`` and
heartbeats at this rate. Further bytes since the last message count as an unfinished message."""


class Unfinished:
    """Closes a TCP connection whose unfinished message exceeds its bounds.

    ``has_keys``: whether peers need a key. ``readable`` returns whether a complete message waits at
    the socket.
    """

    def __init__(
        self, connections: Connections, has_keys: bool, readable: Callable[[], bool]
    ) -> None:
        self._connections = connections
        self._has_keys = has_keys
        self._readable = readable
        self._sweep = Sweep(connections.by_fd, CONNECTIONS_AT_ONCE, TICKS)
        self._open: dict[Connection, int] = {}
        """By connection: the bytes of its unfinished message. Bytes that an idle connection may
        receive are subtracted."""
        self._accused: dict[Connection, tuple[int, int] | None] = {}
        """The connections above a bound. For each connection: the round in which the excess was
        found, and the number of messages that had been taken from the socket by then. None after
        the connection was shut."""
        self._rounds = 0
        """Number of completed rounds (``_count_rounds``). Rounds are counted only while messages
        are unfinished."""
        self._taken = 0
        """Number of messages that had been taken from the socket when the last round ended."""
        self._emptied = 0
        """The number of the last round that ended because no message waited at the socket."""
        self._size: int | None = None
        """Bytes of memory of the process at the last check; None while no message is unfinished."""
        self._grown = 0
        """Sum of all growth of the process while messages were unfinished, in bytes. Shrinking is
        not subtracted."""

    def look(self, now: float) -> None:
        """Checks the next connections, and closes connections above a bound."""
        if self._open:
            self._count_rounds()
            self._measure()
        for connection in self._sweep.part():
            self._visit(connection, now)
        if not self._open:
            self._size = None
        elif self._size is None:
            self._measure()
        self._judge()

    def _judge(self) -> None:
        """Compares the unfinished messages with their bounds, in ascending order of size. Because
        of this order, if the messages of a key together exceed the key's bound, only the largest of
        them count as above the bound."""
        totals = Counter[str]()
        for connection, unfinished in sorted(self._open.items(), key=lambda item: item[1]):
            ended = connection.spoke and connection.counted is None
            if ended or not self._connections.has(connection):
                self._forget(connection)
                continue
            totals[connection.key] += unfinished
            if self._is_over(connection, unfinished, totals[connection.key]):
                self._accuse(connection, unfinished)
            else:
                self._accused.pop(connection, None)

    def _visit(self, connection: Connection, now: float) -> None:
        """Determines how many bytes of an unfinished message or handshake a connection has
        received."""
        if not self._connections.has(connection):
            return
        received = bytes_received(connection.fd)
        if received is None:
            return
        if connection.counted is not None:
            connection.received, connection.spoke = connection.counted, False
            connection.since = connection.since or now
        elif connection.spoke:
            connection.received, connection.spoke, connection.since = received, False, now
            self._forget(connection)
        quiet = QUIET_BYTES + QUIET_BYTES_PER_S * (now - connection.since)
        unfinished = int(received - connection.received - quiet)
        if unfinished > 0:
            unfinished -= bytes_unread(connection.fd)
        if unfinished <= 0:
            self._forget(connection)
            return
        if connection not in self._open:
            connection.grown = self._grown
        self._open[connection] = unfinished

    def _is_over(self, connection: Connection, unfinished: int, of_key: int) -> bool:
        if unfinished > MAX_UNFINISHED_BYTES or of_key > MAX_KEY_UNFINISHED_BYTES:
            return True
        bounded_by_bytes = self._has_keys and connection.counted is None
        return not bounded_by_bytes and self._grown - connection.grown > MAX_GROWTH_BYTES

    def _accuse(self, connection: Connection, unfinished: int) -> None:
        """Shuts a connection above a bound. Before that, all messages that had arrived when the
        excess was found must have been taken, because the excess may consist of complete
        messages."""
        now = self._rounds, self._connections.taken
        accused = self._accused.setdefault(connection, now)
        if accused is None or not self._has_passed(connection, *accused):
            return
        self._accused[connection] = None
        log.warning(
            "a connection was closed: its unfinished message or handshake has %d bytes",
            unfinished,
        )
        shut(connection)

    def _has_passed(self, connection: Connection, rounds: int, taken: int) -> bool:
        """Whether all messages of a connection that had arrived when its excess was found have been
        taken since. ``rounds`` and ``taken``: the round and the number of taken messages at that
        time.

        If the bytes of the connection's messages are not counted, the end of one more round
        suffices. Otherwise the socket must have been empty since then, or the broker must have
        taken more messages since then than all pipes can hold.
        """
        if connection.counted is None or rounds == self._rounds:
            return rounds != self._rounds
        pipes = 2 * MAX_PIPE_MESSAGES * len(self._connections.by_fd)
        return self._emptied > rounds or self._connections.taken - taken > pipes

    def _count_rounds(self) -> None:
        """Ends a round if no message waits at the socket, or if each connection has had its turn. A
        ROUTER socket takes messages from its connections in turn, one at a time."""
        taken = self._connections.taken
        is_empty = not self._readable()
        if is_empty or taken - self._taken > 2 * len(self._connections.by_fd):
            self._rounds += 1
            self._taken = taken
        if is_empty:
            self._emptied = self._rounds

    def _forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._accused.pop(connection, None)

    def _measure(self) -> None:
        """Adds the growth of the process's memory since the last check to ``_grown``."""
        size = memory_in_use()
        if self._size is not None:
            self._grown += max(0, size - self._size)
        self._size = size


class _Memory(ctypes.Structure):
    """``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def memory_in_use() -> int:
    """Bytes that this process has allocated, or its resident bytes if the C library does not count
    allocations.

    Allocated bytes are the better measure. Resident bytes include free memory that was not returned
    to the system, which a growing message could use without increasing the resident bytes.
    """
    allocated = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if allocated is not None:
        allocated.restype = _Memory
        memory = allocated()
        return int(memory.uordblks + memory.hblkhd)
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
