"""The times at which requests end by their ``timeout_s``."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .request import Request

REBUILD_ABOVE = 64


class Deadlines:
    """The deadlines of live requests, earliest first. An entry in the middle of a heap cannot be
    removed cheaply, so entries of ended requests stay until they are the majority; then the heap is
    rebuilt.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        """Number of entries, including those of ended requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Adds a request that may have a deadline."""
        if request.deadline is not None:
            self._live.add(request.id)
            heapq.heappush(self._heap, (request.deadline, request.id))

    def remove(self, request: Request) -> None:
        """Removes the deadline of a request that has ended."""
        self._live.discard(request.id)
        if len(self._heap) > 2 * len(self._live) + REBUILD_ABOVE:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    @property
    def first(self) -> float:
        """A lower bound of the deadlines of all live requests."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> Iterator[int]:
        """Yields the id of each request whose deadline has passed, once for each request."""
        while self._heap and self._heap[0][0] <= now:
            _, number = heapq.heappop(self._heap)
            if number in self._live:
                self._live.remove(number)
                yield number
