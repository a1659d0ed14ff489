"""Streams that have ended a moment ago: their last tokens may still be lost with the broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....protocol.bodies import encode_body
from .streams import Stream

KEEP_S = 60.0
"""For how long, in seconds: a broker that is down for 30 s is back by then."""
MAX_STREAMS = 1024
MAX_TOKENS = 65_536
"""For all of them together; a longer stream is not kept."""


class _Kept(NamedTuple):
    stream: Stream
    ended_at: float


class KeptStreams:
    """The last streams that have ended, within bounds of time and memory, oldest first.

    A broker that was restarted is sent what they sent, and passes it on to clients that attach.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[int, _Kept] = {}
        self._tokens = 0

    def __iter__(self) -> Iterator[Stream]:
        """The streams as they are now; safe on another thread."""
        return iter([kept.stream for kept in list(self._kept.values())])

    def get(self, request: int) -> Stream | None:
        """The stream of a request, if it is one of them."""
        kept = self._kept.get(request)
        return kept.stream if kept is not None else None

    def add(self, stream: Stream) -> None:
        """Adds a stream whose end was sent; those beyond the bounds go."""
        now = self._clock()
        # Only its entries are needed, and the fields by which its client knows it.
        stream.frames = [encode_body({"stream_id": stream.stream_id}, "msgpack")]
        if not stream.save:
            stream.prompt = []
        self._kept[stream.request] = _Kept(stream, now)
        self._tokens += stream.num_tokens
        while self._kept:
            first = next(iter(self._kept.values()))
            over = len(self._kept) > MAX_STREAMS or self._tokens > MAX_TOKENS
            if not over and now - first.ended_at <= KEEP_S:
                return
            self.drop(first.stream.request)

    def drop(self, request: int) -> None:
        """Drops a stream, if it is there."""
        kept = self._kept.pop(request, None)
        if kept is not None:
            self._tokens -= kept.stream.num_tokens
