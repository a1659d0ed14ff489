"""Counts the CPU time and the rounds of controllers, separately for each controller name and
tenant."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from ...protocol.metrics import OTHER, Series, Tally
from .guest_clock import thread_cpu_s

MAX_CONTROLLERS = 64
"""Maximum controllers that are counted separately; further controllers are counted together."""
EVERY = 16
"""CPU time is measured only in every ``EVERY``-th round, because each measurement takes a
microsecond."""
WEIGHT = 0.1
"""The weight of one measured round in the moving average ``Meter._share``."""


class Meter:
    """The rounds of one controller. Thread-safe.

    The CPU time of some rounds is measured. The *share* of such a round is its CPU time divided by
    its duration. The share is below 1, because rounds also wait for the GIL and for variables. The
    CPU time of the other rounds is estimated: a round's duration times the average share.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._share = 1.0
        self.rounds = 0
        self.cpu_s = 0.0

    def begin(self) -> float | None:
        """Called before a round, on the round's thread. Returns the value to pass to ``end`` as
        ``began``; None if the CPU time of this round is not measured."""
        return thread_cpu_s() if self.rounds % EVERY == 0 else None

    def end(self, began: float | None, duration_s: float) -> None:
        """Called after a round, on the round's thread, with the value of ``begin`` and the round's
        duration in seconds."""
        cpu_s = None if began is None else thread_cpu_s() - began
        with self._lock:
            self.rounds += 1
            if cpu_s is None:
                cpu_s = self._share * duration_s
            elif duration_s > 0:
                self._share += WEIGHT * (min(1.0, cpu_s / duration_s) - self._share)
            self.cpu_s += cpu_s

    def add(self, rounds: int, cpu_s: float) -> None:
        """Adds ended rounds and their CPU time."""
        with self._lock:
            self.rounds += rounds
            self.cpu_s += cpu_s

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Wraps a round that is always measured."""
        began, cpu_began = time.perf_counter(), thread_cpu_s()
        try:
            yield
        finally:
            self.end(cpu_began, time.perf_counter() - began)


class Meters:
    """The meters of a worker."""

    def __init__(self) -> None:
        self._meters: dict[tuple[str, str], Meter] = {}
        """The meters by the names of the controller and the tenant."""
        self._names: set[str] = set()
        self._errors = Tally("errors", "code")
        self._lock = threading.Lock()

    def error(self, code: str) -> None:
        """Counts an error that was sent to a client. Thread-safe."""
        with self._lock:
            self._errors.add(code)

    def of(self, controller: str, tenant: str = "") -> Meter:
        """The meter of one controller, for the clients of one tenant."""
        meter = self._meters.get((controller, tenant))
        if meter is None:
            with self._lock:
                if len(self._names) < MAX_CONTROLLERS:
                    self._names.add(controller)
                name = controller if controller in self._names else OTHER
            meter = self._meters.setdefault((name, tenant), Meter())
        return meter

    def cpu_ms(self) -> dict[str, int]:
        """The CPU time of each tenant that has a key, in milliseconds; safe on another thread."""
        total: dict[str, float] = {}
        for (_, tenant), meter in list(self._meters.items()):
            if tenant:
                total[tenant] = total.get(tenant, 0.0) + meter.cpu_s
        return {tenant: int(1000 * cpu_s) for tenant, cpu_s in total.items()}

    def series(self) -> list[Series]:
        """All metrics; safe on another thread."""
        found = self._errors.series()
        rounds: dict[str, int] = {}
        cpu_s: dict[str, float] = {}
        for (name, _), meter in list(self._meters.items()):
            rounds[name] = rounds.get(name, 0) + meter.rounds
            cpu_s[name] = cpu_s.get(name, 0.0) + meter.cpu_s
        for name, number in rounds.items():
            labels = {"module": name}
            found.append(Series("controller_rounds", labels, number))
            found.append(Series("controller_cpu_seconds", labels, cpu_s[name]))
        return found
