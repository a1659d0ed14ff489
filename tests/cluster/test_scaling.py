"""The number of workers in a Ray cluster: it depends on the load, stays between two bounds, and
does not oscillate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenbus.clients.cluster.scaling import (
    FULL,
    IDLE,
    Bounds,
    Scaling,
    controller_workers_needed,
    gpu_workers_needed,
)
from tokenbus.protocol.messages import Status, WorkerStatus
from tokenbus.protocol.settings import Settings

UP_S, DOWN_S = 5.0, 60.0


def scaling(least: int = 2, most: int = 16) -> Scaling:
    return Scaling(Bounds(least, most), UP_S, DOWN_S)


def status(*workers: tuple[str, int, float], queued: int = 0) -> Status:
    """A status of the broker. ``workers``: the role, the number of requests and the waiting rounds
    of each worker. ``queued``: waiting requests."""
    return Status(
        version="1",
        uptime_s=1.0,
        sessions=1,
        streams=1,
        queued=queued,
        workers=[
            WorkerStatus(
                name=f"w{i}",
                role=role,
                pid=i,
                host="h",
                state="ready",
                models=[],
                requests=requests,
                capacity=512,
                heartbeat_age_s=0.1,
                load={"waiting": waiting},
            )
            for i, (role, requests, waiting) in enumerate(workers)
        ],
    )


def test_the_least_run_at_once_without_any_load() -> None:
    assert scaling().target(0, 0.0, 0.0) == 2


def test_more_run_when_more_were_needed_for_a_while_and_not_before() -> None:
    rule = scaling()
    assert rule.target(2, 5.0, 0.0) == 2
    assert rule.target(2, 5.0, UP_S - 0.1) == 2
    assert rule.target(2, 5.0, UP_S) == 7, "the needed number and some room"


def test_a_peak_that_is_over_changes_nothing() -> None:
    rule = scaling()
    rule.target(2, 5.0, 0.0)
    rule.target(2, 1.5, 3.0)
    assert rule.target(2, 5.0, UP_S + 0.1) == 2


def test_there_are_never_more_than_the_most() -> None:
    rule = scaling(most=4)
    rule.target(2, 100.0, 0.0)
    assert rule.target(2, 100.0, UP_S) == 4
    assert rule.target(4, 100.0, 10 * UP_S) == 4


def test_one_at_a_time_leaves_and_each_after_the_whole_wait() -> None:
    rule = scaling()
    assert rule.target(8, 0.5, 0.0) == 8
    assert rule.target(8, 0.5, DOWN_S) == 7
    assert rule.target(7, 0.5, DOWN_S + 1.0) == 7
    assert rule.target(7, 0.5, 2 * DOWN_S + 1.0) == 6


@given(workers=st.integers(3, 15), part=st.floats(IDLE + 0.01, FULL))
def test_between_idle_and_full_nothing_changes(workers: int, part: float) -> None:
    rule = scaling()
    needed = max(part * workers, IDLE * (workers - 1) + 0.001)
    assert {rule.target(workers, needed, now) for now in (0.0, 100.0, 1000.0)} == {workers}


@given(st.floats(0.0, 20.0))
def test_a_steady_load_settles(needed: float) -> None:
    rule, current, now = scaling(), 2, 0.0
    numbers = []
    for _ in range(400):
        now += 10.0
        current = rule.target(current, needed, now)
        numbers.append(current)
    assert len(set(numbers[-50:])) == 1


def test_gpu_workers_are_needed_for_what_runs_and_what_waits() -> None:
    settings = Settings(capacity=512, max_running=100)
    assert gpu_workers_needed(status(("gpu", 80, 0), ("gpu", 40, 0), queued=30), settings) == 1.5


def test_controller_workers_are_needed_where_rounds_wait_at_all_of_them() -> None:
    settings = Settings(controller_capacity=100)
    assert controller_workers_needed(status(("controller", 50, 3.0)), settings) == 2 * FULL
    busy, idle = ("controller", 50, 3.0), ("controller", 10, 0.0)
    assert controller_workers_needed(status(busy, idle), settings) == 0.6
    assert controller_workers_needed(status(), settings) == 0.0
