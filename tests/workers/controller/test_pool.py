"""The threads that run guests: the order of jobs, jobs that wait, and jobs that fail."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
from tokenbus.protocol.bodies import encode_body
from tokenbus.protocol.errors import UnavailableError
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller import pool as pools
from tokenbus.workers.controller.fair_jobs import Job
from tokenbus.workers.controller.pool import Pool, freeing_slot, locked, waiting
from tokenbus.workers.controller.variable_calls import VariableCalls

from ...processes import until

BOUND_S = 300.0
"""A limit in seconds that only bounds a hang."""


def happens(event: threading.Event, what: str) -> None:
    assert event.wait(BOUND_S), what


def test_other_jobs_run_while_as_many_guests_as_threads_wait_for_the_state_worker() -> None:
    pool = Pool(2)
    sent = threading.Semaphore(0)
    calls = VariableCalls(lambda frames, link: sent.release())
    answers: list[VariableAnswer] = []

    def asks(request: int) -> Job:
        return lambda: answers.append(calls.perform(Variable(request, 0, 1, "get", "name")))

    pool.submit([asks(request) for request in range(1, 8)], 2)
    for _ in range(7):
        assert sent.acquire(timeout=BOUND_S), "not all guests run"
    other = threading.Event()
    pool.submit([other.set])
    happens(other, "a job does not run while guests wait")
    assert not answers
    for request in range(1, 8):
        calls.on_answer(encode_body(VariableAnswer(request, 0, 1), "msgpack"))
    until(lambda: len(answers) == 7, BOUND_S, "every guest has its answer")


def test_a_job_whose_wait_is_over_goes_on_when_a_slot_is_free_and_before_queued_jobs() -> None:
    pool = Pool(1)
    order: list[str] = []
    answered, waits, may_end, done = (threading.Event() for _ in range(4))

    def first() -> None:
        with waiting():
            waits.set()
            happens(answered, "no answer")
        order.append("the first job went on")

    def second() -> None:
        answered.set()
        until(lambda: len(pool._jobs) == 3, BOUND_S, "the first job waits for a slot")
        happens(may_end, "the test is over")
        order.append("the second job ended")

    pool.submit([first])
    happens(waits, "the first job has not begun")
    pool.submit([second, lambda: order.append("the third job"), done.set])
    may_end.set()
    happens(done, "not all jobs ran")
    assert order == ["the second job ended", "the first job went on", "the third job"]


def test_more_waits_than_the_bound_are_refused() -> None:
    pool = Pool(1, max_waiting=3)
    end = threading.Event()
    outcomes: list[str] = []

    def job() -> None:
        try:
            with waiting():
                end.wait(BOUND_S)
            outcomes.append("waited")
        except UnavailableError as error:
            outcomes.append(error.message)
            end.set()

    pool.submit([job] * 4)
    until(lambda: len(outcomes) == 4, BOUND_S, "all four ended")
    assert outcomes == [
        "3 controllers of this worker are waiting for another process, and no more may wait; "
        "try again, or start more controller workers",
        *["waited"] * 3,
    ]


def test_a_tenant_with_many_slow_jobs_does_not_keep_the_first_job_of_another_waiting() -> None:
    pool = Pool(2)
    slow, over, quick = (threading.Event() for _ in range(3))

    def endless() -> None:
        slow.set()
        happens(over, "the test is over")

    pool.submit([endless] * 50, 2, "eve")
    happens(slow, "no job of the first tenant has begun")
    pool.submit([quick.set], tenant="ann")
    happens(quick, "a job waits for jobs of another tenant")
    over.set()
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")


def test_a_tenant_whose_jobs_wait_leaves_places_to_wait_to_others() -> None:
    pool = Pool(2, max_waiting=4)
    end = threading.Event()
    refused: list[str] = []

    def waits() -> None:
        try:
            with waiting():
                happens(end, "the test is over")
        except UnavailableError as error:
            refused.append(error.message)

    pool.submit([waits] * 4, tenant="eve")
    until(lambda: len(refused) == 2, BOUND_S, "the tenant has half of the places")
    assert "controllers of this key are waiting" in refused[0]
    pool.submit([waits], tenant="ann")
    until(lambda: pool.waiting_jobs == 3, BOUND_S, "another tenant's job waits too")
    end.set()
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    assert len(refused) == 2


@pytest.mark.parametrize("tenants", [("eve",), ("eve", "mallory"), ("eve", "mallory", "oscar")])
def test_jobs_that_keep_their_slots_leave_a_slot_to_another_tenant(
    tenants: tuple[str, ...],
) -> None:
    """Jobs keep their slots while they wait if their tenants have no further places to wait. Two
    tenants whose guests did not answer could occupy all slots for a minute."""
    pool = Pool(4, max_waiting=12)
    over, quick, ends = (threading.Event() for _ in range(3))

    def waits() -> None:
        with freeing_slot():
            happens(over, "the test is over")

    def tick() -> None:
        while not ends.wait(0.001):
            pool.help()

    threading.Thread(target=tick, daemon=True).start()
    for tenant in tenants:
        pool.submit([waits] * 30, 4, tenant)

    def all_begun() -> bool:
        return pool._active == 4 or (pool.waiting_jobs >= 6 and not pool._jobs.ready)

    until(all_begun, BOUND_S, "no further job may begin")
    pool.submit([quick.set], tenant="ann")
    begun = quick.wait(BOUND_S)
    over.set()
    until(lambda: not pool.busy, BOUND_S, "all jobs end")
    ends.set()
    pool.close()
    assert begun


def test_jobs_whose_wait_is_over_leave_a_slot_to_another_tenant() -> None:
    pool = Pool(2)
    answered, over, quick = (threading.Event() for _ in range(3))
    begun: list[int] = []

    def waits_then_is_slow() -> None:
        with waiting():
            happens(answered, "no answer")
        begun.append(1)
        happens(over, "the test is over")

    pool.submit([waits_then_is_slow] * 20, 2, "eve")
    until(lambda: pool.waiting_jobs == 20, BOUND_S, "all jobs of the first tenant wait")
    answered.set()
    until(lambda: len(pool._jobs) >= 18, BOUND_S, "all waits are over")
    pool.submit([quick.set], tenant="ann")
    happens(quick, "a job waits for resumed jobs of another tenant")
    assert len(begun) == 1
    over.set()
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    assert len(begun) == 20


def test_a_pool_without_places_to_wait_keeps_the_slots_of_its_jobs() -> None:
    pool = Pool(2, max_waiting=0)
    end, quick = threading.Event(), threading.Event()
    begun: list[int] = []

    def waits() -> None:
        begun.append(1)
        with waiting():
            happens(end, "the test is over")

    pool.submit([waits] * 20, 2, "eve")
    pool.submit([quick.set], tenant="ann")
    happens(quick, "a job waits for jobs of another tenant")
    assert len(begun) <= 1
    end.set()
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    assert len(begun) == 20


def test_a_job_frees_its_slot_while_it_waits_for_a_lock_but_not_while_it_holds_it() -> None:
    pool = Pool(2)
    lock = threading.Lock()
    holds, other_ran, may_end, done = (threading.Event() for _ in range(4))
    order: list[str] = []

    def first() -> None:
        with locked(lock):
            holds.set()
            happens(may_end, "the test is over")
        order.append("first")

    def second() -> None:
        with locked(lock):
            order.append("second")
            done.set()

    pool.submit([first])
    happens(holds, "the first job has not begun")
    pool.submit([second, other_ran.set])
    happens(other_ran, "a job that waits for the lock keeps its slot")
    until(lambda: pool._active == 1, BOUND_S, "only the job that holds the lock has a slot")
    may_end.set()
    happens(done, "the second job does not go on")
    assert order == ["first", "second"]


def test_threads_beyond_the_slots_end_when_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SURPLUS_S", 0.01)
    pool = Pool(2)
    end = threading.Event()

    def job() -> None:
        with waiting():
            happens(end, "the test is over")

    pool.submit([job] * 20)
    until(lambda: pool.waiting_jobs == 20, BOUND_S, "all jobs wait")
    assert pool._threads >= 20
    end.set()
    until(lambda: pool._threads == 2, BOUND_S, "two threads are left")
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")
    _runs(pool, threading.Event())


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_a_job_that_fails_costs_no_thread(error: Callable[[], BaseException]) -> None:
    def fails() -> None:
        raise error()

    pool = Pool(1)
    pool.submit([fails, fails])
    _runs(pool, threading.Event())
    until(lambda: not pool.busy, BOUND_S, "the pool is idle")


def _runs(pool: Pool, event: threading.Event) -> None:
    pool.submit([event.set])
    happens(event, "a job does not run")


class Gates:
    """Lets jobs wait. A thread ends the waits in random order."""

    def __init__(self, seed: int) -> None:
        self._closed: list[threading.Event] = []
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self.open = False
        self.over = threading.Event()
        threading.Thread(target=self._open, daemon=True).start()

    def wait(self) -> None:
        """Waits like a job that waits for another process. Returns at once if too many jobs
        wait."""
        gate = threading.Event()
        with self._lock:
            self._closed.append(gate)
        with contextlib.suppress(UnavailableError), waiting():
            happens(gate, "no answer")

    def _open(self) -> None:
        while not self.over.wait(0.0002):
            with self._lock:
                if self._closed and self.open:
                    place = self._random.randrange(len(self._closed))
                    self._closed.pop(place).set()


class Load:
    """Jobs of a pool that wait, take CPU time, and submit further jobs."""

    def __init__(self, pool: Pool, gates: Gates) -> None:
        self.submitted = self.ended = 0
        self._pool = pool
        self._gates = gates
        self._lock = threading.Lock()

    def submit(self, jobs: list[Job], hands: int, tenant: str) -> None:
        with self._lock:
            self.submitted += len(jobs)
        self._pool.submit(jobs, hands, tenant)

    def job(self, waits: int, slow: bool, more: str | None) -> None:
        """Waits ``waits`` times. If ``slow``, takes CPU time. Submits another job for the tenant
        ``more``."""
        for _ in range(waits):
            self._gates.wait()
        if slow:
            end_s = time.thread_time() + 0.001
            while time.thread_time() < end_s:
                pass
        if more is not None:
            self.submit([partial(self.job, waits, slow, None)], 1, more)
        with self._lock:
            self.ended += 1


@pytest.mark.parametrize("seed", range(16))
def test_every_job_runs_however_jobs_arrive_wait_and_end(seed: int) -> None:
    draw = random.Random(seed)
    max_waiting = draw.choice([0, 2, 4, 256])
    pool = Pool(draw.randint(1, 4), max_waiting=max_waiting)
    tenants = ["", "ann", "ben", "eve"][: draw.randint(1, 4)]
    gates = Gates(seed)
    load = Load(pool, gates)
    gates.open = seed % 2 == 0 or not max_waiting

    for _ in range(60):
        waits, slow = draw.choice([0, 0, 1, 2]), draw.random() < 0.2
        more = draw.choice([None, *tenants])
        count = draw.randint(1, 6)
        load.submit(
            [partial(load.job, waits, slow, more)] * count,
            draw.choice([1, 2, count]),
            draw.choice(tenants),
        )
    if not gates.open:
        waits_only = "all jobs that do not wait have run"
        until(lambda: load.submitted - load.ended == pool.waiting_jobs, BOUND_S, waits_only)
        gates.open = True
    until(lambda: load.ended == load.submitted and not pool.busy, BOUND_S, "every job has ended")
    gates.over.set()
    assert not any(turn.running or turn.waiting for turn in pool._jobs._turns.values())
    pool.close()
