"""The queue of a pool of threads. Tenants have equal shares of the pool's CPU time, and a single
tenant cannot use all threads of the pool.

If jobs began in order of arrival, a thousand slow jobs of one tenant could precede the first job of
another tenant. Instead, each tenant has a *virtual time*, which advances by the CPU time of the
tenant's jobs. The next job comes from the tenant with the earliest virtual time. Source: start-time
fair queueing (Goyal, Vin and Cheng, 1996).

The CPU time of a job is unknown until the job ends. Until then, the CPU time of the tenant's
previous job is counted instead.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...protocol.shares import fits_share

Job = Callable[[], None]

MAX_IDLE = 1_024
"""A queue with this number of tenants removes its idle tenants before it adds a tenant. A tenant is
idle if it has no jobs and its virtual time is not later than ``FairJobs._now_s``."""


@dataclass(slots=True, eq=False)
class Turn:
    """The jobs of one tenant, and the CPU time that they have used."""

    tenant: str
    used_s: float
    """The tenant's virtual time, in seconds. It advances by the CPU time of the tenant's jobs. When
    a tenant without queued jobs queues a job, its virtual time becomes at least
    ``FairJobs._now_s``."""
    jobs: deque[Job] = field(default_factory=deque)
    expected_s: float = 0.0
    """CPU time of the tenant's previous job, in seconds."""
    running: int = 0
    """Number of slots that the tenant's jobs have. A slot is a place of the pool for a running
    job."""
    waiting: int = 0
    """Number of the tenant's jobs that have begun and have given up their slot while they wait."""
    places: int = 0
    """Number of the tenant's jobs that have begun with a place to wait, and have not ended."""
    resuming: int = 0
    """Number of the first ``jobs`` that only pass their slot to a job that has finished waiting."""
    placed: bool = False
    """Whether the tenant is in ``FairJobs._order``. If not, the tenant has no queued job, or none
    of its jobs may begin."""


class Taken(NamedTuple):
    """A job that has a slot."""

    run: Job
    turn: Turn
    expected_s: float
    """Seconds of CPU time that are counted for the job until the job has ended."""
    may_wait: bool
    """Whether the job has a place to wait, in the share of its tenant."""


