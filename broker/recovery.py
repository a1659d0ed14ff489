"""Determines how long a broker waits for workers to register: for workers of an earlier run, and
for the last worker of a model or a controller after its loss.

A worker notices a restart within a heartbeat or two, and registers again. It takes longer if it is
busy, or was lost at the same time. If the broker's own process was stopped, all its workers have
closed their connections, and register again.

While workers may still register, a request that no registered worker serves may be valid, so it
waits.
"""

from __future__ import annotations

from ..protocol.errors import Code, TokenbusError
from .settings import BrokerSettings

MISSING = (Code.NO_WORKER, Code.UNKNOWN_MODEL, Code.UNKNOWN_CONTROLLER)
"""Error codes of requests that no registered worker serves."""
MISSING_OF_ROLE = {
    "gpu": (Code.NO_WORKER, Code.UNKNOWN_MODEL),
    "controller": (Code.NO_WORKER, Code.UNKNOWN_CONTROLLER),
}
"""Error codes of requests that a lost worker of a role may have served."""


class Recovery:
    """The state of the broker's recovery. ``started``: the start of the broker, in seconds.

    When a broker starts, nothing shows whether it has run before. Clients that bring a session's
    token, and workers that have registered before, show an earlier run. Each live worker sends a
    message within ``expiry_s``.
    """

    def __init__(self, settings: BrokerSettings, started: float) -> None:
        self.until = started + settings.recover_s
        """When the broker stops waiting for the workers and clients of an earlier run."""
        self._settled_at = min(started + settings.expiry_s, self.until)
        self._follows = False
        self._expiry_s = settings.expiry_s
        self._back_until: dict[Code | str, float] = {}
        """By error code: the time until which requests with this error wait, because a lost worker
        may register again."""

    def lost(self, role: str, now: float) -> None:
        """Records the loss of the last worker that served a model or a controller: it or its
        successor may register within ``expiry_s``."""
        for code in MISSING_OF_ROLE.get(role, ()):
            self._back_until[code] = now + self._expiry_s

    def follow(self) -> None:
        """Records that a client or worker was connected to an earlier run of this broker."""
        self._follows = True

    def has_ended(self, now: float) -> bool:
        """Whether the broker has stopped waiting for the workers and clients of an earlier run."""
        return now >= self.until

    def awaits_workers(self, error: TokenbusError, now: float) -> bool:
        """Whether a request that is refused with ``error`` waits instead, because workers that
        served it may still register.

        After an earlier run, the request waits for ``recover_s``, and after the loss of a last
        worker for ``expiry_s``. If nothing shows an earlier run, the request waits for
        ``expiry_s``, and only while no worker of its role is registered.
        """
        if now < self._back_until.get(error.code, float("-inf")):
            return True
        if self._follows:
            return error.code in MISSING and now < self.until
        return error.code == Code.NO_WORKER and now < self._settled_at

    def settles(self, now: float) -> bool:
        """Whether the broker was restarted so recently that a live worker may not have registered
        yet."""
        return self._follows and now < self._settled_at
