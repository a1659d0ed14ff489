"""Bounds the bytes of the requests that were sent to a GPU worker and that the worker has not taken
yet.

A request of 100 bytes may name buffers of 16 MiB, which the broker sends to the worker each time.
Without this bound, a worker with room for 512 requests would get 8 GiB of such requests. They would
fill the broker's memory, and small messages to the worker would wait after them. With the bound,
further requests wait in the queues, whose bytes are bounded and shared among keys.

After ``ASK_BYTES``, the broker sends a CLAIM with session 0. The worker's CLAIMED confirms that it
has taken all earlier requests (``fences.py``).
"""

from __future__ import annotations

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""A worker gets no further request while it has not taken this number of bytes. The last request
before that may exceed the number, so a worker always gets at least one request."""
ASK_BYTES = MAX_IN_FLIGHT_BYTES // 8
"""Number of bytes after which a CLAIM is sent, unless the worker has not answered the last one."""


class InFlight:
    """The requests that one GPU worker has not taken yet, with their bytes."""

    __slots__ = ("_asked", "_claim", "_sent", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of all these requests."""
        self._sent: dict[int, int] = {}
        """By id: the bytes of each request that was sent after the last CLAIM."""
        self._asked: dict[int, int] = {}
        """By id: the bytes of each request that was sent before the unanswered CLAIM."""
        self._claim: int | None = None
        """The number of the unanswered CLAIM."""

    @property
    def has_room(self) -> bool:
        """Whether the worker may get one more request."""
        return self.bytes < MAX_IN_FLIGHT_BYTES

    @property
    def must_ask(self) -> bool:
        """Whether a CLAIM must be sent now."""
        return self._claim is None and self.bytes >= ASK_BYTES

    def add(self, request: int, size: int) -> None:
        """Adds a request that is sent to the worker. ``size`` is in bytes."""
        self._sent[request] = size
        self.bytes += size

    def remove(self, request: int) -> None:
        """Removes a request that has left the worker, if the worker had not taken it."""
        self.bytes -= self._sent.pop(request, 0) + self._asked.pop(request, 0)

    def asked(self, claim: int) -> None:
        """Records the number of a CLAIM that was sent after all these requests."""
        self._claim = claim
        self._asked, self._sent = self._sent, {}

    def answered(self, claim: int) -> bool:
        """Handles the answer to a CLAIM with this number. Returns whether the worker has thereby
        taken requests: False if the CLAIM had another purpose."""
        if claim != self._claim:
            return False
        self._claim = None
        self.bytes -= sum(self._asked.values())
        self._asked = {}
        return True
