"""Wakes the groups of which all sequences are suspended, some time after the last round."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from .sequence_group import SequenceGroup

log = logging.getLogger(__name__)

IDLE_WAKE_S = 0.01
"""How long all sequences of a group are suspended before they are woken, in seconds."""


class IdleGroups:
    """Groups that wait for their time, on a thread of their own, which the first one starts.

    ``wake`` is called for each, without a lock.
    """

    def __init__(self, wake: Callable[[SequenceGroup], None]) -> None:
        self._wake = wake
        self._due: deque[tuple[float, SequenceGroup]] = deque()
        """In ascending order of their times, as the delay is the same for all."""
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, group: SequenceGroup) -> None:
        """Adds a group whose sequences have all been suspended now."""
        with self._changed:
            if self._closed:
                return
            self._due.append((time.monotonic() + IDLE_WAKE_S, group))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="idle", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Wakes none any more."""
        with self._changed:
            self._closed = True
            self._due.clear()
            self._changed.notify()

    def _run(self) -> None:
        while (group := self._next()) is not None:
            try:
                self._wake(group)
            except Exception:
                log.exception("the sequences of request %d cannot be woken", group.request)

    def _next(self) -> SequenceGroup | None:
        """The next group once its time has come; None when closed."""
        with self._changed:
            while not self._closed:
                if not self._due:
                    self._changed.wait()
                    continue
                due, group = self._due[0]
                left = due - time.monotonic()
                if left <= 0:
                    self._due.popleft()
                    return group
                self._changed.wait(left)
            return None
