"""The queue of the requests for one model. Requests with a higher priority leave first. Among
requests of the same priority, keys take turns; so do the sessions of a key, and the users of a
session. The requests of one user leave in the order of their arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain, zip_longest

from ..protocol.pace import Pace
from .request import Request

Users = OrderedDict[str, OrderedDict[int, Request]]
"""The requests of a session, or of a group of sessions, by user and by request id. The user whose
turn is next comes first."""
Sessions = OrderedDict[int | str, Users]
"""The requests of a key by session or group (``Request.turn``). The session or group whose turn is
next comes first. Clients without keys count as one key."""


class FairQueue:
    """The requests for one model that wait for a worker.

    Among requests of the same priority, keys take turns, and the sessions of a key share the turns
    of the key in the same way. If a session sends a thousand requests at once, the first request of
    another session waits for at most one of them. Likewise, the requests of a key with a thousand
    sessions delay the first request of another key by one turn.

    The users (``RoutingFields.by``) of a session, for example of a gateway's session, share the
    turns of the session in the same way. The sessions of a group (``RoutingFields.group``) count as
    one session.
    """

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, Sessions]] = {}
        """The requests, by priority, key, and session or group."""
        self._lengths: dict[int, int] = {}
        """Number of requests by priority."""
        self._keys: dict[int, str] = {}
        """By request: the key of its session when the request was queued. The session may get
        another key later."""
        self._places: dict[int, int] = {}
        """By request: the place that was last reported to the request's client."""
        self.bytes = 0
        """Bytes of all requests in this queue."""
        self.pace = Pace()
        """Rate at which requests leave this queue because a worker receives them."""

    @property
    def priority(self) -> int:
        """The priority of the next request; the queue must not be empty."""
        return max(self._levels)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        """All requests, in any order."""
        for level in self._levels.values():
            for sessions in level.values():
                for users in sessions.values():
                    for waiting in users.values():
                        yield from waiting.values()

    def push(self, request: Request) -> None:
        """Adds a request after the earlier requests of its user and session with the same
        priority."""
        level = self._levels.setdefault(request.priority, OrderedDict())
        key = self._keys[request.id] = request.session.key
        sessions = level.setdefault(key, OrderedDict())
        users = sessions.setdefault(request.turn, OrderedDict())
        users.setdefault(request.fields.by, OrderedDict())[request.id] = request
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Removes a request, if it is in the queue."""
        key = self._keys.pop(request.id, None)
        if key is None:
            return
        self._places.pop(request.id, None)
        level = self._levels[request.priority]
        sessions = level[key]
        users = sessions[request.turn]
        waiting = users[request.fields.by]
        del waiting[request.id]
        self._count(request, -1)
        if not waiting:
            del users[request.fields.by]
        if not users:
            del sessions[request.turn]
        if not sessions:
            del level[key]
        if not level:
            del self._levels[request.priority]

    def has(self, request: Request) -> tuple[bool, bool, bool]:
        """Returns three flags: whether other requests in this queue have the same key, the same
        session or group, and the same user as this one."""
        key = session = user = False
        for level in self._levels.values():
            sessions = level.get(request.session.key)
            users = sessions.get(request.turn) if sessions is not None else None
            key |= sessions is not None
            session |= users is not None
            user |= users is not None and request.fields.by in users
        return key, session, user

    def note_place(self, request: Request, place: int) -> bool:
        """Records the place that is about to be reported to a request's client. Returns whether
        this place differs from the last reported place. Returns False if the request is not in this
        queue."""
        if request.id not in self._keys or self._places.get(request.id) == place:
            return False
        self._places[request.id] = place
        return True

    def pop(self, now: float) -> Request:
        """Removes and returns the next request, which a worker receives. The queue must not be
        empty."""
        level = self._levels[self.priority]
        key, sessions = next(iter(level.items()))
        session, users = next(iter(sessions.items()))
        user, waiting = next(iter(users.items()))
        request = next(iter(waiting.values()))
        self.remove(request)
        if user in users:
            users.move_to_end(user)
        if session in sessions:
            sessions.move_to_end(session)
        if key in level:
            level.move_to_end(key)
        self.pace.note(now)
        return request

    def ahead(self, request: Request) -> int:
        """An upper bound of the number of requests that would precede ``request``, which is not in
        the queue yet.

        All requests of higher priorities precede the new request. Among requests of its own
        priority, its key gets turns until the new request is next. Between two of these turns, each
        other key gets at most one turn.
        """
        higher = sum(n for priority, n in self._lengths.items() if priority > request.priority)
        level = self._levels.get(request.priority, OrderedDict())
        session = request.session
        sessions = level.get(session.key, OrderedDict())
        users = sessions.get(request.turn, OrderedDict())
        rivals = len(users) + (request.fields.by not in users)
        turns = (len(users.get(request.fields.by, ())) + 1) * rivals
        turns *= len(sessions) + (request.turn not in sessions)
        others = len(level) + (session.key not in level)
        return higher + min(self._lengths.get(request.priority, 0), turns * others - 1)

    def places(self) -> Iterator[tuple[Request, int]]:
        """Yields each request with its place, counted from 1. Later changes of the queue do not
        affect the result."""
        levels = [
            [
                [
                    [list(waiting.values()) for waiting in users.values()]
                    for users in sessions.values()
                ]
                for sessions in self._levels[priority].values()
            ]
            for priority in sorted(self._levels, reverse=True)
        ]
        in_order = chain.from_iterable(
            _in_turn(_in_turn(map(_in_turn, sessions)) for sessions in level) for level in levels
        )
        return ((request, place) for place, request in enumerate(in_order, 1))

    def _count(self, request: Request, change: int) -> None:
        size = change * request.bytes
        self.bytes += size
        request.session.queued += change
        request.session.queued_bytes += size
        request.session.use.queued += change
        request.session.use.queued_bytes += size
        left = self._lengths.get(request.priority, 0) + change
        if left:
            self._lengths[request.priority] = left
        else:
            del self._lengths[request.priority]


def _in_turn(lists: Iterable[Iterable[Request]]) -> Iterator[Request]:
    """Yields the first request of each list, then the second of each list, and so on."""
    rounds = chain.from_iterable(zip_longest(*lists))
    return (request for request in rounds if request is not None)


class Queues(dict[tuple[str, str], FairQueue]):
    """The queues that have requests, by role and model."""

    def push(self, request: Request) -> None:
        """Adds a request to its queue."""
        self.setdefault(request.queue, FairQueue()).push(request)

    def remove(self, request: Request) -> None:
        """Removes a request from its queue, and the queue if it has become empty."""
        queue = self.get(request.queue)
        if queue is not None:
            queue.remove(request)
            if not queue:
                del self[request.queue]

    def next_of(self, key: tuple[str, str], now: float) -> Request:
        """Removes and returns the next request of a queue, which a worker receives. Among the
        queues with the same priority, this queue is then the last in turn."""
        queue = self.pop(key)
        request = queue.pop(now)
        if queue:
            self[key] = queue
        return request
