"""The times at which the broker ends live requests, because their ``timeout_s`` is over or they
were cancelled."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .request import Request

REBUILD_ABOVE = 64


class Deadlines:
    """The deadlines of live requests, in a heap with the earliest first. Removing an entry from the
    middle of a heap takes long. So entries of ended requests stay until they are the majority, and
    the heap is then rebuilt.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        """Number of entries, including those of ended requests."""
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Adds the deadline of a request, if it has a deadline."""
        if request.deadline is not None:
            self._live.add(request.id)
            heapq.heappush(self._heap, (request.deadline, request.id))

    def remove(self, request: Request) -> None:
        """Removes the deadlines of a request that has ended."""
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
