"""Wakes idle groups. A group has the sequences of one request. A group is *idle* if all of its
sequences are suspended. An idle group is woken some time after its last round.

If a tenant has many suspended sequences, its groups are woken less often. So their rounds leave
time for other tenants.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

from .sequence_group import SequenceGroup

log = logging.getLogger(__name__)

IDLE_WAKE_S = 0.01
"""Minimum time for which all sequences of a group are suspended before they are woken, in
seconds."""
MAX_IDLE_ROUNDS = 16
"""Number of rounds that the idle groups of one tenant may run on average in ``IDLE_WAKE_S``."""


class IdleQueue:
    """Idle groups in the order in which they are woken. The queue does not read a clock; callers
    pass the time.

    A tenant may have a burst of ``MAX_IDLE_ROUNDS`` rounds, and then on average this number of
    rounds in each ``IDLE_WAKE_S``. Source: the generic cell rate algorithm (ITU-T I.371).
    """

    def __init__(self) -> None:
        self._groups: dict[str, deque[tuple[float, SequenceGroup]]] = {}
        """For each tenant, its groups and the times from which they may be woken, in ascending
        order."""
        self._turns: list[tuple[float, int, str]] = []
        """A heap of (time at which the tenant's next group is woken, tie-breaker, tenant), with one
        element for each tenant that has groups."""
        self._numbers = itertools.count()
        self._spent: dict[str, float] = {}
        """For each tenant, the algorithm's theoretical arrival time: the time at which the tenant's
        rounds so far would have ended at the allowed rate. A time in the past does not delay the
        tenant."""

    def add(self, group: SequenceGroup, now: float) -> None:
        """Adds a group that has been idle since ``now``."""
        due, tenant = now + IDLE_WAKE_S, group.tenant
        if tenant not in self._groups:
            self._spent = {other: at for other, at in self._spent.items() if at > now}
            self._groups[tenant] = deque()
            self._turn(tenant, due, now)
        self._groups[tenant].append((due, group))

    def next(self, now: float) -> tuple[SequenceGroup | None, float]:
        """Removes and returns the group to wake now, together with ``now``. If no group is due,
        returns None and the time at which the next group is woken. This time is infinite if no
        group is queued."""
        while self._turns:
            turn, _, tenant = self._turns[0]
            if turn > now:
                return None, turn
            heapq.heappop(self._turns)
            groups = self._groups[tenant]
            group = _first_due(groups, now)
            if group is not None:
                cost = group.num_sequences * IDLE_WAKE_S / MAX_IDLE_ROUNDS
                self._spent[tenant] = max(self._spent.get(tenant, now), now) + cost
            if groups:
                self._turn(tenant, groups[0][0], now)
            else:
                del self._groups[tenant]
            if group is not None:
                return group, now
        return None, math.inf

    def _turn(self, tenant: str, due: float, now: float) -> None:
        turn = max(due, self._spent.get(tenant, now) - IDLE_WAKE_S)
        heapq.heappush(self._turns, (turn, next(self._numbers), tenant))


def _first_due(groups: deque[tuple[float, SequenceGroup]], now: float) -> SequenceGroup | None:
    """Removes groups that are due, until one of them is not closed. Returns this group; None if all
    groups that are due are closed."""
    while groups and groups[0][0] <= now:
        _, group = groups.popleft()
        if not group.closed:
            return group
    return None


class IdleGroups:
    """Wakes idle groups when they are due. The first group starts a thread, which calls ``wake``
    for each group. No lock of this object is held during the call."""

    def __init__(self, wake: Callable[[SequenceGroup], None]) -> None:
        self._wake = wake
        self._queue = IdleQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, group: SequenceGroup) -> None:
        """Adds a group whose last running sequence has just been suspended."""
        with self._changed:
            if self._closed:
                return
            self._queue.add(group, time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="idle", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Stops waking groups."""
        with self._changed:
            self._closed = True
            self._queue = IdleQueue()
            self._changed.notify()

    def _run(self) -> None:
        while (group := self._next()) is not None:
            try:
                self._wake(group)
            except Exception:
                log.exception("the sequences of request %d cannot be woken", group.request)

    def _next(self) -> SequenceGroup | None:
        """Waits until a group is due, and returns this group; None after ``close``."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                group, turn = self._queue.next(now)
                if group is not None:
                    return group
                self._changed.wait(None if turn == math.inf else turn - now)
            return None
