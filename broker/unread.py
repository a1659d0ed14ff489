"""Large answers that clients may not have read.

A message in a client's ZeroMQ pipe cannot be seen any more, and the pipe is bounded in messages and
not in bytes: with tokenizers of 10 MB, 256 of them are gigabytes. So the last messages to a
connection, as many as its pipe holds, count as unread.
"""

from __future__ import annotations

from collections import OrderedDict, deque

PIPE_MESSAGES = 256
"""Messages in a client's ZeroMQ pipe. Few, as only those behind them are bounded in bytes."""
LARGE_BYTES = 64 * 1024
"""Smaller answers do not count: a pipe of them holds 16 MiB."""
MAX_CONNECTIONS = 20_000
"""Connections that are kept; the one that was the first to get a large answer is dropped first."""


class UnreadAnswers:
    """The most bytes of large answers that each connection may have left unread.

    It is a connection's and not its session's, which can end while the pipe stays. Tokens do not
    count, neither their bytes nor as messages that came after a large answer.
    """

    def __init__(self) -> None:
        self._by_peer: OrderedDict[bytes, _Unread] = OrderedDict()

    def add(self, peer: bytes, size: int) -> None:
        """A message of so many bytes goes to a connection."""
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
        """What a connection may have left unread."""
        unread = self._by_peer.get(peer) if peer is not None else None
        return unread.bytes if unread is not None else 0

    def on_gone(self, peer: bytes) -> None:
        """A connection has closed, and its pipe is freed."""
        self._by_peer.pop(peer, None)


class _Unread:
    """Of one connection."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sent = 0
        self._large: deque[tuple[int, int]] = deque()
        """Which message it was, and its bytes."""

    def add(self, size: int) -> None:
        self._sent += 1
        if size >= LARGE_BYTES:
            self._large.append((self._sent, size))
            self.bytes += size
        while self._large and self._large[0][0] <= self._sent - PIPE_MESSAGES:
            self.bytes -= self._large.popleft()[1]
