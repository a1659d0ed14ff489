"""Determines how long a broker waits for workers to register. After a restart, it waits for the
workers of the earlier run. After the loss of the last worker that served a model or a controller,
it waits for this worker or a successor.

A worker notices a restart of the broker within a heartbeat or two, and registers again. A worker
that is busy, or was restarted at the same time, takes longer. If the broker's own process was
paused, all workers have closed their connections to the broker, and register again.

While workers may still register, the broker does not refuse a request that no registered worker
serves, because a worker that registers later may serve it.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from ..protocol.errors import Code, TokenbusError
from .settings import BrokerSettings
from .worker import Worker

MISSING = (Code.NO_WORKER, Code.UNKNOWN_MODEL, Code.UNKNOWN_CONTROLLER)
"""Error codes with which the broker refuses requests that no registered worker serves."""
MISSING_OF_ROLE = {
    "gpu": (Code.NO_WORKER, Code.UNKNOWN_MODEL),
    "controller": (Code.NO_WORKER, Code.UNKNOWN_CONTROLLER),
}
"""By role of a lost worker: the errors for new requests that only this worker served."""


class _Lost(NamedTuple):
    """The loss of the last worker that served a name. Both times are in seconds."""

    at: float
    until: float
    """The time until which a worker that serves the name is expected."""


class Recovery:
    """Decides whether workers may still register. ``started``: the time at which the broker
    started, in seconds.

    When a broker starts, nothing shows whether it has run before. An earlier run is assumed when a
    client brings a session's token, a worker reports live requests, or a connection sends a
    worker's message without a registration. Each worker of an earlier run sends a message within
    ``expiry_s``.
    """

    def __init__(self, settings: BrokerSettings, started: float) -> None:
        self.until = started + settings.recover_s
        """The time at which the broker stops waiting for the workers and clients of an earlier run,
        in seconds."""
        self._settled_at = min(started + settings.expiry_s, self.until)
        self._follows = False
        self._expiry_s = settings.expiry_s
        self._move_wait_s = settings.move_wait_s
        self._lost: dict[str, dict[str, _Lost]] = {role: {} for role in MISSING_OF_ROLE}
        """By role and name: the losses of models, controllers and patterns that no worker has
        registered since. Old losses are removed at the next loss."""

    def lost(self, worker: Worker, names: Iterable[str], now: float) -> None:
        """Records the loss of the last worker that served these names.

        The worker may register again within ``expiry_s``. A successor that the worker announced may
        take ``move_wait_s``, because it may have to load a model.
        """
        lost = self._lost.get(worker.role)
        if lost is None:
            return
        kept_s = max(self._expiry_s, self._move_wait_s)
        for name in [name for name, loss in lost.items() if now - loss.at >= kept_s]:
            del lost[name]
        until = now + (self._move_wait_s if worker.succeeded else self._expiry_s)
        lost.update(dict.fromkeys(names, _Lost(now, until)))

    def registered(self, worker: Worker) -> None:
        """Records that the names that this worker serves have a worker again."""
        lost = self._lost.get(worker.role)
        if lost:
            for name in worker.names():
                lost.pop(name, None)

    def was_lost(self, role: str, name: str, now: float) -> bool:
        """Whether the last worker that served this name was lost less than ``move_wait_s`` ago. The
        caller has checked that no worker serves the name."""
        loss = self._lost[role].get(name)
        return loss is not None and now - loss.at < self._move_wait_s

    def follow(self) -> None:
        """Records a sign that this broker has had an earlier run."""
        self._follows = True

    def has_ended(self, now: float) -> bool:
        """Whether the broker has stopped waiting for the workers and clients of an earlier run."""
        return now >= self.until

    def awaits_workers(self, error: TokenbusError, role: str, name: str, now: float) -> bool:
        """Whether a request waits instead of being refused with ``error``. It waits as long as a
        worker that serves the request may still register. ``role`` and ``name``: the role of this
        worker, and the model or the controller that it must serve.

        After an earlier run, such requests wait until ``recover_s`` after the broker's start. After
        the loss of the last worker that served a model or a controller, they wait as ``lost`` says.
        If nothing shows an earlier run, they wait until ``expiry_s`` after the start, and only
        while no worker of their role is registered.
        """
        if error.code in MISSING_OF_ROLE.get(role, ()) and self._is_missing(error, role, name, now):
            return True
        if self._follows:
            return error.code in MISSING and now < self.until
        return error.code == Code.NO_WORKER and now < self._settled_at

    def _is_missing(self, error: TokenbusError, role: str, name: str, now: float) -> bool:
        """Whether a worker that was lost, or its successor, may still register and serve ``name``.
        If no worker is running, this worker may serve any name."""
        missing = [lost for lost, loss in self._lost[role].items() if now < loss.until]
        if error.code == Code.NO_WORKER or not name:
            return bool(missing)
        return name in missing or any(fnmatchcase(name, pattern) for pattern in missing)

    def settles(self, now: float) -> bool:
        """Whether the broker was restarted so recently that a live worker may not have registered
        yet."""
        return self._follows and now < self._settled_at
