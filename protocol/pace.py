"""Measures the recent rate of events. From this rate, the broker estimates how long a request waits
in a queue, and when a refused client should try again."""

from __future__ import annotations

RETRY_AFTER_S = 1.0
"""Seconds until a client should try again if the rate is not known."""
MEMORY = 16
"""Approximate number of bursts (``Pace``) in the average. Older bursts have smaller weights."""
MIN_TIMES = 4
"""The rate is unknown until events have happened at this number of different times."""
BOUNDS_S = (0.1, 60.0)
"""The shortest and the longest time that ``retry_after_s`` returns for one client, in seconds."""


class Pace:
    """The rate of one kind of event.

    Events at the same time count as one burst, because one step of a GPU worker may end several
    streams. The rate is the average number of events in a burst, divided by the average time
    between two bursts. Times are seconds of a monotonic clock.
    """

    __slots__ = ("_at", "_burst", "_due", "_gap_s", "_number", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._at = 0.0
        self._burst = 0
        """Number of events at the time ``_at``."""
        self._number = 0.0
        self._gap_s = 0.0
        self._due = 0.0
        """The time at which the last refused client should try again."""

    def note(self, now: float) -> None:
        """Records an event."""
        if now <= self._at and self._times:
            self._burst += 1
            return
        if self._times:
            weight = min(self._times, MEMORY)
            self._number += (self._burst - self._number) / weight
            self._gap_s += (now - self._at - self._gap_s) / weight
        self._times += 1
        self._at, self._burst = now, 1

    def per_s(self, now: float) -> float | None:
        """Events per second; None if the rate is not known."""
        if self._times < MIN_TIMES:
            return None
        longer_s = max(0.0, now - self._at - self._gap_s)
        return self._number / (self._gap_s + longer_s / min(self._times, MEMORY))

    def retry_after_s(self, now: float) -> float:
        """Seconds after which a refused client should try again. Each event is assumed to make room
        for one client.

        Each refused client gets a later time than the previous one, up to the longest time of
        ``BOUNDS_S``. So the clients do not all try again at the same time.
        """
        rate = self.per_s(now)
        if rate is None:
            return RETRY_AFTER_S
        least, most = BOUNDS_S
        self._due = min(max(self._due, now) + 1 / rate, now + most)
        return round(max(self._due - now, least), 3)
