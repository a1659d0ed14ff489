"""The process of a worker: its settings, its signals and its exit codes."""

from __future__ import annotations

import signal
import sys
from typing import Protocol

from ..protocol import logs, tracing
from ..protocol.settings import Settings, load

REFUSED = 2
"""The exit code of a worker whose settings are not valid. Such a worker is not restarted."""
STOPS = frozenset((signal.SIGINT, signal.SIGTERM))
"""The signals that stop a worker."""


class Worker(Protocol):
    """The interface of a worker for its process."""

    def run(self) -> int:
        """Serves until the worker is stopped; returns the exit code."""

    def stop(self, reason: str, *, restarts: bool = False) -> None:
        """Stops the worker. May be called from a signal handler. ``restarts``: whether another
        process may start and take over the worker's requests."""


def settings_of(role: str, *, traced: bool = True) -> Settings:
    """Reads the settings of a worker's process, and sets up its logs and, if ``traced``, its
    traces. Raises SettingError or ValueError if a setting is not valid."""
    settings = load()
    logs.set_up(settings, role)
    if traced:
        tracing.start(role)
    return settings


def serve(worker: Worker) -> int:
    """Runs a worker until SIGINT or SIGTERM stops it; returns the exit code."""
    signal.signal(signal.SIGINT, lambda *_: worker.stop("SIGINT"))
    # supervisord sends SIGTERM when it stops a worker, and also when it restarts a worker.
    signal.signal(signal.SIGTERM, lambda *_: worker.stop("SIGTERM", restarts=True))
    # A standby state worker has blocked these signals until their handlers are installed.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    return worker.run()


def refuse(role: str, error: Exception) -> int:
    """Prints why a worker cannot start; returns the exit code."""
    print(f"tokenbus {role} worker: {error}", file=sys.stderr)
    return REFUSED
