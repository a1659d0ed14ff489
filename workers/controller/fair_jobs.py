"""The queue of a pool of threads: tenants have equal shares of its CPU time.

A tenant with hundreds of slow guests would otherwise delay every round of the other tenants by the
time of all of its own. Source: start-time fair queueing (Goyal, Vin and Cheng, 1996); as the time
of a job is unknown before it runs, the time of the tenant's previous job stands for it until then.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Job = Callable[[], None]

MAX_IDLE = 1_024
"""Tenants without jobs that the queue may remember before it forgets those without debt."""


@dataclass(slots=True, eq=False)
class Turn:
    """The jobs of one tenant, and the CPU time that it has used."""

    used_s: float
    """The tenant's virtual time: its next job runs before those of tenants with a later one."""
    jobs: deque[Job] = field(default_factory=deque)
    expected_s: float = 0.0
    """CPU time of its previous job."""


class Taken(NamedTuple):
    """A job that a thread has taken."""

    run: Job
    turn: Turn
    expected_s: float
    """The CPU time with which the job is counted until it has run."""


class FairJobs:
    """Queued jobs. The next one is of the tenant that has used the least CPU time, where a tenant
    that had no jobs begins at the time of the others. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}
        self._order: list[tuple[float, int, Turn]] = []
        """A heap with one place for each tenant that has jobs, by virtual time; the tenant's
        present time may be later."""
        self._numbers = itertools.count()
        self._now_s = 0.0
        """The virtual time at which the last job was taken; the latest of all when the queue was
        empty."""
        self._latest_s = 0.0
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, jobs: Mapping[str, Iterable[Job]]) -> None:
        """Queues jobs by tenant; those of one tenant run in their order."""
        with self._lock:
            for tenant, added in jobs.items():
                turn = self._turns.get(tenant)
                if turn is None:
                    self._forget_idle()
                    turn = self._turns[tenant] = Turn(self._now_s)
                before = len(turn.jobs)
                turn.jobs.extend(added)
                self._size += len(turn.jobs) - before
                if not before and turn.jobs:
                    turn.used_s = max(turn.used_s, self._now_s)
                    self._place(turn)

    def take(self, ran: Taken | None = None, cpu_s: float = 0.0) -> Taken | None:
        """The next job; None if no job is queued. ``ran``, ``cpu_s``: the job that the calling
        thread has run, and its CPU time."""
        with self._lock:
            if ran is not None:
                self._count(ran, cpu_s)
            if not self._size:
                self._now_s = self._latest_s
                return None
            self._size -= 1
            turn = self._first()
            self._now_s = max(self._now_s, turn.used_s)
            turn.used_s += turn.expected_s
            job = turn.jobs.popleft()
            if not turn.jobs:
                heapq.heappop(self._order)
            return Taken(job, turn, turn.expected_s)

    def count(self, ran: Taken, cpu_s: float) -> None:
        """Records the CPU time of a job after which the calling thread takes no other."""
        with self._lock:
            self._count(ran, cpu_s)

    def _count(self, ran: Taken, cpu_s: float) -> None:
        turn = ran.turn
        turn.used_s += cpu_s - ran.expected_s
        turn.expected_s = cpu_s
        self._latest_s = max(self._latest_s, turn.used_s)

    def _first(self) -> Turn:
        """The tenant with the earliest virtual time, which stays first in the order."""
        order = self._order
        while len(order) > 1 and order[0][0] < order[0][2].used_s:
            turn = order[0][2]
            heapq.heapreplace(order, (turn.used_s, next(self._numbers), turn))
        return order[0][2]

    def _place(self, turn: Turn) -> None:
        heapq.heappush(self._order, (turn.used_s, next(self._numbers), turn))

    def _forget_idle(self) -> None:
        if len(self._turns) >= MAX_IDLE:
            self._turns = {
                tenant: turn
                for tenant, turn in self._turns.items()
                if turn.jobs or turn.used_s > self._now_s
            }
