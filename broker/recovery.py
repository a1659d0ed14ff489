"""How long a broker that was just started waits for workers that an earlier run of it had.

A worker notices a restart within a heartbeat or two, and registers again; one that is busy, or was
lost at the same time, takes longer. Until then a request that no registered worker serves is not
wrong: it waits.
"""

from __future__ import annotations

from .settings import BrokerSettings


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

    def follow(self) -> None:
        """Somebody was connected to an earlier run of this broker."""
        self._follows = True

    def over(self, now: float) -> bool:
        """Whether what was left by an earlier run is not waited for any more."""
        return now >= self.until

    def awaits_workers(self, now: float) -> bool:
        """Whether workers that served requests before may still register: for ``recover_s`` where
        there was an earlier run, and for ``expiry_s`` where nothing shows one yet."""
        return now < (self.until if self._follows else self._settled_at)

    def settles(self, now: float) -> bool:
        """Whether even workers that were connected all the time may not have registered yet."""
        return self._follows and now < self._settled_at
