"""Bounds the memory of the requests and the entries that live streams store.

Until its end, a stream stores its request and its entries. Clients that attach and brokers that
claim the stream receive them. A plain token takes 20 bytes, and is not counted. But 256
``top_logprobs`` take 3 KiB, and a request may have 128 sequences that wait for an input. So clients
share a bound. If a stream exceeds its client's share, the stream ends.
"""

from __future__ import annotations

from collections import Counter

from ....protocol.errors import Code, RequestError
from ....protocol.shares import fits_share
from ...machine import machine_memory
from .streams import Stream

MEMORY_PART = 8
"""The requests and entries at all GPU workers of a machine take at most this part of the machine's
memory."""
USUAL_BYTES = 16 * 1024**3
"""The bound of a machine whose memory is unknown, in bytes."""


def max_stored_bytes(num_workers: int) -> int:
    """The bound of a GPU worker on a machine with ``num_workers`` GPU workers, in bytes."""
    try:
        whole = machine_memory() // MEMORY_PART
    except OSError:
        whole = USUAL_BYTES
    return whole // max(1, num_workers)


class StoredBytes:
    """The bytes of the live streams of a worker, by client. ``most``: the bound on all bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._clients: Counter[int] = Counter()
        self._streams: Counter[Stream] = Counter()

    def count(self, stream: Stream) -> RequestError | None:
        """Counts the new bytes of a stream. If the stream's client now exceeds its share, returns
        the error with which the stream must end. If not, returns None."""
        size = stream.long_bytes - self._streams[stream]
        if not size:
            return None
        own = self._clients[stream.client]
        fits = fits_share(own, self._total, self._most, size)
        self._clients[stream.client] += size
        self._streams[stream] += size
        self._total += size
        if fits:
            return None
        return RequestError(
            Code.TOO_LARGE,
            "the requests, log-probabilities, candidates, logs and writes of your running streams "
            f"take {own + size} bytes at this worker; all clients together take {self._total} of "
            f"{self._most} bytes; ask for fewer top_logprobs, or run fewer sequences at a time",
        )

    def drop(self, stream: Stream) -> None:
        """Stops counting a stream that has ended."""
        size = self._streams.pop(stream, 0)
        self._total -= size
        self._clients[stream.client] -= size
        if not self._clients[stream.client]:
            del self._clients[stream.client]
