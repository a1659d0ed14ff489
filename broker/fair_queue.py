"""The queue of a model: by priority, then in turn between sessions, then between the users of one,
then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from ..protocol.pace import Pace
from .tables import Request

Users = OrderedDict[str, OrderedDict[int, Request]]
"""What a session has waiting: by user, the next one first, and by the request's id."""


class FairQueue:
    """Requests that wait for a worker.

    Within a priority, sessions take turns: a session that sends a thousand requests at once
    delays the first request of another session by one place. In the turns of a session that serves
    several users (``Request.by``), as a gateway's does, these take turns likewise.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, Users]] = {}
        """By priority and session."""
        self._lengths: dict[int, int] = {}
        """By priority."""
        self._length = 0
        self.bytes = 0
        """The size of the requests that wait here."""
        self.pace = Pace()
        """At which requests leave the queue for a worker."""

    @property
    def priority(self) -> int:
        """The priority of the request whose turn it is; the queue must not be empty."""
        return max(self._levels)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        """All requests, in any order."""
        for level in self._levels.values():
            for users in level.values():
                for waiting in users.values():
                    yield from waiting.values()

    def push(self, request: Request) -> None:
        """Puts a request behind those of its user, session and priority."""
        level = self._levels.setdefault(request.priority, OrderedDict())
        users = level.setdefault(request.session.id, OrderedDict())
        users.setdefault(request.by, OrderedDict())[request.id] = request
        self._count(request, 1)

    def remove(self, request: Request) -> bool:
        """Removes a request from any place in the queue; whether it was there."""
        level = self._levels.get(request.priority, OrderedDict())
        users = level.get(request.session.id, OrderedDict())
        waiting = users.get(request.by)
        if waiting is None or waiting.pop(request.id, None) is None:
            return False
        self._count(request, -1)
        if not waiting:
            del users[request.by]
        if not users:
            del level[request.session.id]
        if not level:
            del self._levels[request.priority]
        return True

    def pop(self, now: float) -> Request:
        """Takes out the request whose turn it is, for a worker; the queue must not be empty."""
        level = self._levels[self.priority]
        session, users = next(iter(level.items()))
        user, waiting = next(iter(users.items()))
        request = next(iter(waiting.values()))
        self.remove(request)
        if user in users:
            users.move_to_end(user)
        if session in level:
            level.move_to_end(session)
        self.pace.note(now)
        return request

    def ahead(self, request: Request) -> int:
        """How many requests will go before a newcomer, at the most: those of higher priorities, and
        as many turns of the sessions as it has to wait for."""
        higher = sum(n for priority, n in self._lengths.items() if priority > request.priority)
        level = self._levels.get(request.priority, OrderedDict())
        users = level.get(request.session.id, OrderedDict())
        rivals = len(users) + (request.by not in users)
        turns = (len(users.get(request.by, ())) + 1) * rivals
        others = len(level) + (request.session.id not in level)
        return higher + min(self._lengths.get(request.priority, 0), turns * others - 1)

    def places(self) -> Iterator[tuple[Request, int]]:
        """Every request and its place, from 1, as of now: what changes meanwhile is not seen."""
        levels = [
            [
                [list(waiting.values()) for waiting in users.values()]
                for users in self._levels[priority].values()
            ]
            for priority in sorted(self._levels, reverse=True)
        ]
        in_order = chain.from_iterable(_in_turn(map(_in_turn, level)) for level in levels)
        return ((request, place) for place, request in enumerate(in_order, 1))

    def _count(self, request: Request, change: int) -> None:
        size = change * request.bytes
        self._length += change
        self.bytes += size
        request.session.queued += change
        request.session.queued_bytes += size
        left = self._lengths.get(request.priority, 0) + change
        if left:
            self._lengths[request.priority] = left
        else:
            del self._lengths[request.priority]


def _in_turn(lists: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """The first of each, then the second of each, and so on."""
    rounds = chain.from_iterable(zip_longest(*lists))
    return (request for request in rounds if request is not None)
