"""Stores streams for a short time after their ends, because a broker that fails may lose their last
tokens."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....protocol.bodies import encode_body
from .streams import Stream

KEEP_S = 60.0
"""An ended stream is stored for this number of seconds, if the bounds below allow it. In this time,
a broker that is down for up to 30 s can restart and request the stream. When a stream ends, streams
that are older are dropped."""
MAX_STREAMS = 1024
MAX_TOKENS = 65_536
"""Bound on the sum of ``Stream.size`` of all stored streams. A larger stream is not stored."""


class _Kept(NamedTuple):
    stream: Stream
    ended_at: float
    size: int
    """``Stream.size``."""


class KeptStreams:
    """The streams that ended last, the oldest first. Time and memory are bounded.

    A broker that has restarted receives the entries of these streams and sends them to clients that
    attach. Beyond a bound, the client with the most streams or tokens loses its oldest stream. So a
    client with many or long streams does not drop the streams of other clients.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self._clients: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """The requests of each client, the oldest first."""
        self._client_tokens = Counter[int]()
        """The sum of ``Stream.size`` of each client's streams."""
        self._tokens = 0

    def __iter__(self) -> Iterator[Stream]:
        """A snapshot of the streams; safe on another thread."""
        return iter([kept.stream for kept in list(self._kept.values())])

    def get(self, request: int) -> Stream | None:
        """The stream of a request; None if it is not stored."""
        kept = self._kept.get(request)
        return kept.stream if kept is not None else None

    def add(self, stream: Stream) -> None:
        """Adds a stream whose last entry has been sent. Drops streams beyond the bounds."""
        now, size = self._clock(), stream.size
        while self._kept:
            first = next(iter(self._kept.values()))
            if now - first.ended_at <= KEEP_S:
                break
            self.drop(first.stream.request)
        if size > MAX_TOKENS:
            return
        # Only the entries, and the fields that identify the stream to its client, are needed.
        stream.frames = [encode_body({"stream_id": stream.stream_id}, "msgpack")]
        if not stream.save:
            stream.prompt = []
        self._kept[stream.request] = _Kept(stream, now, size)
        self._clients[stream.client][stream.request] = None
        self._client_tokens[stream.client] += size
        self._tokens += size
        while self._tokens > MAX_TOKENS:
            self._drop_oldest(max(self._client_tokens, key=self._client_tokens.__getitem__))
        while len(self._kept) > MAX_STREAMS:
            self._drop_oldest(max(self._clients, key=lambda one: len(self._clients[one])))

    def drop(self, request: int) -> None:
        """Drops the stream of a request, if it is stored."""
        kept = self._kept.pop(request, None)
        if kept is None:
            return
        client = kept.stream.client
        self._tokens -= kept.size
        self._client_tokens[client] -= kept.size
        del self._clients[client][request]
        if not self._clients[client]:
            del self._clients[client], self._client_tokens[client]

    def _drop_oldest(self, client: int) -> None:
        self.drop(next(iter(self._clients[client])))
