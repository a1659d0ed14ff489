"""Queues messages for peers that do not read. Each peer has its own bounded queue, so that a slow
peer does not delay the others.

By default, a ROUTER socket silently drops a message for a peer whose pipe is full. With
ROUTER_MANDATORY the send fails instead, and the message waits in an ``Outbox``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from .outgoing import Outgoing

Frames = Sequence[bytes]


class Sent(Enum):
    """The result of sending a message."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


# Globals are used on this hot path, because looking up an enum's member takes longer.
_OK, _FULL, _GONE = Sent.OK, Sent.FULL, Sent.GONE


class Outbox:
    """Sends the messages to the peers of one socket, and has a queue for each peer with a full
    pipe.

    ``send(peer, frames)`` sends without waiting. ``post`` returns OK if the message was sent or
    queued, FULL if it was dropped because the peer's queue is full, and GONE if the peer has no
    connection.

    The queue of a peer has at most ``max_pending_bytes``. A message for which ``must`` is true may
    exceed this bound. It is dropped only if the messages before it in the queue have
    ``max_must_bytes`` or more, and never if ``max_must_bytes`` is None.
    """

    def __init__(
        self,
        send: Callable[[bytes, Frames], Sent],
        max_pending_bytes: int,
        max_must_bytes: int | None = None,
    ) -> None:
        self._send = send
        self._max_bytes = max_pending_bytes
        self._max_must_bytes = max_must_bytes
        self.waiting: dict[bytes, deque[tuple[Frames, int]]] = {}
        """By peer: its queued messages, each with its frames and their total size in bytes."""
        self._bytes: dict[bytes, int] = {}
        self.sent = 0
        """Number of messages that were sent after they had waited in a queue."""

    def post(self, message: Outgoing) -> Sent:
        """Sends a message, or queues it after the messages that wait for the same peer."""
        peer, frames = message.peer, message.frames
        queue = self.waiting.get(peer)
        if queue is None:
            sent = self._send(peer, frames)
            if sent is not _FULL:
                return sent
        size = sum(map(len, frames))
        held = self._bytes.get(peer, 0)
        if message.must:
            if self._max_must_bytes is not None and held >= self._max_must_bytes:
                return _FULL
        elif held + size > self._max_bytes:
            return _FULL
        if queue is None:
            queue = self.waiting[peer] = deque()
        queue.append((frames, size))
        self._bytes[peer] = held + size
        return _OK

    def flush(self) -> list[bytes]:
        """Tries again to send the queued messages. Returns the peers whose connection has ended."""
        gone = []
        for peer in list(self.waiting):
            queue = self.waiting[peer]
            while queue:
                frames, size = queue[0]
                sent = self._send(peer, frames)
                if sent is _FULL:
                    break
                if sent is _GONE:
                    gone.append(peer)
                    queue.clear()
                    break
                queue.popleft()
                self._bytes[peer] -= size
                self.sent += 1
            if not queue:
                self.forget(peer)
        return gone

    def forget(self, peer: bytes) -> None:
        """Drops the queued messages of a peer."""
        self.waiting.pop(peer, None)
        self._bytes.pop(peer, None)
