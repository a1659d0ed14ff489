"""STARTs that wait for a controller worker. A *pattern* is the name of a controller, or
``ANY_MODULE``, as workers register it. Each pattern has a queue.

A place that becomes free at a worker goes to the oldest START in the queues of the patterns that
this worker serves. The other queues are not scanned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .request import Request

HELD = ""
"""The queue of the STARTs that wait for something other than a free place."""


@dataclass(slots=True)
class WaitingStart:
    """A START that waits for a free place at a controller worker, or for another event."""

    request: Request
    body: bytes
    since: float
    """The time at which the START arrived, in seconds."""
    pattern: str
    """The queue of the START: the name or pattern that a controller worker has to serve, or
    ``HELD``."""


class WaitingStarts:
    """The waiting STARTs, in two forms: by request, and as a queue for each pattern."""

    def __init__(self) -> None:
        self._by_request: dict[int, WaitingStart] = {}
        self._queues: dict[str, dict[int, WaitingStart]] = {}

    def __contains__(self, request: int) -> bool:
        return request in self._by_request

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[WaitingStart]:
        """Iterates over a copy, so that STARTs can be removed meanwhile."""
        return iter(list(self._by_request.values()))

    def add(self, request: Request, body: bytes, since: float, pattern: str) -> None:
        """Adds a START at the end of its queue."""
        self.remove(request.id)
        waiting = WaitingStart(request, body, since, pattern)
        self._by_request[request.id] = waiting
        self._queues.setdefault(pattern, {})[request.id] = waiting

    def remove(self, request: int) -> WaitingStart | None:
        """Removes and returns the START of a request; None if the START does not wait."""
        waiting = self._by_request.pop(request, None)
        if waiting is not None:
            self._leave_queue(waiting)
        return waiting

    def move(self, waiting: WaitingStart, pattern: str) -> None:
        """Moves a START to the queue of another pattern."""
        if waiting.pattern != pattern:
            self._leave_queue(waiting)
            waiting.pattern = pattern
            self._queues.setdefault(pattern, {})[waiting.request.id] = waiting

    def first(self, patterns: Iterable[str]) -> WaitingStart | None:
        """The START that has waited longest in the queues of these patterns."""
        queues = [queue for pattern in patterns if (queue := self._queues.get(pattern))]
        heads = (next(iter(queue.values())) for queue in queues)
        return min(heads, key=lambda head: head.since, default=None)

    def _leave_queue(self, waiting: WaitingStart) -> None:
        queue = self._queues[waiting.pattern]
        del queue[waiting.request.id]
        if not queue:
            del self._queues[waiting.pattern]
