"""Delivers the rows of columns, as long as consecutive messages have the same streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from ..protocol.columns import Row, Rows, TokenColumns, unpack_columns
from .calls import Call, Event, Unread


class Step(NamedTuple):
    """The rows of a message, and the call of each."""

    unread: list[Unread]
    rows: Iterable[Row]

    def deliver(self) -> None:
        """Adds each row to the queue of its reader; may call ``Unread.wake``."""
        for unread, row in zip(self.unread, self.rows, strict=True):
            unread.append(row)
            if unread.watched:
                unread.wake()


Delivery = list[Step | tuple[Call, Sequence[Event]]]
"""Events to be delivered to the readers of their calls."""


def hand_out(delivery: Delivery) -> None:
    """Delivers the events of each call."""
    for part in delivery:
        if isinstance(part, Step):
            part.deliver()
        else:
            call, events = part
            call.take(events)


class Lanes:
    """The calls of the rows of columns.

    Counts that would be updated for each entry of a call are kept here for all of them. ``settle``
    adds them to the calls before they are read.
    """

    def __init__(self, body: TokenColumns, rows: Rows, calls: list[Call]) -> None:
        self._streams, self._seqs = body.streams, body.seqs
        self._rows = rows
        self._calls = calls
        self._unread = [call.unread for call in calls]
        self._uncounted = 0
        """Rows of each lane that were not passed on yet."""
        self._received_at = 0.0

    @classmethod
    def of(cls, body: TokenColumns, calls: Mapping[int, Call]) -> Self | None:
        """The lanes of a message; None if a row needs special treatment. That is so if its call has
        ended or attaches, or if this attempt repeats delivered entries. Raises RequestError if the
        columns differ in length."""
        rows = unpack_columns(body)
        found = []
        for stream, seq in zip(rows.streams, rows.seqs, strict=True):
            call = calls.get(stream)
            if call is None or call.attaching or not call.all_new(seq):
                return None
            found.append(call)
        return cls(body, rows, found)

    def step(self, body: TokenColumns, now: float) -> Step | None:
        """Counts the rows of a message; None if they belong to other streams. Raises RequestError
        like ``of``."""
        if body.streams != self._streams or body.seqs != self._seqs:
            return None
        rows = unpack_columns(body, self._rows)
        self._uncounted += 1
        self._received_at = now
        return Step(self._unread, zip(*rows, strict=True))

    def settle(self) -> None:
        """Adds the counts to the calls."""
        count, self._uncounted = self._uncounted, 0
        if count:
            for call, seq in zip(self._calls, self._rows.seqs, strict=True):
                call.count(seq, count)
                call.received_at = self._received_at
                call.failed_at = None
