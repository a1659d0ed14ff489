"""How often something happens of late: how long a queue takes, and when to try again."""

from __future__ import annotations

RETRY_AFTER_S = 1.0
"""When to try again where nothing is known of how long it will take, in seconds."""
MEMORY = 16
"""The times at which something happened, of which the average is taken, weights decaying."""
FEWEST = 4
"""As long as it happened at fewer times, how often it happens is not known."""
BOUNDS_S = (0.1, 60.0)
"""The least and the most for which a client is asked to wait."""


class Pace:
    """The rate of one kind of event.

    Events at one time count as one burst: a step of a GPU worker ends several streams. The
    rate is the average burst over the average time between two. Times are seconds of a clock that
    does not go back.
    """

    __slots__ = ("_at", "_burst", "_due", "_gap_s", "_number", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._at = 0.0
        self._burst = 0
        """Events at ``_at``."""
        self._number = 0.0
        self._gap_s = 0.0
        self._due = 0.0
        """When the last client that was asked to wait is to try again."""

    def note(self, now: float) -> None:
        """It happens."""
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
        """How often it happens in a second; None where that is not known."""
        if self._times < FEWEST:
            return None
        longer_s = max(0.0, now - self._at - self._gap_s)
        return self._number / (self._gap_s + longer_s / min(self._times, MEMORY))

    def retry_after_s(self, now: float) -> float:
        """When a client that was refused is to try again, where each event gives place to one.

        Those that are refused get one such time each, one behind the other, so that they do not all
        come back at once.
        """
        rate = self.per_s(now)
        if rate is None:
            return RETRY_AFTER_S
        least, most = BOUNDS_S
        self._due = min(max(self._due, now) + 1 / rate, now + most)
        return round(max(self._due - now, least), 3)
