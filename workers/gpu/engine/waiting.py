"""The waiting sequences, in the order in which they are admitted.

The order is by priority, then by the number of the client's running sequences (fewest first), then
by arrival. A deferred sequence that was admitted counts as running here. A sequence is overdue when
``MAX_OVERTAKEN`` later arrivals have been admitted before it. Overdue sequences are admitted before
all others, so the wait is bounded.

Thousands of sequences may wait, so operations do not visit all of them. Most operations are a few
binary searches (``bisect``) in sorted lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, count
from math import inf

from .sequence import Sequence

MAX_OVERTAKEN = 1024
"""A waiting sequence is overdue when this number of later arrivals was admitted before it."""


class WaitingQueue:
    """Sequences that wait for blocks and for one of the ``max_num_seqs`` slots.

    ``append`` adds new sequences, in increasing order of ``arrival``. ``put_back`` adds forks, and
    sequences that return to the queue.
    """

    def __init__(self) -> None:
        self._shares: dict[int, int] = {}
        """For each client: number of its running sequences, including deferred sequences that were
        admitted. Clients without such sequences are left out."""
        self._ordinary = _Order(self._shares)
        self._overdue = _Order(self._shares)
        self._ticks = count()
        self._places: dict[Sequence, tuple[_Order, int]] = {}
        """For each waiting sequence: the ``_Order`` that contains it, and its tick. Ticks count the
        insertions into the queue."""
        self._newcomers: OrderedDict[Sequence, None] = OrderedDict()
        """Sequences in ``_ordinary`` that ``append`` has added, by arrival."""
        self._returned: dict[int, _Returned] = {}
        """Waiting sequences that ``put_back`` has added, by arrival. The sequences of a request
        have the same arrival. Only these sequences can have blocks."""
        self._latest: list[int] = []
        """The ``MAX_OVERTAKEN`` latest arrivals among admitted sequences, sorted. For a new
        sequence that still waits, the entries above its own arrival are the sequences that have
        overtaken it. If more than ``MAX_OVERTAKEN`` have overtaken it, all entries are above its
        arrival."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._places)

    @property
    def returned(self) -> Iterator[Sequence]:
        """The waiting sequences that may have blocks."""
        return chain.from_iterable(group.starts for group in self._returned.values())

    def append(self, sequence: Sequence) -> None:
        """Adds a new sequence, which must be the latest arrival."""
        self._newcomers[sequence] = None
        self._put(self._ordinary, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a fork, or a sequence that returns to the queue. The sequence keeps its original
        arrival."""
        self._returned.setdefault(sequence.arrival, _Returned()).add(sequence)
        overdue = sequence.overtaken >= MAX_OVERTAKEN
        self._put(self._overdue if overdue else self._ordinary, sequence)

    def first(self) -> Sequence:
        """The next sequence to admit. The queue must not be empty."""
        return (self._overdue or self._ordinary).first()

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from the queue."""
        group = self._returned.get(sequence.arrival)
        if group is None or sequence not in group.starts:
            later = len(self._latest) - bisect_right(self._latest, sequence.arrival)
            sequence.overtaken = max(sequence.overtaken, later)
        else:
            group.remove(sequence)
            if not group.starts:
                del self._returned[sequence.arrival]
        self._newcomers.pop(sequence, None)
        order, tick = self._places.pop(sequence)
        order.remove(sequence, tick)

    def admit(self, sequence: Sequence) -> None:
        """Removes a sequence when it is admitted. It overtakes all earlier arrivals that still
        wait."""
        self.remove(sequence)
        insort(self._latest, sequence.arrival)
        if len(self._latest) > MAX_OVERTAKEN:
            del self._latest[0]
        for arrival, group in self._returned.items():
            if arrival < sequence.arrival:
                for other in group.overtake():
                    self._move(other)
        if len(self._latest) == MAX_OVERTAKEN:
            while self._newcomers:
                other = next(iter(self._newcomers))
                if other.arrival >= self._latest[0]:
                    break
                del self._newcomers[other]
                self._move(other)

    def num_running(self, client: int) -> int:
        """The number of a client's running sequences."""
        return self._shares.get(client, 0)

    def count_running(self, client: int, change: int) -> None:
        """Adds ``change`` to a client's number of running sequences."""
        orders = self._ordinary, self._overdue
        taken = [order.take_heads(client) for order in orders]
        share = self._shares.get(client, 0) + change
        if share:
            self._shares[client] = share
        else:
            del self._shares[client]
        for order, priorities in zip(orders, taken, strict=True):
            order.put_heads(client, priorities)

    def _put(self, order: _Order, sequence: Sequence) -> None:
        tick = next(self._ticks)
        self._places[sequence] = order, tick
        order.add(sequence, tick)

    def _move(self, sequence: Sequence) -> None:
        """Moves a sequence from the order of ordinary sequences to the order of overdue
        sequences."""
        order, tick = self._places[sequence]
        order.remove(sequence, tick)
        self._places[sequence] = self._overdue, tick
        self._overdue.add(sequence, tick)


class _Returned:
    """The sequences of one arrival that ``WaitingQueue.put_back`` has added. They are overtaken
    together. So an admission does not visit each sequence."""

    def __init__(self) -> None:
        self.starts: dict[Sequence, int] = {}
        """For each sequence: the value of ``_admitted`` minus ``Sequence.overtaken`` when the
        sequence was added."""
        self._admitted = 0
        """Number of later arrivals that were admitted since this object was made."""
        self._next_overdue = inf
        """A lower bound on the value of ``_admitted`` at which the next sequence is overdue."""

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        start = self.starts[sequence] = self._admitted - sequence.overtaken
        if sequence.overtaken < MAX_OVERTAKEN:
            self._next_overdue = min(self._next_overdue, start + MAX_OVERTAKEN)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence and sets its ``overtaken``."""
        sequence.overtaken = self._admitted - self.starts.pop(sequence)

    def overtake(self) -> list[Sequence]:
        """Counts the admission of a later arrival. Returns the sequences that are now overdue."""
        self._admitted += 1
        if self._admitted < self._next_overdue:
            return []
        last = self._admitted - MAX_OVERTAKEN
        later = (start for start in self.starts.values() if start > last)
        self._next_overdue = min(later, default=inf) + MAX_OVERTAKEN
        return [sequence for sequence, start in self.starts.items() if start == last]


class _Order:
    """Sequences ordered by priority, number of running sequences of the client, arrival and tick.

    Each client and priority has a sorted queue. ``_heads`` is a sorted list of the first sequences
    of all queues. When a client's number of running sequences changes, only the first sequences of
    its queues are moved in ``_heads``.
    """

    def __init__(self, shares: dict[int, int]) -> None:
        self._shares = shares
        self._queues: dict[int, dict[int, list[tuple[int, int, Sequence]]]] = {}
        """For each client and priority: the sorted queue of (arrival, tick, sequence)."""
        self._heads: list[tuple[int, int, int, int, Sequence]] = []
        """For the first sequence of each queue: (-priority, number of the client's running
        sequences, arrival, tick, sequence)."""

    def __bool__(self) -> bool:
        return bool(self._heads)

    def first(self) -> Sequence:
        return self._heads[0][-1]

    def add(self, sequence: Sequence, tick: int) -> None:
        client, priority = sequence.client, sequence.priority
        queue = self._queues.setdefault(client, {}).setdefault(priority, [])
        if queue:
            self._take_head(client, priority)
        insort(queue, (sequence.arrival, tick, sequence))
        self._put_head(client, priority)

    def remove(self, sequence: Sequence, tick: int) -> None:
        client, priority = sequence.client, sequence.priority
        queues = self._queues[client]
        queue = queues[priority]
        self._take_head(client, priority)
        del queue[bisect_left(queue, (sequence.arrival, tick, sequence))]
        if queue:
            self._put_head(client, priority)
            return
        del queues[priority]
        if not queues:
            del self._queues[client]

    def take_heads(self, client: int) -> list[int]:
        """Removes the first sequences of a client's queues from ``_heads``, before the client's
        number of running sequences changes. Returns the priorities of these queues."""
        priorities = list(self._queues.get(client, ()))
        for priority in priorities:
            self._take_head(client, priority)
        return priorities

    def put_heads(self, client: int, priorities: list[int]) -> None:
        """Adds the first sequences of a client's queues of these priorities to ``_heads`` again."""
        for priority in priorities:
            self._put_head(client, priority)

    def _head(self, client: int, priority: int) -> tuple[int, int, int, int, Sequence]:
        arrival, tick, sequence = self._queues[client][priority][0]
        return -priority, self._shares.get(client, 0), arrival, tick, sequence

    def _put_head(self, client: int, priority: int) -> None:
        insort(self._heads, self._head(client, priority))

    def _take_head(self, client: int, priority: int) -> None:
        del self._heads[bisect_left(self._heads, self._head(client, priority))]
