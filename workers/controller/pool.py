"""The threads that run guests.

Quick rounds go one after another on one thread, as handing Python's lock from thread to thread
costs more than they do; whoever finds rounds waiting behind a slow one wakes another thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from .wasm.sandbox import HOST_STACK_BYTES

log = logging.getLogger(__name__)

Job = Callable[[], None]


class Pool:
    """Threads that run jobs in the order in which they came. ``name`` is for people."""

    def __init__(self, threads: int, name: str = "rounds") -> None:
        self._jobs: deque[Job] = deque()
        self._wake = threading.Semaphore(0)
        self._threads = threads
        self._active = 0
        self._count = threading.Lock()
        before = threading.stack_size(HOST_STACK_BYTES)
        try:
            for i in range(threads):
                threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True).start()
        finally:
            threading.stack_size(before)

    @property
    def busy(self) -> bool:
        """Whether a job runs or waits."""
        return bool(self._jobs) or self._active > 0

    def submit(self, jobs: Iterable[Job], hands: int = 1) -> None:
        """Takes jobs in, for ``hands`` threads to begin with."""
        self._jobs.extend(jobs)
        self._wake.release(min(hands, self._threads))

    def help(self) -> None:
        """Wakes another thread, where jobs wait."""
        if self._jobs:
            self._wake.release()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            with self._count:
                self._active += 1
            while self._jobs:
                try:
                    job = self._jobs.popleft()
                except IndexError:
                    break
                try:
                    job()
                except Exception:
                    log.exception("a round failed")
            with self._count:
                self._active -= 1
