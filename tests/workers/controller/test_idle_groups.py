"""Tenants share the wake-ups of idle groups. The tests simulate the clock."""

from __future__ import annotations

import pytest
from tokenbus.protocol.worker_messages import Variable, VariableAnswer
from tokenbus.workers.controller.idle_groups import IDLE_WAKE_S, MAX_IDLE_ROUNDS, IdleQueue
from tokenbus.workers.controller.sequence_group import SequenceGroup

from .played import UNHURRIED

SECONDS = 1.005
"""The simulated time of a test, in seconds."""


class Idle(SequenceGroup):
    """A group of ``num_sequences`` sequences without controllers."""

    num_sequences = 1


def perform(operation: Variable) -> VariableAnswer:
    raise AssertionError(f"no sequence runs, but {operation} was called")


def idle(tenant: str, rounds: int = 1) -> Idle:
    group = Idle(1, 0, UNHURRIED, b"", 10, False, perform)
    group.tenant, group.num_sequences = tenant, rounds
    return group


def wakes(groups: list[Idle]) -> dict[Idle, int]:
    """How often each group is woken, if it becomes idle again immediately."""
    queue, now = IdleQueue(), 0.0
    for group in groups:
        queue.add(group, now)
    counts = dict.fromkeys(groups, 0)
    while now <= SECONDS:
        woken, turn = queue.next(now)
        if woken is None:
            now = turn
            continue
        assert isinstance(woken, Idle)
        counts[woken] += 1
        queue.add(woken, now)
    return counts


@pytest.mark.parametrize("count", [1, MAX_IDLE_ROUNDS])
def test_few_idle_groups_are_woken_every_time(count: int) -> None:
    counts = wakes([idle("one") for _ in range(count)])
    assert set(counts.values()) == {round(1 / IDLE_WAKE_S)}


@pytest.mark.parametrize(("count", "rounds"), [(800, 1), (20, 64)])
def test_many_idle_groups_of_a_tenant_share_its_rounds(count: int, rounds: int) -> None:
    greedy = [idle("greedy", rounds) for _ in range(count)]
    other = idle("other")
    counts = wakes([*greedy, other])
    most = (SECONDS / IDLE_WAKE_S + 1) * MAX_IDLE_ROUNDS + rounds
    own = [counts[group] for group in greedy]
    assert 0.9 * most < sum(own) * rounds <= most
    assert max(own) - min(own) <= 1
    assert counts[other] == round(1 / IDLE_WAKE_S)


def test_closed_groups_leave_the_queue_and_take_no_time() -> None:
    queue = IdleQueue()
    for _ in range(1000):
        closed = idle("one", 64)
        queue.add(closed, 0.0)
        closed.end()
    live = idle("one")
    queue.add(live, 0.0)
    assert queue.next(0.0) == (None, IDLE_WAKE_S)
    assert queue.next(IDLE_WAKE_S) == (live, IDLE_WAKE_S)
    assert queue.next(IDLE_WAKE_S) == (None, float("inf"))
