"""The requests that have lost their worker. These requests continue at another worker before all
queued requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from .request import Request


class Waiting:
    """The requests that have lost their worker, in two orders: by the time of the loss, and in the
    order in which they continue."""

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        """The requests, by id, in the order in which they have lost their workers."""
        self._in_order: list[tuple[int, float, int]] = []
        """The requests in the order in which they continue. Each element has the negated priority,
        the arrival in seconds, and the id."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the requests in the order in which they have lost their workers."""
        return iter(self._by_id.values())

    def get(self, number: int) -> Request | None:
        """The request with this id; None if the request does not wait."""
        return self._by_id.get(number)

    def add(self, request: Request) -> None:
        """Adds a request that has lost its worker."""
        self._by_id[request.id] = request
        insort(self._in_order, _place(request))

    def remove(self, request: Request) -> None:
        """Removes a request that continues or ends."""
        del self._by_id[request.id]
        del self._in_order[bisect_left(self._in_order, _place(request))]

    def first(self, number: int) -> list[Request]:
        """Up to ``number`` requests, by descending priority and then by arrival."""
        return [self._by_id[request] for _, _, request in self._in_order[:number]]

    def lost_before(self, then: float, number: int) -> list[Request]:
        """Up to ``number`` requests that lost their worker before the time ``then``, the earliest
        loss first."""
        first = islice(self, number)
        return [r for r in first if r.interruption is not None and r.interruption.since < then]


def _place(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.arrived, request.id
