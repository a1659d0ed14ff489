"""The waiting sequences, in the order in which they are admitted.

The highest priority goes first; then the client with the fewest running sequences; then the first
to arrive. A sequence before which ``MAX_OVERTAKEN`` later arrivals were admitted goes before all
that were overtaken less often: the bound on its wait.

Thousands may wait, so no operation visits all of them: each is a few binary searches (``bisect``)
in sorted lists.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

from .sequence import Sequence

MAX_OVERTAKEN = 1024
"""Later arrivals that may be admitted before a waiting sequence."""


class WaitingQueue:
    """Sequences that wait for a slot and for blocks.

    ``append`` takes newcomers, whose ``arrival`` grows from one to the next; ``put_back`` takes
    those that were admitted before, or whose parent was.
    """

    def __init__(self) -> None:
        self._shares: dict[int, int] = {}
        """By client: its running sequences, where it has any."""
        self._ordinary = _Order(self._shares)
        self._overdue = _Order(self._shares)
        self._ticks = count()
        self._places: dict[Sequence, tuple[_Order, int]] = {}
        """By waiting sequence: the order that it is in, and its tick."""
        self._newcomers: OrderedDict[Sequence, None] = OrderedDict()
        """Those in ``_ordinary`` that were never admitted, by arrival."""
        self._returned: dict[Sequence, None] = {}
        """Those in both orders that were put back. They alone can have blocks."""
        self._latest: list[int] = []
        """The ``MAX_OVERTAKEN`` latest arrivals among the admitted, sorted. Nothing that arrived
        later than a newcomer was admitted before the newcomer arrived, so the number of greater
        ones here is how often it was overtaken."""

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._places

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._places)

    @property
    def returned(self) -> Iterator[Sequence]:
        """The waiting sequences that may have blocks."""
        return iter(self._returned)

    def append(self, sequence: Sequence) -> None:
        """Takes a newcomer, which arrived later than all before it."""
        self._newcomers[sequence] = None
        self._put(self._ordinary, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Takes a sequence that was admitted before, at the place of its arrival."""
        self._returned[sequence] = None
        overdue = sequence.overtaken >= MAX_OVERTAKEN
        self._put(self._overdue if overdue else self._ordinary, sequence)

    def first(self) -> Sequence:
        """The next sequence to admit; there is one."""
        return (self._overdue or self._ordinary).first()

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, which was not admitted."""
        if sequence not in self._returned:
            later = len(self._latest) - bisect_right(self._latest, sequence.arrival)
            sequence.overtaken = max(sequence.overtaken, later)
        self._returned.pop(sequence, None)
        self._newcomers.pop(sequence, None)
        order, tick = self._places.pop(sequence)
        order.remove(sequence, tick)

    def admit(self, sequence: Sequence) -> None:
        """Takes a sequence out and counts it among those that went before the others."""
        self.remove(sequence)
        insort(self._latest, sequence.arrival)
        if len(self._latest) > MAX_OVERTAKEN:
            del self._latest[0]
        for other in self._returned:
            if other.arrival < sequence.arrival:
                other.overtaken += 1
                if other.overtaken == MAX_OVERTAKEN:
                    self._move(other)
        if len(self._latest) == MAX_OVERTAKEN:
            while self._newcomers:
                other = next(iter(self._newcomers))
                if other.arrival >= self._latest[0]:
                    break
                del self._newcomers[other]
                self._move(other)

    def count_running(self, client: int, change: int) -> None:
        """A client has more or fewer running sequences than before."""
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
        """From the ordinary to the overdue."""
        order, tick = self._places[sequence]
        order.remove(sequence, tick)
        self._places[sequence] = self._overdue, tick
        self._overdue.add(sequence, tick)


class _Order:
    """Sequences by priority, their client's share of what runs, arrival, and tick.

    The sequences of one client and priority are a sorted list. Another list has the heads of these
    lists with the share of each client, so that a change of a share moves one head for each
    priority.
    """

    def __init__(self, shares: dict[int, int]) -> None:
        self._shares = shares
        self._queues: dict[int, dict[int, list[tuple[int, int, Sequence]]]] = {}
        """By client and priority: (arrival, tick, sequence)."""
        self._heads: list[tuple[int, int, int, int, Sequence]] = []
        """(-priority, share, arrival, tick, sequence) of the first of each queue."""

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
        """Takes a client's heads out, before its share changes; their priorities."""
        priorities = list(self._queues.get(client, ()))
        for priority in priorities:
            self._take_head(client, priority)
        return priorities

    def put_heads(self, client: int, priorities: list[int]) -> None:
        """Puts them back."""
        for priority in priorities:
            self._put_head(client, priority)

    def _head(self, client: int, priority: int) -> tuple[int, int, int, int, Sequence]:
        arrival, tick, sequence = self._queues[client][priority][0]
        return -priority, self._shares.get(client, 0), arrival, tick, sequence

    def _put_head(self, client: int, priority: int) -> None:
        insort(self._heads, self._head(client, priority))

    def _take_head(self, client: int, priority: int) -> None:
        del self._heads[bisect_left(self._heads, self._head(client, priority))]
