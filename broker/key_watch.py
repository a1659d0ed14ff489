"""Checks the folder of keys while the broker runs, so that a change of the keys takes effect
soon."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ..protocol.keys import Allowed, KeyFault, KeyFolder

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Seconds between two checks of the folder."""
SETTLED_S = 2.0
"""If a folder had changed less than this number of seconds before the last reading, the broker
reads the folder again. Otherwise it could miss a change after that reading that has the same time
stamp."""

Keys = tuple[Mapping[str, Allowed], Mapping[str, Allowed]]
"""The keys that may connect as clients, and the keys that may connect as workers, by the names of
their holders."""


class KeyWatch:
    """The keys that a folder allows, and whether they have changed."""

    def __init__(self, folder: KeyFolder) -> None:
        self._folder = folder
        self._seen: list[int] = []
        self._settled = False
        self._look_at = 0.0

    def read(self) -> Keys:
        """The allowed keys. Names whose file is not valid are left out and logged."""
        self._seen, self._settled = self._changed_at()
        faults: list[KeyFault] = []
        keys = self._folder.allowed("client", faults), self._folder.allowed("worker", faults)
        for fault in faults:
            log.error("a key is not allowed: %s", fault)
        return keys

    def changed(self, now: float) -> Keys | None:
        """The allowed keys if the folder may have changed since they were last read, else None."""
        if now < self._look_at:
            return None
        self._look_at = now + LOOK_EVERY_S
        seen, _ = self._changed_at()
        if self._settled and seen == self._seen:
            return None
        return self.read()

    def _changed_at(self) -> tuple[list[int], bool]:
        """The time at which each folder last changed, in nanoseconds (0 if it cannot be read), and
        whether the latest of these changes is more than ``SETTLED_S`` old."""
        changed = []
        for folder in self._folder.folders():
            try:
                changed.append(folder.stat().st_mtime_ns)
            except OSError:
                changed.append(0)
        return changed, time.time() - max(changed) / 1e9 > SETTLED_S
