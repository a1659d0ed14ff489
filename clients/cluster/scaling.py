"""The target number of workers of a kind, from their load and the waiting requests, with
hysteresis.

It needs neither a clock nor a cluster: load and times are passed in, and a number is returned.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...protocol.messages import Status
from ...protocol.settings import Settings

FULL = 0.8
"""A worker needs another one next to it if this part of its room is in use."""
IDLE = 0.5
"""One worker less is enough if the others would have at most this part of their room in use.
Between the two values nothing changes."""


class Bounds(NamedTuple):
    """The minimum and maximum number of workers of a kind."""

    least: int
    most: int


class Scaling:
    """The number of workers of one kind. Times are seconds of a monotonic clock.

    It grows to the needed number when more workers were needed throughout ``up_after_s``. It
    shrinks by one worker each time fewer were needed throughout ``down_after_s``.
    """

    def __init__(self, bounds: Bounds, up_after_s: float, down_after_s: float) -> None:
        self._bounds = bounds
        self._up_after_s = up_after_s
        self._down_after_s = down_after_s
        self._more_since: float | None = None
        self._less_since: float | None = None

    def target(self, current: int, needed: float, now: float) -> int:
        """The target number, for ``current`` workers. ``needed``: how many workers all present work
        would fill."""
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
    """Since when a condition holds; None if it does not hold."""
    if not holds:
        return None
    return now if before is None else before


def gpu_workers_needed(status: Status, settings: Settings) -> float:
    """How many GPU workers the running and the waiting requests would fill."""
    having = sum(worker.requests for worker in status.workers if worker.role == "gpu")
    return (having + status.queued) / min(settings.capacity, settings.max_running)


def controller_workers_needed(status: Status, settings: Settings) -> float:
    """How many controller workers the running and waiting controllers would fill. It is one more
    than exist if each has a round that waits for a thread."""
    workers = [worker for worker in status.workers if worker.role == "controller"]
    needed = sum(worker.requests for worker in workers) / settings.controller_capacity
    if workers and all(worker.load.get("waiting", 0.0) > 0 for worker in workers):
        needed = max(needed, FULL * (len(workers) + 1))
    return needed
