"""A file lock with which the gateways of a run directory take turns at the database.

SQLite has no queue of writers. A process that waits for another one's transaction tries again up to
0.1 s later. Until then, the other process may have begun its next transaction. So a process that
writes without a pause could keep all other processes from writing.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BUSY_S = 10.0
"""Maximum time for which a process waits for the lock, and then for another process's transaction,
in seconds."""
POLL_S = 0.005
"""Interval at which a process tries to take the lock, in seconds."""


class WriteTurns:
    """The lock. A process holds the lock while it waits for the beginning of its transaction, and
    releases the lock when the transaction has begun. When the transaction has ended, the next one
    of this process must wait for the process that then holds the lock."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        """``connection``: a connection to the database. A database in memory has no lock, because
        only one process writes to it. If the file of the lock cannot be opened, processes write
        without turns."""
        [_, _, path] = connection.execute("PRAGMA database_list").fetchone()
        self._lock: int | None = None
        if not path:
            return
        with suppress(OSError):
            self._lock = os.open(f"{path}-turns", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def next(self) -> Iterator[None]:
        """Holds the lock during the block. Raises OperationalError after ``BUSY_S``, because the
        process that has the lock may be stopped."""
        if self._lock is None:
            yield
            return
        until = time.monotonic() + BUSY_S
        while not _taken(self._lock):
            if time.monotonic() > until:
                raise sqlite3.OperationalError("other gateways wait for the database")
            time.sleep(POLL_S)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
