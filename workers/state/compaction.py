"""A log's successor: what is held now, written beside the log a few requests at a time.

Operations go on meanwhile. Those of requests that are in the new log already are written to both;
what a request did before it got there is in what is saved of it. No request depends on another
one, so it does not matter that each is saved at another moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from msgspec import msgpack

from .log import REQUEST, Log, Record
from .variables import MIB, StorageLimits, VariableStorage

SLICE = MIB // 2
"""Bytes of requests that are saved at a time; operations that come meanwhile wait for it."""

_encode = msgpack.Encoder().encode


class Compaction:
    """A log that is to take the place of another one."""

    def __init__(self, path: Path, limits: StorageLimits, requests: Iterable[int]) -> None:
        """Begins a new log at ``path``. Raises OSError."""
        self.log = Log.create(path, limits)
        self.pending = set(requests)
        """Requests that are not in it yet."""

    def save(self, storage: VariableStorage) -> None:
        """Saves some of the pending requests. Raises OSError."""
        size = 0
        while self.pending and size < SLICE:
            request = self.pending.pop()
            body = _encode(storage.save(request))
            self.log.append([Record(REQUEST, request, body)])
            size += len(body)

    def also(self, records: Iterable[Record]) -> None:
        """What was written to the old log. Raises OSError."""
        new = [record for record in records if record.request not in self.pending]
        if new:
            self.log.append(new)

    def abandon(self) -> None:
        """Removes the new log."""
        self.log.close()
        with contextlib.suppress(OSError):
            self.log.path.unlink()