class FairJobs:
    """The queued jobs of all tenants. The jobs of one tenant begin in order of arrival.
    Thread-safe.

    The next job is from the tenant with the earliest virtual time, among the tenants whose jobs may
    begin. When a tenant without queued jobs queues a job, the tenant's virtual time becomes at
    least ``_now_s``. So a tenant gains no advantage from its idle time.

    If there are several slots, a single tenant cannot use all of them, so that another tenant's job
    can start immediately. A job that begins without a place to wait may keep its slot while it
    waits. All such jobs together leave a slot free, too. These bounds do not apply to the tenant
    "", which stands for all clients without keys.
    """

    def __init__(self, slots: int, max_waiting: int = 0) -> None:
        """``max_waiting``: the number of places to wait, which tenants share. If it is 0, jobs keep
        their slots while they wait."""
        self._max_running = max(1, slots - 1)
        self._max_waiting = max_waiting
        self._running = self._places = 0
        """Numbers of slots and of places to wait that the jobs of all tenants have."""
        self._lock = threading.Lock()
        self._turns: dict[str, Turn] = {}
        self._order: list[tuple[float, int, Turn]] = []
        """A heap of (virtual time, tie-breaker, tenant), with the tenants whose next job may begin.
        A tenant's virtual time may have advanced since its element was added, and its next job may
        have to wait for jobs of other tenants."""
        self._blocked: set[Turn] = set()
        """Tenants whose next job may begin when a job of any tenant frees its slot."""
        self._numbers = itertools.count()
        self._now_s = 0.0
        """The present virtual time: the virtual time of the tenant whose job was taken last. When
        ``take`` finds no queued job, it advances to ``_latest_s``."""
        self._latest_s = 0.0
        """The latest virtual time that any tenant had when one of its jobs ended."""
        self._size = 0

    def __len__(self) -> int:
        """The number of queued jobs."""
        return self._size

    @property
    def ready(self) -> bool:
        """Whether a queued job may begin."""
        return bool(self._order)

    def add(self, tenant: str, jobs: Iterable[Job]) -> None:
        """Queues jobs after the earlier jobs of ``tenant``."""
        with self._lock:
            turn = self._turns.get(tenant)
            if turn is None:
                self._forget_idle()
                turn = self._turns[tenant] = Turn(tenant, self._now_s)
            before = len(turn.jobs)
            turn.jobs.extend(jobs)
            self._size += len(turn.jobs) - before
            if not before:
                turn.used_s = max(turn.used_s, self._now_s)
                self._place(turn)

    def take(self) -> Taken | None:
        """The next job that may begin. The job has a slot until ``end`` or ``pause`` is called.
        None if no job may begin."""
        with self._lock:
            turn = self._first()
            if turn is None:
                if not self._size:
                    self._now_s = self._latest_s
                return None
            self._now_s = max(self._now_s, turn.used_s)
            turn.used_s += turn.expected_s
            may_wait = not turn.resuming and self._has_place(turn)
            turn.places += may_wait
            self._places += may_wait
            turn.running += 1
            self._running += 1
            self._size -= 1
            job = turn.jobs.popleft()
            turn.resuming = max(0, turn.resuming - 1)
            if not turn.jobs or not self._may_begin(turn):
                self._remove_first()
            return Taken(job, turn, turn.expected_s, may_wait)

    def end(self, ended: Taken, cpu_s: float) -> None:
        """Frees the slot of a job that has ended, and counts its CPU time."""
        with self._lock:
            turn = ended.turn
            turn.used_s += cpu_s - ended.expected_s
            turn.expected_s = cpu_s
            self._latest_s = max(self._latest_s, turn.used_s)
            turn.places -= ended.may_wait
            self._places -= ended.may_wait
            self._free_slot(turn)

    def pause(self, taken: Taken) -> None:
        """Frees the slot of a job that waits."""
        with self._lock:
            taken.turn.waiting += 1
            self._free_slot(taken.turn)

    def resume(self, taken: Taken) -> bool:
        """Gives a slot to a job that has finished waiting. Returns False if the job's tenant may
        not have another slot."""
        with self._lock:
            if not self._may_have_slot(taken.turn):
                return False
            taken.turn.running += 1
            taken.turn.waiting -= 1
            self._running += 1
            return True

    def add_resumed(self, taken: Taken, job: Job) -> None:
        """Queues ``job`` before the other jobs of the tenant of ``taken``. ``taken`` is a job that
        has finished waiting. When ``job`` runs, it passes its slot to ``taken``."""
        with self._lock:
            turn = taken.turn
            turn.jobs.appendleft(job)
            turn.resuming += 1
            self._size += 1
            if len(turn.jobs) == 1:
                turn.used_s = max(turn.used_s, self._now_s)
            self._place(turn)

    def resumed(self, taken: Taken) -> None:
        """Called after ``take`` has returned a job that ``add_resumed`` had queued; ``taken`` is
        this job. Subtracts the CPU time that ``take`` has counted for the job. The job uses no CPU
        time, because it only passes its slot on."""
        with self._lock:
            taken.turn.used_s -= taken.expected_s
            taken.turn.waiting -= 1

    def _free_slot(self, turn: Turn) -> None:
        turn.running -= 1
        self._running -= 1
        self._place(turn)
        if self._blocked:
            for other in list(self._blocked):
                self._place(other)

    def _may_have_slot(self, turn: Turn) -> bool:
        return not turn.tenant or turn.running < self._max_running

    def _may_begin(self, turn: Turn) -> bool:
        if not turn.tenant or turn.resuming or not self._max_waiting or self._has_place(turn):
            return self._may_have_slot(turn)
        return fits_share(turn.running, self._running, self._max_running)

    def _has_place(self, turn: Turn) -> bool:
        """Whether the share of a tenant has a place to wait for one more job."""
        return bool(turn.tenant) and fits_share(turn.places, self._places, self._max_waiting)

    def _place(self, turn: Turn) -> None:
        if not turn.jobs or turn.placed:
            return
        if self._may_begin(turn):
            turn.placed = True
            self._blocked.discard(turn)
            heapq.heappush(self._order, (turn.used_s, next(self._numbers), turn))
        else:
            self._blocked.add(turn)

    def _remove_first(self) -> None:
        """Removes the first element of the heap, because its tenant has no job that may begin."""
        turn = heapq.heappop(self._order)[2]
        turn.placed = False
        self._place(turn)

    def _first(self) -> Turn | None:
        """The tenant with the earliest virtual time among the tenants whose next job may begin. The
        tenant's element remains first in the heap. None if no job may begin."""
        order = self._order
        while order:
            turn = order[0][2]
            if not self._may_begin(turn):
                self._remove_first()
            elif len(order) > 1 and order[0][0] < turn.used_s:
                heapq.heapreplace(order, (turn.used_s, next(self._numbers), turn))
            else:
                return turn
        return None

    def _forget_idle(self) -> None:
        if len(self._turns) >= MAX_IDLE:
            self._turns = {
                tenant: turn
                for tenant, turn in self._turns.items()
                if turn.jobs or turn.running or turn.waiting or turn.used_s > self._now_s
            }
