"""Bounds the bytes of the requests that were sent to a GPU worker and not taken yet. A worker
*takes* a request when it receives the request from ZeroMQ and begins to handle it.

A request of 100 bytes may name buffers of 16 MiB, which the broker sends to the worker each time.
Without this bound, a worker with room for 512 requests would get 8 GiB of such requests. These
requests would fill the broker's memory, and would delay all later messages to the worker. With the
bound, further requests wait in the queues, whose bytes are bounded and shared among keys.

After ``ASK_BYTES``, the broker sends a CLAIM with session 0. The worker's CLAIMED confirms that it
has taken all earlier requests (``fences.py``).
"""

from __future__ import annotations

MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""If this number of bytes was sent to a worker and not taken yet, the worker gets no further
requests. The last request may exceed the bound, so a worker always gets at least one request."""
ASK_BYTES = MAX_IN_FLIGHT_BYTES // 8
"""If this number of bytes was sent and not taken yet, a CLAIM is sent. Only one CLAIM at a time is
unanswered."""


class InFlight:
    """The requests that one GPU worker has not taken yet, with their bytes."""

    __slots__ = ("_asked", "_claim", "_sent", "bytes")

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes of all requests that were not taken yet."""
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
        """Removes a request that has left the worker. Has no effect if the worker had taken the
        request."""
        self.bytes -= self._sent.pop(request, 0) + self._asked.pop(request, 0)

    def asked(self, claim: int) -> None:
        """Records that a CLAIM with this number was sent, after all requests so far."""
        self._claim = claim
        self._asked, self._sent = self._sent, {}

    def answered(self, claim: int) -> bool:
        """Handles the answer to the CLAIM with this number: all requests before the CLAIM are
        taken. Returns False if the CLAIM had another purpose."""
        if claim != self._claim:
            return False
        self._claim = None
        self.bytes -= sum(self._asked.values())
        self._asked = {}
        return True
