"""Writes a file that the probes of a container read, to check whether a process works and whether
it accepts requests.

A worker does not listen on an address, so a probe cannot connect to it. If probes connected to the
broker instead, all workers would be restarted whenever the broker is down. The modification time of
the file shows that the process works. The text of the file shows whether the process accepts
requests.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .settings import Settings

log = logging.getLogger(__name__)

READY = "ready"
"""The text of the file if the process accepts requests."""
NOT_READY = "not ready"
STANDBY = "standby"
"""The text of the file of a standby: a state worker that waits until another state worker ends."""

EVERY_S = 1.0
"""The shortest time between two updates of the modification time, in seconds. If the text changes,
it is written at once."""


class HealthFile:
    """The file of one process, at the path of the setting ``health_file``. If the setting is empty,
    the file is not written.

    Times are seconds of a monotonic clock. If the file cannot be written, the error is logged once,
    and the probes fail.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = Path(settings.health_file) if settings.health_file else None
        self._hung_step_s = settings.hung_step_s
        self._text = ""
        self._next = 0.0
        self._failed = False

    def beat(self, ready: bool, step_age_s: float | None, now: float) -> None:
        """Call this method with each heartbeat of a worker. ``step_age_s``: seconds for which the
        current step has been running; None if no step runs. If the step hangs, the file is not
        updated, so the probes fail."""
        if step_age_s is None or step_age_s <= self._hung_step_s:
            self.touch(READY if ready else NOT_READY, now)

    def touch(self, text: str, now: float) -> None:
        """Records that the process works. If the text has changed, writes the file. If it has not
        changed, updates the modification time, at most once every ``EVERY_S`` seconds."""
        if self._path is None or (text == self._text and now < self._next):
            return
        self._next = now + EVERY_S
        try:
            if text == self._text and self._path.exists():
                os.utime(self._path)
                return
            new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            new.write_text(f"{text}\n")
            os.replace(new, self._path)
            self._text = text
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("cannot write health_file %s: %s", self._path, error.strerror)
            self._failed = True
