"""The queue of unanswered ATTACH messages. An answer can contain all entries of a stream, up to
100,000, and a client may send many ATTACHes. So each pass of the worker's loop sends a bounded
number of entries, and sessions take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple

from .streams import Stream

MAX_ENTRIES = 2048
"""Maximum number of entries that one pass of the loop sends. A larger answer also uses the budget
of later passes."""


class Attaching(NamedTuple):
    """An unanswered ATTACH."""

    stream: Stream
    link: int
    """The link to the broker that forwarded it."""
    received: int
    """Number of entries that the client has received."""


class AttachQueue:
    """The unanswered ATTACHes. Each pass of the loop begins with ``renew``."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, deque[Attaching]] = OrderedDict()
        """The ATTACHes of each session; the session whose turn is next comes first."""
        self._left = MAX_ENTRIES
        """Number of entries that this pass may still send; negative after a large answer."""

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, attaching: Attaching) -> None:
        """Adds an ATTACH."""
        self._waiting.setdefault(attaching.stream.session, deque()).append(attaching)

    def renew(self) -> None:
        """Renews the budget at the beginning of a pass of the loop."""
        self._left = min(MAX_ENTRIES, self._left + MAX_ENTRIES)

    def spend(self, entries: int) -> None:
        """Charges the budget for the answer to a stream with this number of entries."""
        self._left -= max(1, entries)

    def next(self) -> Attaching | None:
        """The next ATTACH to answer; None if none waits or the budget of this pass is used up."""
        if self._left <= 0 or not self._waiting:
            return None
        session, waiting = self._waiting.popitem(last=False)
        attaching = waiting.popleft()
        if waiting:
            self._waiting[session] = waiting
        return attaching
