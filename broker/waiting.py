"""The requests that have lost their worker. They continue at another one before all queued
requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice

from .request import Request


class Waiting:
    """The table of these requests, in two orders: that of their loss, and that in which they
    continue."""

    def __init__(self) -> None:
        self._by_id: dict[int, Request] = {}
        """In the order of their loss."""
        self._in_order: list[tuple[int, float, int]] = []
        """In the order in which they continue: -priority, arrival, id."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        """The requests in the order of their loss."""
        return iter(self._by_id.values())

    def get(self, number: int) -> Request | None:
        """The request with this id, if it waits."""
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
        """Up to ``number`` requests: the highest priority first, then by arrival."""
        return [self._by_id[request] for _, _, request in self._in_order[:number]]

    def lost_before(self, then: float, number: int) -> list[Request]:
        """The requests, among the first ``number`` that were lost, that lost their worker before
        ``then``."""
        first = islice(self, number)
        return [r for r in first if r.interruption is not None and r.interruption.since < then]


def _place(request: Request) -> tuple[int, float, int]:
    return -request.priority, request.arrived, request.id
