"""Queues the requests of clients to the module store, within bounds that owners share. The owner is
the client's tenant or, if clients do not have keys, the client's session.

An upload may take 30 s of CPU time. Without bounds, an owner could let a thousand uploads of 16 MiB
wait in the memory of the worker.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ...protocol.errors import Code, UnavailableError
from ...protocol.shares import fits_share
from ..bus import FromBus
from .pool import Pool

AT_ONCE = 2
"""Number of requests that are handled at the same time."""
MAX_BYTES = 256 * 1024 * 1024
"""Maximum bytes of the requests that wait or are being handled."""
REQUEST_BYTES = 512 * 1024
"""The bytes that are counted for a request in addition to its content. They bound the number of
requests."""


class StoreRequests:
    """The requests that wait or are being handled. Thread-safe."""

    def __init__(self, serve: Callable[[FromBus], None]) -> None:
        """``serve`` handles a request, and answers the client."""
        self._serve = serve
        self._pool = Pool(AT_ONCE, "store", max_waiting=0)
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        """The bytes of each owner's requests."""

    def add(self, owner: str, message: FromBus) -> None:
        """Queues a request. Raises UnavailableError if the owner's requests would exceed its
        share."""
        size = REQUEST_BYTES + len(message.body) + sum(map(len, message.attachments))
        with self._lock:
            own = self._bytes[owner]
            if not fits_share(own, self._bytes.total(), MAX_BYTES, size):
                raise UnavailableError(
                    Code.QUEUE_FULL,
                    f"the requests of this client that wait for the module store have {own} "
                    "bytes, and a client may have as many as it leaves free; wait until one of "
                    "them has been answered",
                    retry_after_s=1.0,
                )
            self._bytes[owner] += size

        def serve() -> None:
            try:
                self._serve(message)
            finally:
                with self._lock:
                    self._bytes[owner] -= size
                    if not self._bytes[owner]:
                        del self._bytes[owner]

        self._pool.submit([serve], tenant=owner)

    def close(self) -> None:
        """Ends the threads after all queued requests."""
        self._pool.close()
