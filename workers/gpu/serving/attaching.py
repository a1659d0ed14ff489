"""The ATTACHes that a worker has not answered: an answer has all entries of a stream, which may be
100,000, and a client may send many ATTACHes. So the answers of one pass of the worker's loop have a
bound, and sessions take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from .streams import Stream

MAX_ENTRIES = 2048
"""Entries for which a pass of the loop allows. A larger answer uses up those of later passes."""


class Attaching(NamedTuple):
    """An ATTACH that is not answered."""

    stream: Stream
    link: int
    """From which broker it came."""
    received: int
    """Number of entries that the client has."""


class AttachQueue:
    """The ATTACHes that wait for their answer. A pass of the loop begins with ``renew``."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[Attaching]] = OrderedDict()
        """By session, the next one first."""
        self._left = MAX_ENTRIES
        """Entries that may still be sent in this pass; fewer than 0 after a large answer."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, attaching: Attaching) -> None:
        """Adds an ATTACH that has arrived."""
        self._waiting.setdefault(attaching.stream.session, deque()).append(attaching)

    def renew(self) -> None:
        """A pass of the loop begins."""
        self._left = min(MAX_ENTRIES, self._left + MAX_ENTRIES)

    def spend(self, entries: int) -> None:
        """An answer was made of a stream with this number of entries."""
        self._left -= max(1, entries)

    def next(self) -> Attaching | None:
        """The next ATTACH to answer; None if no other one is to be answered in this pass."""
        if self._left <= 0 or not self._waiting:
            return None
        session, waiting = self._waiting.popitem(last=False)
        attaching = waiting.popleft()
        if waiting:
            self._waiting[session] = waiting
        return attaching
