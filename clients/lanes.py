"""Delivers the rows of TOKEN messages in columns (``protocol/columns.py``). Each row goes to the
*call* of its stream. A call is one request of this client (``calls.py``).

Consecutive messages often have the same sequences. As long as they do, the calls are not looked up
again, unless a call has ended or has sent ATTACH.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from ..protocol.columns import Row, Rows, TokenColumns, unpack_columns
from .calls import Call, Event, Unread


class Step(NamedTuple):
    """The rows of a message. For each row, ``unread`` has the queue from which the application
    reads the entries of the row's call."""

    unread: list[Unread]
    rows: Iterable[Row]

    def deliver(self) -> None:
        """Adds each row to the queue of its call. If ``Unread.watched`` is set, also calls
        ``Unread.wake``."""
        for unread, row in zip(self.unread, self.rows, strict=True):
            unread.append(row)
            if unread.watched:
                unread.wake()


Delivery = list[Step | tuple[Call, Sequence[Event]]]
"""Events to deliver. An element is a step, or one call with its events."""


def hand_out(delivery: Delivery) -> None:
    """Delivers the events of each call."""
    for part in delivery:
        if isinstance(part, Step):
            part.deliver()
        else:
            call, events = part
            call.take(events)


class Lanes:
    """The calls that receive the rows of consecutive messages with the same sequences.

    All these messages have rows of the same sequences in the same order. So the lanes only count
    the messages. Before the counts of the calls are read, ``settle`` adds the number of messages to
    them.
    """

    def __init__(self, body: TokenColumns, rows: Rows, calls: list[Call]) -> None:
        self._streams, self._seqs = body.streams, body.seqs
        self._rows = rows
        self._calls = calls
        self._unread = [call.unread for call in calls]
        self._uncounted = 0
        """Number of messages that ``settle`` has not yet added to the counts of the calls."""
        self._received_at = 0.0

    @classmethod
    def of(cls, body: TokenColumns, calls: Mapping[int, Call]) -> Self | None:
        """The lanes of a message. None if the call of a row is unknown or has ended, if it waits
        for the answer to an ATTACH, or if it receives entries a second time. Raises RequestError if
        the columns differ in length or a stream id is not valid."""
        rows = unpack_columns(body)
        found = []
        for stream, seq in zip(rows.streams, rows.seqs, strict=True):
            call = calls.get(stream)
            if call is None or call.attaching or call.repeats or not call.all_new(seq):
                return None
            found.append(call)
        return cls(body, rows, found)

    def step(self, body: TokenColumns, now: float) -> Step | None:
        """Counts a message, and returns the step that delivers its rows. Returns None if the
        message has other sequences than these lanes. Raises RequestError if the columns differ in
        length."""
        if body.streams != self._streams or body.seqs != self._seqs:
            return None
        rows = unpack_columns(body, self._rows)
        self._uncounted += 1
        self._received_at = now
        return Step(self._unread, zip(*rows, strict=True))

    def settle(self) -> None:
        """Adds the count of messages to the counts of the calls."""
        count, self._uncounted = self._uncounted, 0
        if count:
            for call, seq in zip(self._calls, self._rows.seqs, strict=True):
                call.count(seq, count)
                call.received_at = self._received_at
                call.failed_at = None
