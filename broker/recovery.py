"""How long a broker waits for workers: for those that an earlier run of it had, and for the last
one that served a model or a controller and was lost.

A worker notices a restart within a heartbeat or two, and registers again; one that is busy, or was
lost at the same time, takes longer. A broker that has stood still loses all its workers at once,
whose connections have closed, and they register again. Until then a request that no registered
worker serves is not wrong: it waits.
"""

from __future__ import annotations

from ..protocol.errors import Code, TokenbusError
from .settings import BrokerSettings

MISSING = (Code.NO_WORKER, Code.UNKNOWN_MODEL, Code.UNKNOWN_CONTROLLER)
"""Why a request is refused that no registered worker serves."""


class Recovery:
    """The time after the start of a broker, at ``started``, in seconds.

    Nothing that a broker reads at its start says whether it is the first one. A client that comes
    with a session's token, and a worker that has registered before, do; each worker that is alive
    sends a message within ``expiry_s``.
    """

    def __init__(self, settings: BrokerSettings, started: float) -> None:
        self.until = started + settings.recover_s
        """When what was left by an earlier run is not waited for any more."""
        self._settled_at = min(started + settings.expiry_s, self.until)
        self._follows = False
        self._expiry_s = settings.expiry_s
        self._back_until = float("-inf")

    def lost(self, now: float) -> None:
        """The last worker that served a model or a controller was lost: it may come back, or its
        successor come, within ``expiry_s``."""
        self._back_until = now + self._expiry_s

    def follow(self) -> None:
        """Somebody was connected to an earlier run of this broker."""
        self._follows = True

    def over(self, now: float) -> bool:
        """Whether what was left by an earlier run is not waited for any more."""
        return now >= self.until

    def awaits_workers(self, error: TokenbusError, now: float) -> bool:
        """Whether a request is refused with ``error`` as workers that served it before have not
        registered yet, and may still do so: for ``recover_s`` where there was an earlier run, and
        for ``expiry_s`` after the loss of a last worker. Where nothing shows an earlier run yet,
        for ``expiry_s``, and only while there is no worker at all."""
        if now < self._back_until:
            return error.code in MISSING
        if self._follows:
            return error.code in MISSING and now < self.until
        return error.code == Code.NO_WORKER and now < self._settled_at

    def settles(self, now: float) -> bool:
        """Whether even workers that were connected all the time may not have registered yet."""
        return self._follows and now < self._settled_at
