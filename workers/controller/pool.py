"""The threads that run guests.

A *slot* is a place for one running job. Tenants have equal shares of the CPU time
(``fair_jobs.py``).

Quick rounds run one after another on one thread, because passing the GIL between threads takes
longer than the rounds. If a round is slow, another thread is woken for the rounds that are queued
after it.

A job that waits for another process frees its slot (``waiting``). Another thread takes the next
job. If all threads are in use, a new thread is started. So waiting guests do not delay other
rounds. A job that has finished waiting gets a slot from the share of its tenant, before the
tenant's queued jobs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ...protocol.errors import Code, UnavailableError
from ...protocol.shares import fits_share
from .fair_jobs import FairJobs, Job, Taken
from .guest_clock import thread_cpu_s
from .wasm.sandbox import HOST_STACK_BYTES

log = logging.getLogger(__name__)

MAX_WAITING = 256
"""Maximum jobs of one pool that wait at the same time; each of them blocks a thread and its
stack."""
QUICK_S = 0.0005
"""Maximum duration of a quick job, in seconds. The CPU time is read from the system only after
longer jobs."""
SURPLUS_S = 10.0
"""Seconds after which an idle thread ends if the pool has more threads than slots. Waiting threads
are not counted."""

_starting = threading.Lock()
"""This lock is held while a thread is started, because the stack size of new threads is a setting
of the whole process."""


class Pool:
    """Runs at most ``slots`` jobs at the same time. The jobs of one tenant begin in order of
    arrival."""

    def __init__(self, slots: int, name: str = "rounds", max_waiting: int = MAX_WAITING) -> None:
        """``name``: the name of the threads. ``max_waiting``: the maximum number of jobs that wait
        at the same time. If ``max_waiting`` is 0, jobs keep their slots while they wait."""
        self._slots = slots
        self._name = name
        self._max_waiting = max_waiting
        self._jobs = FairJobs(slots, max_waiting)
        self._closed = False
        self._wake = threading.Semaphore(0)
        self._lock = threading.Lock()
        """Protects the counts below. Jobs are submitted and taken without this lock."""
        self._threads = 0
        self._active = 0
        """Number of threads that have a slot."""
        self._waiting = 0
        """Number of threads that have freed their slot while their job waits. Idle threads are not
        counted here or in ``_active``."""
        self._waits: Counter[str] = Counter()
        """Number of waiting threads of each tenant."""
        for _ in range(slots):
            self._start_thread()

    @property
    def busy(self) -> bool:
        """Whether a job runs, waits or is queued."""
        return bool(self._jobs) or self._active > 0 or self._waiting > 0

    @property
    def backlog(self) -> bool:
        """Whether jobs are queued. If so, a long job should pause."""
        return bool(self._jobs)

    @property
    def keeps_slots(self) -> bool:
        """Whether a job keeps its slot while it waits."""
        return self._max_waiting == 0

    @property
    def waiting_jobs(self) -> int:
        """Number of jobs that wait for another process."""
        return self._waiting

    def submit(self, jobs: Iterable[Job], hands: int = 1, tenant: str = "") -> None:
        """Queues jobs of a tenant. Wakes at most ``hands`` threads for these jobs, and at most one
        thread for each slot."""
        self._jobs.add(tenant, jobs)
        self._wake.release(min(hands, self._slots))
        if self._waiting:
            self.help()

    def help(self) -> None:
        """Wakes or starts a thread for the queued jobs, if a slot is free."""
        if not self._jobs or self._active >= self._slots or not self._jobs.ready:
            return
        with self._lock:
            if self._threads - self._active - self._waiting <= 0:
                self._start_thread()
        self._wake.release()

    def close(self) -> None:
        """Ends the threads after all queued jobs. No job may be submitted afterwards."""
        self._closed = True
        self._wake.release(max(1, self._threads))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Wraps a job's wait for another process. During the wait, other jobs may use the slot of
        this job.

        The job continues when a slot is free again. Raises UnavailableError if ``max_waiting`` jobs
        wait already, or if the waiting jobs of this tenant would exceed its share (``fits_share``).
        """
        taken = _this_thread.job
        assert taken is not None, "the thread of a pool waits without a job"
        tenant = taken.turn.tenant
        with self._lock:
            if not taken.may_wait:
                self._check_waiting(tenant)
            self._waits[tenant] += 1
            self._waiting += 1
            self._jobs.pause(taken)
            self._active -= 1
        self.help()
        try:
            yield
        finally:
            self._take_slot_again(taken)
            with self._lock:
                self._waits[tenant] -= 1
                if not self._waits[tenant]:
                    del self._waits[tenant]

    # --- inside ---------------------------------------------------------------------------------

    def _run(self) -> None:
        _this_thread.pool = self
        while True:
            if not self._wake.acquire(timeout=SURPLUS_S):
                if self._ends():
                    return
                continue
            if self._closed and not self._jobs:
                return
            with self._lock:
                if self._active >= self._slots:
                    continue
                self._active += 1
            if self._run_jobs():
                with self._lock:
                    self._active -= 1
                # A job that was submitted while this slot was in use may not have a thread yet.
                self.help()

    def _run_jobs(self) -> bool:
        """Runs jobs until no job may begin. Returns False if the slot was passed to a thread that
        has finished waiting."""
        clock = _JobClock()
        taken = self._jobs.take()
        while taken is not None:
            if isinstance(taken.run, _Resumption):
                _this_thread.job = None
                self._jobs.resumed(taken)
                taken.run()
                return False
            _this_thread.job = taken
            try:
                taken.run()
            except BaseException:
                # This includes SystemExit and panics of native libraries: the pool's threads
                # survive them.
                log.exception("a job of the thread pool %r failed", self._name)
            self._jobs.end(taken, clock.lap())
            taken = self._jobs.take()
        _this_thread.job = None
        return True

    def _check_waiting(self, tenant: str) -> None:
        """Called under the lock: raises UnavailableError if too many jobs wait."""
        own, total = self._waits[tenant], self._waiting
        share = not tenant or fits_share(own, total, self._max_waiting)
        if total < self._max_waiting and share:
            return
        raise UnavailableError(
            Code.QUEUE_FULL,
            f"{own if tenant else total} controllers of this "
            f"{'key' if tenant else 'worker'} are waiting for another process, "
            "and no more may wait; try again, or start more controller workers",
            retry_after_s=1.0,
        )

    def _take_slot_again(self, taken: Taken) -> None:
        with self._lock:
            if self._active < self._slots and self._jobs.resume(taken):
                self._waiting -= 1
                self._active += 1
                return
        resumption = _Resumption()
        self._jobs.add_resumed(taken, resumption)
        # A slot may have become free meanwhile.
        self.help()
        resumption.wait()
        with self._lock:
            self._waiting -= 1

    def _ends(self) -> bool:
        """Whether an idle thread is surplus and should end."""
        with self._lock:
            if self._threads - self._waiting <= self._slots:
                return False
            self._threads -= 1
            return True

    def _start_thread(self) -> None:
        with _starting:
            before = threading.stack_size(HOST_STACK_BYTES)
            try:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            except RuntimeError as error:
                log.error("no thread for the pool %r can be started: %s", self._name, error)
            finally:
                threading.stack_size(before)


