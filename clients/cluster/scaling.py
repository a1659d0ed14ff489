"""Computes the target number of workers of a kind from their load and the waiting requests. The
number changes only if the load requires another number for some time.

The code uses neither a clock nor a cluster. The caller passes the load and the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...protocol.messages import Status
from ...protocol.settings import Settings

FULL = 0.8
"""If the utilization of the workers is above this value, another worker is needed. The utilization
is the number of workers that the present work would fill, divided by the number of workers."""
IDLE = 0.5
"""A worker can be removed if the utilization of the remaining workers would then be at most this
value. While the utilization is between ``IDLE`` and ``FULL``, the number of workers does not
change."""


class Bounds(NamedTuple):
    """The minimum and maximum number of workers of a kind."""

    least: int
    most: int


class Scaling:
    """The number of workers of one kind. Times are seconds of a monotonic clock.

    If more workers are needed during all of ``up_after_s``, the number rises to the needed number.
    If fewer workers are needed during all of ``down_after_s``, the number falls by one.
    """

    def __init__(self, bounds: Bounds, up_after_s: float, down_after_s: float) -> None:
        self._bounds = bounds
        self._up_after_s = up_after_s
        self._down_after_s = down_after_s
        self._more_since: float | None = None
        self._less_since: float | None = None

    def target(self, current: int, needed: float, now: float) -> int:
        """The target number of workers if ``current`` workers run. If ``current`` is outside the
        bounds, the target is the nearest bound. ``needed``: the number of workers that the present
        work would fill."""
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
    """The time at which a condition began to hold; None if it does not hold. ``before``: the
    previous result."""
    if not holds:
        return None
    return now if before is None else before


def gpu_workers_needed(status: Status, settings: Settings) -> float:
    """The number of GPU workers that the running and the waiting requests would fill."""
    having = sum(worker.requests for worker in status.workers if worker.role == "gpu")
    return (having + status.queued) / min(settings.capacity, settings.max_running)


def controller_workers_needed(status: Status, settings: Settings) -> float:
    """The number of controller workers that the present controllers would fill. If rounds wait for
    a thread at every worker, the result is large enough to add a worker."""
    workers = [worker for worker in status.workers if worker.role == "controller"]
    needed = sum(worker.requests for worker in workers) / settings.controller_capacity
    if workers and all(worker.load.get("waiting", 0.0) > 0 for worker in workers):
        needed = max(needed, FULL * (len(workers) + 1))
    return needed
