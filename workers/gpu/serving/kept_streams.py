"""Stores streams for a short time after their ends, because a broker that fails may lose their last
tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....protocol.bodies import encode_body
from .streams import Stream

KEEP_S = 60.0
"""An ended stream is stored for this number of seconds, if the bound below allows it. In this time,
a broker that is down for up to 30 s can restart and request the stream. When a stream ends, streams
that are older are dropped."""
MAX_STREAMS = 1024
MAX_TOKENS = 65_536
"""Bound on the sum of ``Stream.size`` of all stored streams. A larger stream is not stored."""


class _Kept(NamedTuple):
    stream: Stream
    ended_at: float


class KeptStreams:
    """The streams that ended last, the oldest first. Time and memory are bounded.

    A broker that has restarted receives the entries of these streams and sends them to clients that
    attach.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
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
        now = self._clock()
        # Only the entries, and the fields that identify the stream to its client, are needed.
        stream.frames = [encode_body({"stream_id": stream.stream_id}, "msgpack")]
        if not stream.save:
            stream.prompt = []
        self._kept[stream.request] = _Kept(stream, now)
        self._tokens += stream.size
        while self._kept:
            first = next(iter(self._kept.values()))
            over = len(self._kept) > MAX_STREAMS or self._tokens > MAX_TOKENS
            if not over and now - first.ended_at <= KEEP_S:
                return
            self.drop(first.stream.request)

    def drop(self, request: int) -> None:
        """Drops the stream of a request, if it is stored."""
        kept = self._kept.pop(request, None)
        if kept is not None:
            self._tokens -= kept.stream.size