class _Resumption:
    """A queued job that only passes its slot to a thread that has finished waiting."""

    def __init__(self) -> None:
        self._passed = threading.Lock()
        self._passed.acquire()

    def __call__(self) -> None:
        self._passed.release()

    def wait(self) -> None:
        """Blocks the calling thread until the slot was passed to it."""
        self._passed.acquire()


class _JobClock:
    """Measures the CPU time of the jobs of a thread.

    The duration of a quick job is used as its CPU time, because reading the CPU time can take
    longer than the job.
    """

    def __init__(self) -> None:
        self._ended_s = time.perf_counter()
        self._cpu_s = thread_cpu_s()

    def lap(self) -> float:
        """Called after each job: the seconds of CPU time that the job used."""
        now_s = time.perf_counter()
        duration_s, self._ended_s = now_s - self._ended_s, now_s
        if duration_s < QUICK_S:
            return duration_s
        cpu_s = thread_cpu_s()
        used_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        return min(duration_s, used_s)


class _ThisThread(threading.local):
    pool: Pool | None = None
    job: Taken | None = None
    """The job that the thread runs; None between jobs."""
    waits: bool = False
    """Whether the thread has freed its slot."""


_this_thread = _ThisThread()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Wraps a wait in ``Pool.waiting`` of this thread's pool. Does nothing if the thread does not
    belong to a pool, if jobs of its pool keep their slots, or if the thread is already in a
    ``waiting``."""
    pool = _this_thread.pool
    if pool is None or pool.keeps_slots or _this_thread.waits:
        yield
        return
    with pool.waiting():
        _this_thread.waits = True
        try:
            yield
        finally:
            _this_thread.waits = False


@contextlib.contextmanager
def freeing_slot() -> Iterator[None]:
    """Wraps a wait in ``waiting``. If too many jobs wait already, this job keeps its slot during
    the wait."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(UnavailableError):
            stack.enter_context(waiting())
        yield


@contextlib.contextmanager
def locked(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock. If the job has to wait for the lock, it does so in ``freeing_slot``."""
    if not lock.acquire(blocking=False):
        with freeing_slot():
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def tenant_of_thread() -> str:
    """The tenant whose job runs on this thread; empty on a thread that does not belong to a
    pool."""
    return "" if _this_thread.job is None else _this_thread.job.turn.tenant
