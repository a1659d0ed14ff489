"""The queue of a model: by priority, then in turn between sessions, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, zip_longest

from .tables import Request


class FairQueue:
    """Requests that wait for a worker.

    Within a priority, sessions take turns: a session that sends a thousand requests at once
    delays the first request of another session by one place.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, OrderedDict[int, Request]]] = {}
        self._length = 0
        self.bytes = 0
        """The size of the requests that wait here."""

    @property
    def priority(self) -> int:
        """The priority of the request whose turn it is; the queue must not be empty."""
        return max(self._levels)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """All requests, in any order."""
        for level in self._levels.values():
            for waiting in level.values():
                yield from waiting.values()

    def push(self, request: Request) -> None:
        """Puts a request behind those of its session and priority."""
        level = self._levels.setdefault(request.priority, OrderedDict())
        level.setdefault(request.session.id, OrderedDict())[request.id] = request
        self._length += 1
        self.bytes += request.bytes

    def remove(self, request: Request) -> bool:
        """Removes a request from any place in the queue; whether it was there."""
        level = self._levels.get(request.priority, OrderedDict())
        waiting = level.get(request.session.id)
        if waiting is None or waiting.pop(request.id, None) is None:
            return False
        self._length -= 1
        self.bytes -= request.bytes
        if not waiting:
            del level[request.session.id]
        if not level:
            del self._levels[request.priority]
        return True

    def pop(self) -> Request:
        """Takes out the request whose turn it is; the queue must not be empty."""
        level = self._levels[self.priority]
        session, waiting = next(iter(level.items()))
        request = next(iter(waiting.values()))
        self.remove(request)
        if session in level:
            level.move_to_end(session)
        return request

    def places(self) -> Iterator[tuple[Request, int]]:
        """Every request and its place, from 1, as of now."""
        place = 0
        for priority in sorted(self._levels, reverse=True):
            rounds = zip_longest(*(list(w.values()) for w in self._levels[priority].values()))
            for request in chain.from_iterable(rounds):
                if request is not None:
                    place += 1
                    yield request, place
