"""Large answers that clients may not have read.

The broker cannot see how many messages of a client's ZeroMQ pipe are unread. The pipe is bounded in
messages and not in bytes: 256 tokenizers of 10 MB are gigabytes. So as many of the last messages to
a connection as its pipe can hold count as unread.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ..protocol.errors import Code, SlowClientError

PIPE_MESSAGES = 256
"""Maximum number of messages in a client's ZeroMQ pipe. The number is small, because only messages
outside the pipe are bounded in bytes."""
LARGE_BYTES = 64 * 1024
"""Minimum bytes of an answer that is counted. A full pipe of smaller answers has 16 MiB."""
UNREAD_FACTOR = 16
"""Another large answer is sent to a client only if its unread large answers have less than this
number times ``max_pending_bytes``."""
MAX_CONNECTIONS = 20_000
"""Maximum number of connections that are counted. Above it, the connection with the oldest first
answer is not counted any more."""


class UnreadAnswers:
    """An upper bound of the bytes of large answers that each connection has not read.

    The bound belongs to a connection and not to a session, which can end while the pipe stays.
    TOKEN messages do not count, neither in bytes nor as messages.
    """

    def __init__(self) -> None:
        self._by_peer: OrderedDict[bytes, _Unread] = OrderedDict()

    def add(self, peer: bytes, size: int) -> None:
        """Counts a message of ``size`` bytes to a connection."""
        unread = self._by_peer.get(peer)
        if unread is None:
            if size < LARGE_BYTES:
                return
            unread = self._by_peer[peer] = _Unread()
            if len(self._by_peer) > MAX_CONNECTIONS:
                self._by_peer.popitem(last=False)
        unread.add(size)
        if not unread.bytes:
            del self._by_peer[peer]

    def bytes_of(self, peer: bytes | None) -> int:
        """The bytes that a connection may not have read."""
        unread = self._by_peer.get(peer) if peer is not None else None
        return unread.bytes if unread is not None else 0

    def check(self, peer: bytes | None, max_pending_bytes: int, what: str, advice: str) -> None:
        """Raises SlowClientError if a connection has too many unread bytes for another large
        answer. ``what`` is the answer, and ``advice`` is what the client can do, both for the error
        message."""
        most = UNREAD_FACTOR * max_pending_bytes
        unread = self.bytes_of(peer)
        if unread >= most:
            raise SlowClientError(
                Code.SLOW_CLIENT,
                f"up to {unread} bytes of answers to this connection are unread; {what} is sent "
                f"only if fewer than {most} bytes are unread; {advice}, or use a new connection",
            )

    def on_gone(self, peer: bytes) -> None:
        """Handles the end of a connection, whose pipe is freed."""
        self._by_peer.pop(peer, None)


class _Unread:
    """The counts of one connection."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sent = 0
        self._large: deque[tuple[int, int]] = deque()
        """The number of each large message, and its bytes."""

    def add(self, size: int) -> None:
        self._sent += 1
        if size >= LARGE_BYTES:
            self._large.append((self._sent, size))
            self.bytes += size
        while self._large and self._large[0][0] <= self._sent - PIPE_MESSAGES:
            self.bytes -= self._large.popleft()[1]
