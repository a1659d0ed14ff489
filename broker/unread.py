"""Bounds the bytes of large answers that clients may not have read.

The broker cannot see how many messages in a client's ZeroMQ pipe are unread. The pipe is bounded in
messages and not in bytes, and 256 tokenizers of 10 MB are gigabytes. So the broker assumes that the
pipe is full: the last ``PIPE_MESSAGES`` messages to a connection count as unread.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from ..protocol.errors import Code, SlowClientError

PIPE_MESSAGES = 256
"""Maximum number of messages in a client's ZeroMQ pipe. The number is small, because the messages
in a pipe are not bounded in bytes."""
LARGE_BYTES = 64 * 1024
"""Minimum bytes of an answer whose bytes are counted. A pipe full of smaller answers has at most 16
MiB."""
UNREAD_FACTOR = 16
"""A client gets another large answer only if its unread large answers have fewer bytes than this
number times ``max_pending_bytes``."""
MAX_CONNECTIONS = 20_000
"""Maximum number of connections with counts. Above this number, the counts of the connection that
was added first are dropped."""


class UnreadAnswers:
    """An upper bound of the bytes of large answers that each connection has not read.

    Counts belong to a connection and not to a session, because a session can end while its pipe
    stays. TOKEN messages are not counted, neither in bytes nor as messages.
    """

    def __init__(self) -> None:
        self._by_peer: OrderedDict[bytes, deque[int]] = OrderedDict()
        """For each connection, the bytes of its last ``PIPE_MESSAGES`` messages; 0 for a message
        that is not large."""

    def add(self, peer: bytes, size: int) -> None:
        """Counts a message of ``size`` bytes that is sent to a connection."""
        sizes = self._by_peer.get(peer)
        if sizes is None:
            if size < LARGE_BYTES:
                return
            sizes = self._by_peer[peer] = deque(maxlen=PIPE_MESSAGES)
            if len(self._by_peer) > MAX_CONNECTIONS:
                self._by_peer.popitem(last=False)
        sizes.append(size if size >= LARGE_BYTES else 0)
        if not any(sizes):
            del self._by_peer[peer]

    def check(self, peer: bytes | None, max_pending_bytes: int, what: str, advice: str) -> None:
        """Raises SlowClientError if a connection has too many unread bytes for another large
        answer. For the error message, ``what`` names the answer, and ``advice`` says what the
        client can do."""
        most = UNREAD_FACTOR * max_pending_bytes
        unread = sum(self._by_peer.get(peer or b"", ()))
        if unread >= most:
            raise SlowClientError(
                Code.SLOW_CLIENT,
                f"up to {unread} bytes of answers to this connection are unread; {what} is sent "
                f"only if fewer than {most} bytes are unread; {advice}, or use a new connection",
            )

    def on_gone(self, peer: bytes) -> None:
        """Handles the end of a connection: ZeroMQ has freed its pipe, so its counts are dropped."""
        self._by_peer.pop(peer, None)
