"""How many workers of a kind there should be: by what they have and what waits, with hysteresis.

No clock and no cluster: load and times in, a number out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...protocol.messages import Status
from ...protocol.settings import Settings

FULL = 0.8
"""A worker with this part of its room in use needs another one beside it."""
IDLE = 0.5
"""One worker less is enough where the others would have at most this part of their room in use.
Between the two nothing changes."""


class Bounds(NamedTuple):
    """The least and the most workers of a kind."""

    least: int
    most: int


class Scaling:
    """The number of workers of one kind. Times are seconds of a monotonic clock.

    It grows to what is needed as soon as more was needed throughout ``up_after_s``, and shrinks by
    one worker at a time, each time after less was needed throughout ``down_after_s``.
    """

    def __init__(self, bounds: Bounds, up_after_s: float, down_after_s: float) -> None:
        self._bounds = bounds
        self._up_after_s = up_after_s
        self._down_after_s = down_after_s
        self._more_since: float | None = None
        self._less_since: float | None = None

    def target(self, current: int, needed: float, now: float) -> int:
        """How many there should be, of ``current`` ones. ``needed``: how many workers would be
        filled by all the work that there is."""
        more = self._bounded(math.ceil(needed / FULL))
        less = self._bounded(math.ceil(needed / IDLE))
        self._more_since = _since(self._more_since, more > current, now)
        self._less_since = _since(self._less_since, less < current, now)
        if not self._bounds.least <= current <= self._bounds.most:
            return self._bounded(current)
        if self._more_since is not None and now - self._more_since >= self._up_after_s:
            self._more_since = None
            return more
        if self._less_since is not None and now - self._less_since >= self._down_after_s:
            self._less_since = None
            return current - 1
        return current

    def _bounded(self, number: int) -> int:
        return min(max(number, self._bounds.least), self._bounds.most)


def _since(before: float | None, holds: bool, now: float) -> float | None:
    """Since when it holds; None where it does not."""
    if not holds:
        return None
    return now if before is None else before


def gpu_workers_needed(status: Status, settings: Settings) -> float:
    """How many GPU workers would be filled by the requests that they have and those that wait."""
    having = sum(worker.requests for worker in status.workers if worker.role == "gpu")
    return (having + status.queued) / min(settings.capacity, settings.max_running)


def controller_workers_needed(status: Status, settings: Settings) -> float:
    """The same of controller workers; one more than there are where each has a round that waits for
    a thread."""
    workers = [worker for worker in status.workers if worker.role == "controller"]
    needed = sum(worker.requests for worker in workers) / settings.controller_capacity
    if workers and all(worker.load.get("waiting", 0.0) > 0 for worker in workers):
        needed = max(needed, FULL * (len(workers) + 1))
    return needed
