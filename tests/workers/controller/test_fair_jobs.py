"""The shares of tenants in the CPU time of the threads that run guests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenbus.workers.controller import fair_jobs
from tokenbus.workers.controller.fair_jobs import FairJobs
from tokenbus.workers.controller.pool import Pool

BOUND_S = 300.0
"""A limit in seconds that only bounds a hang."""


def nothing() -> None:
    pass


def run(jobs: FairJobs, costs: dict[str, float], count: int) -> list[str]:
    """Takes ``count`` jobs, each with the CPU time of its tenant in ``costs``; returns their
    tenants in order."""
    names = {id(turn): tenant for tenant, turn in jobs._turns.items()}
    order = []
    for _ in range(count):
        taken = jobs.take()
        assert taken is not None
        tenant = names[id(taken.turn)]
        jobs.end(taken, costs[tenant])
        order.append(tenant)
    return order


def test_a_tenant_with_many_slow_jobs_delays_another_one_by_one_job() -> None:
    jobs = FairJobs(1_000)
    jobs.add("slow", [nothing] * 500)
    jobs.add("quick", [nothing] * 50)
    order = run(jobs, {"slow": 0.02, "quick": 0.00001}, 100)
    assert order[:51].count("quick") == 50
    # The quick tenant has jobs again. The slow tenant has not gained an advantage in the meantime.
    jobs.add("quick", [nothing] * 50)
    assert run(jobs, {"slow": 0.02, "quick": 0.00001}, 52).count("quick") == 50


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 0.02), min_size=2))
def test_tenants_that_always_have_jobs_get_equal_time(costs: dict[str, float]) -> None:
    jobs = FairJobs(1_000)
    for tenant in costs:
        jobs.add(tenant, [nothing] * 2_000)
    used = Counter[str]()
    for tenant in run(jobs, costs, 1_500):
        used[tenant] += costs[tenant]  # type: ignore[assignment]
    assert max(used.values()) - min(used[tenant] for tenant in costs) <= 3 * max(costs.values())


def test_jobs_of_a_tenant_that_run_at_the_same_time_are_all_counted() -> None:
    jobs = FairJobs(1_000)
    jobs.add("a", [nothing] * 4)
    jobs.add("b", [nothing] * 3)
    taken = [jobs.take() for _ in range(2)]
    for job in taken:
        assert job is not None
        jobs.end(job, 0.01)
    used = sorted(turn.used_s for turn in jobs._turns.values())
    assert sum(used) == pytest.approx(0.02)


def test_a_tenant_that_was_idle_has_no_credit() -> None:
    jobs = FairJobs(1_000)
    jobs.add("old", [nothing] * 1_000)
    jobs.add("idle", [nothing])
    costs = {"old": 0.01, "idle": 0.01}
    run(jobs, costs, 501)
    jobs.add("idle", [nothing] * 100)
    order = run(jobs, costs, 40)
    assert 18 <= order.count("old") <= 22


def test_the_jobs_of_a_tenant_run_in_their_order() -> None:
    jobs = FairJobs(1_000)
    order: list[int] = []
    for number in range(100):
        jobs.add("a", [partial(order.append, number)])
    for _ in range(100):
        taken = jobs.take()
        assert taken is not None
        taken.run()
        jobs.end(taken, 0.001)
    assert order == list(range(100))
    assert jobs.take() is None


def test_a_tenant_leaves_a_slot_to_others() -> None:
    jobs = FairJobs(4)
    jobs.add("a", [nothing] * 9)
    taken = [jobs.take() for _ in range(4)]
    assert [job is None for job in taken] == [False, False, False, True]
    assert not jobs.ready
    jobs.add("b", [nothing])
    other = jobs.take()
    assert other is not None
    assert other.turn.tenant == "b"
    # A job that waits does not have a slot.
    assert taken[0] is not None
    jobs.pause(taken[0])
    assert jobs.ready
    jobs.resume(taken[0])
    jobs.end(taken[0], 0.01)
    following = jobs.take()
    assert following is not None
    assert following.turn.tenant == "a"
    assert jobs.take() is None


def test_tenants_that_have_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_jobs, "MAX_IDLE", 10)
    jobs = FairJobs(1_000)
    for number in range(1_000):
        jobs.add(str(number), [nothing])
        run(jobs, {str(number): 0.001}, 1)
        assert jobs.take() is None
    assert len(jobs._turns) <= 11


def test_a_thread_runs_the_quick_jobs_of_one_tenant_before_the_slow_ones_of_another() -> None:
    pool = Pool(1)
    order: list[str] = []
    begins, done = threading.Event(), threading.Event()

    def slow() -> None:
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        order.append("slow")

    pool.submit([partial(begins.wait, BOUND_S)])  # type: ignore[list-item]
    pool.submit([slow] * 3, tenant="a")
    pool.submit([partial(order.append, "quick")] * 20, tenant="b")
    pool.submit([done.set], tenant="a")
    begins.set()
    assert done.wait(BOUND_S)
    assert order.index("quick") <= 1
    assert order[:21].count("quick") == 20
