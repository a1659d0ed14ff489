"""The queue of waiting sequences has the order of a plain list, and its work does not depend on its
length."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenbus.protocol.sampling import Sampling
from tokenbus.workers.gpu.engine import waiting
from tokenbus.workers.gpu.engine.block_manager import BlockManager
from tokenbus.workers.gpu.engine.scheduler import Scheduler
from tokenbus.workers.gpu.engine.sequence import Sequence
from tokenbus.workers.gpu.engine.waiting import WaitingQueue

from ...counts import examples

FEW = 4


@pytest.fixture
def soon_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a waiting sequence overdue after ``FEW`` others have overtaken it."""
    monkeypatch.setattr(waiting, "MAX_OVERTAKEN", FEW)


class Visited(Sequence):
    """A sequence that counts how often its fields are read."""

    visits = 0

    def __getattribute__(self, name: str) -> object:
        Visited.visits += 1
        return super().__getattribute__(name)


def sequence(
    arrival: int, priority: int = 0, client: int = 0, prompt: int = 1, kind: type = Sequence
) -> Sequence:
    made: Sequence = kind(
        request=arrival,
        seq=0,
        tokens=[arrival % 50] * prompt,
        num_prompt=prompt,
        sampling=Sampling(),
        max_length=prompt + 1000,
        arrival=arrival,
        priority=priority,
        client=client,
    )
    return made


class Plain:
    """The order by its definition: a search through a list."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.overtaken: Counter[Sequence] = Counter()

    def first(self) -> Sequence:
        shares = Counter(s.client for s in self.running)
        return min(
            self.waiting,
            key=lambda s: (self.overtaken[s] < FEW, -s.priority, shares[s.client], s.arrival),
        )

    def admit(self, one: Sequence) -> None:
        self.waiting.remove(one)
        self.running.append(one)
        self.overtaken.update(s for s in self.waiting if s.arrival < one.arrival)


@pytest.mark.usefixtures("soon_overdue")
@settings(max_examples=examples(100))
@given(rng=st.randoms(use_true_random=False))
def test_the_order_is_by_overtaking_priority_share_and_arrival(rng: random.Random) -> None:
    queue, plain = WaitingQueue(), Plain()
    arrivals: Iterator[int] = iter(range(1000))
    forked = 0
    for _ in range(120):
        action = rng.choice(
            ["add", "add", "admit", "admit", "admit", "back", "leave", "end", "fork"]
        )
        if action == "add":
            one = sequence(next(arrivals), rng.randrange(3), rng.randrange(3))
            queue.append(one)
            plain.waiting.append(one)
        elif action == "admit" and plain.waiting:
            one = queue.first()
            assert one is plain.first()
            plain.admit(one)
            queue.admit(one)
            queue.count_running(one.client, 1)
        elif action == "leave" and plain.waiting:
            one = rng.choice(plain.waiting)
            queue.remove(one)
            plain.waiting.remove(one)
        elif action in ("back", "end") and plain.running:
            one = plain.running.pop(rng.randrange(len(plain.running)))
            queue.count_running(one.client, -1)
            if action == "back":
                queue.put_back(one)
                plain.waiting.append(one)
        elif action == "fork" and plain.running:
            parent = rng.choice(plain.running)
            one = sequence(parent.arrival, parent.priority, parent.client)
            forked += 1
            queue.put_back(one)
            plain.waiting.append(one)
        assert len(queue) == len(plain.waiting)
        assert set(queue) == set(plain.waiting)
    while plain.waiting:
        one = queue.first()
        assert one is plain.first()
        plain.admit(one)
        queue.admit(one)
        queue.count_running(one.client, 1)
    for one in plain.running:
        queue.count_running(one.client, -1)
    assert not queue._shares
    assert not queue._ordinary
    assert not queue._overdue
    assert not queue._newcomers
    assert not list(queue.returned)


def _step(s: Scheduler) -> None:
    """Runs a step. Its forward gives each complete sequence one more token."""
    for chunk in s.schedule().chunks:
        chunk.sequence.num_computed_tokens = chunk.end
        if chunk.completes:
            chunk.sequence.tokens.append(1)


def _visits_of_steps(waiting_ones: int, end_one: bool, clients: int) -> int:
    """How often 50 steps read fields of sequences, with ``waiting_ones`` waiting sequences and
    ``max_num_seqs`` running ones. ``end_one``: in each step a sequence ends, so that another
    runs."""
    s = Scheduler(BlockManager(400, 16), 8, 64)
    for i in range(8 + waiting_ones):
        s.add(sequence(i, client=i % clients, prompt=20, kind=Visited))
    while len(s.running) < 8:
        _step(s)
    Visited.visits = 0
    for _ in range(50):
        _step(s)
        if end_one:
            s.remove(next(iter(s.running)))
    assert len(s.waiting) == waiting_ones - (49 if end_one else 0)
    return Visited.visits


@pytest.mark.parametrize("end_one", [False, True], ids=["no slot is free", "one in each step"])
@pytest.mark.parametrize("clients", [1, 100_000], ids=["one client", "a client each"])
def test_ten_thousand_waiting_cost_a_step_what_a_hundred_do(end_one: bool, clients: int) -> None:
    few = _visits_of_steps(100, end_one, clients)
    many = _visits_of_steps(10_000, end_one, clients)
    assert many == few


def test_ten_thousand_waiting_are_not_looked_at_where_blocks_run_out() -> None:
    def visits(waiting_ones: int) -> int:
        s = Scheduler(BlockManager(12, 16), 8, 64)
        for i in range(2 + waiting_ones):
            s.add(sequence(i, prompt=40, kind=Visited))
        Visited.visits = 0
        for _ in range(120):
            _step(s)
        assert s.preemptions > 0
        return Visited.visits

    assert visits(10_000) == visits(100)


def test_ten_thousand_waiting_forks_cost_an_admission_what_a_hundred_do() -> None:
    def visits(forks: int) -> int:
        queue = WaitingQueue()
        for _ in range(forks):
            queue.put_back(sequence(0, client=1, kind=Visited))
        later = [sequence(1 + i, client=2, kind=Visited) for i in range(50)]
        for one in later:
            queue.append(one)
        Visited.visits = 0
        for one in later:
            queue.admit(one)
        return Visited.visits

    assert visits(10_000) == visits(100)
