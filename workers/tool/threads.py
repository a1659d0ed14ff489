"""Divides the threads of a tool worker among the owners of calls. The owner of a call is a client,
with one of its users. Owners take turns, and each owner may use a share of the threads.

All methods run on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from typing import NamedTuple

from ...protocol.shares import fits_share, max_share


class CallOwner(NamedTuple):
    """The owner of a call: a client and one of its users. The message CALL names both."""

    client: str
    user: str


class Threads:
    """Counts the threads that run functions. ``num_threads``: maximum number of these threads."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._busy: Counter[tuple[str, str | None]] = Counter()
        """Number of busy threads, by client and user. The key (client, None) counts the threads of
        all users of the client."""
        self._num_busy = 0
        self._waiting: OrderedDict[str, OrderedDict[str, deque[asyncio.Future[None]]]]
        self._waiting = OrderedDict()
        """The waiting calls by client and user, in the order of their turns: the first client has
        the next turn, and the first user among the users of this client. A call waits only while
        its owner may not have another thread."""

    async def acquire(self, owner: CallOwner) -> None:
        """Waits until ``owner`` may have another thread, and counts the thread."""
        if self._fits(owner):
            self._take(owner)
            return
        turn = asyncio.get_running_loop().create_future()
        users = self._waiting.setdefault(owner.client, OrderedDict())
        users.setdefault(owner.user, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove(owner, turn)
            else:
                self.release(owner)
            raise

    def release(self, owner: CallOwner) -> None:
        """Stops counting a thread whose function has returned. Gives threads to waiting calls whose
        owners may have another thread."""
        self._num_busy -= 1
        for place in _places(owner):
            self._busy[place] -= 1
            if not self._busy[place]:
                del self._busy[place]
        while (following := self._next()) is not None:
            turn = self._waiting[following.client][following.user][0]
            self._remove(following, turn)
            # This client and this user have their next turn after all others.
            if users := self._waiting.get(following.client):
                self._waiting.move_to_end(following.client)
                if following.user in users:
                    users.move_to_end(following.user)
            # A turn may be cancelled although its task has not yet removed it.
            if not turn.cancelled():
                self._take(following)
                turn.set_result(None)

    def _next(self) -> CallOwner | None:
        """The first owner with a waiting call that may have another thread."""
        owners = (CallOwner(client, user) for client, own in self._waiting.items() for user in own)
        return next((owner for owner in owners if self._fits(owner)), None)

    def _fits(self, owner: CallOwner) -> bool:
        """Whether both the client and its user may have another thread (``fits_share``)."""
        own, of_user = (self._busy[place] for place in _places(owner))
        if not fits_share(own, self._num_busy, self._num_threads):
            return False
        most = max_share(own, self._num_busy, self._num_threads)
        return not owner.user or fits_share(of_user, own, most)

    def _take(self, owner: CallOwner) -> None:
        self._num_busy += 1
        self._busy.update(_places(owner))

    def _remove(self, owner: CallOwner, turn: asyncio.Future[None]) -> None:
        """Removes a waiting call, unless it was removed before."""
        users = self._waiting.get(owner.client, OrderedDict())
        if turn not in users.get(owner.user, ()):
            return
        users[owner.user].remove(turn)
        if not users[owner.user]:
            del users[owner.user]
        if not users:
            del self._waiting[owner.client]


def _places(owner: CallOwner) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """The two keys of ``Threads._busy`` whose counts include a thread of ``owner``."""
    return (owner.client, None), (owner.client, owner.user)
