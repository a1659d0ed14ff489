"""A file by which a container's probes see that its process works, without a connection to it.

Workers listen nowhere, and a probe that asks the broker would have them restarted where the broker
is away. The file's time of modification says that the process works, its text whether it serves.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .settings import Settings

log = logging.getLogger(__name__)

READY = "ready"
"""The text of the file where the process serves."""
NOT_READY = "not ready"
STANDBY = "standby"
"""A state worker that waits until another one ends."""

EVERY_S = 1.0
"""How often the file is touched at most, in seconds."""


class HealthFile:
    """The file of one process, at the path of the setting ``health_file``; without it, none.

    Times are seconds of a monotonic clock. A file that cannot be written is reported once: the
    probes fail then, as they should.
    """

    def __init__(self, settings: Settings) -> None:
        self._path = Path(settings.health_file) if settings.health_file else None
        self._hung_step_s = settings.hung_step_s
        self._text = ""
        self._next = 0.0
        self._failed = False

    def beat(self, ready: bool, step_age_s: float | None, now: float) -> None:
        """A worker sends its heartbeat. ``step_age_s``: for how long its step has been running;
        with one that hangs, the process does not count as working."""
        if step_age_s is None or step_age_s <= self._hung_step_s:
            self.touch(READY if ready else NOT_READY, now)

    def touch(self, text: str, now: float) -> None:
        """The process works: writes the file if its text has changed, and else its time."""
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
