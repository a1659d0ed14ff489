"""What waits for peers that do not read: a bounded queue each, so that none can hold up others.

A ROUTER socket drops silently when a peer's pipe is full. With ROUTER_MANDATORY it says so, and
what it refused waits here, up to a bound in bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from .outgoing import Outgoing

Frames = Sequence[bytes]


class Sent(Enum):
    """What became of a message that the socket was given."""

    OK = "ok"
    FULL = "full"
    GONE = "gone"


# An enum's members are looked up at a price that this loop would feel.
_OK, _FULL, _GONE = Sent.OK, Sent.FULL, Sent.GONE


class Outbox:
    """The messages to all peers of one socket.

    ``send(peer, frames)`` is the socket's own, without waiting. ``post`` says whether the message
    went out or waits (OK), found its peer's queue full (FULL: it is dropped) or its peer gone. What
    must go out may wait beyond the bound, up to ``max_must_bytes``; None: however much.
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
        self.waiting: dict[bytes, deque[Frames]] = {}
        self._bytes: dict[bytes, int] = {}
        self.sent = 0
        """Messages that went out after waiting."""

    def post(self, message: Outgoing) -> Sent:
        """Sends a message, or lets it wait behind those that wait for its peer already."""
        _, peer, frames, must = message
        if peer not in self.waiting:
            sent = self._send(peer, frames)
            if sent is not _FULL:
                return sent
        size = sum(map(len, frames))
        held = self._bytes.get(peer, 0)
        bound = self._max_must_bytes if must else self._max_bytes
        if bound is not None and held + size > bound:
            return _FULL
        self.waiting.setdefault(peer, deque()).append(frames)
        self._bytes[peer] = held + size
        return _OK

    def flush(self) -> list[bytes]:
        """Tries again to send what waits; gives the peers that are gone."""
        gone = []
        for peer in list(self.waiting):
            queue = self.waiting[peer]
            while queue:
                sent = self._send(peer, queue[0])
                if sent is _FULL:
                    break
                if sent is _GONE:
                    gone.append(peer)
                    queue.clear()
                    break
                self._bytes[peer] -= sum(map(len, queue.popleft()))
                self.sent += 1
            if not queue:
                self.forget(peer)
        return gone

    def forget(self, peer: bytes) -> None:
        """Drops what waits for a peer."""
        self.waiting.pop(peer, None)
        self._bytes.pop(peer, None)
