"""Compaction of the log: writes the current state to a new log, a few requests at a time.

Operations continue meanwhile. Once the state of a request is saved in the new log, further
operations of the request are written to both logs. Requests do not depend on each other, so each
can be saved at a different time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import msgpack

from .contexts import SavedContext
from .log import CONTEXT, REQUEST, TABLE, TENANT, Log, Record
from .module_tables import SavedTable
from .variables import MIB, StorageLimits, VariableStorage

SLICE = MIB // 2
"""A call of ``save`` ends when it has written this number of bytes, because operations wait for the
end of the call."""

_encode = msgpack.Encoder().encode


class Compaction:
    """A new log that will replace the current one."""

    def __init__(
        self,
        path: Path,
        limits: StorageLimits,
        requests: Iterable[int],
        tables: Iterable[SavedTable],
        contexts: Iterable[SavedContext],
    ) -> None:
        """Creates the new log at ``path``, with all tables and contexts. Raises OSError if the log
        cannot be written."""
        self.log = Log.create(path, limits)
        self.pending = set(requests)
        """Requests that are not in the new log yet."""
        try:
            for table in tables:
                self.log.append([Record(TABLE, 0, _encode(table))])
            for context in contexts:
                self.log.append([Record(CONTEXT, 0, _encode(context))])
        except OSError:
            self.abandon()
            raise

    def save(self, storage: VariableStorage, key: Callable[[int], str]) -> None:
        """Saves some of the pending requests in the new log. ``key`` returns the key of a request's
        tenant. Raises OSError if the log cannot be written."""
        size = 0
        while self.pending and size < SLICE:
            request = self.pending.pop()
            body = _encode(storage.save(request))
            records = [Record(REQUEST, request, body)]
            if key(request):
                records.append(Record(TENANT, request, _encode((request, key(request)))))
            self.log.append(records)
            size += len(body)

    def also(self, records: Iterable[Record]) -> None:
        """Adds records that were written to the current log. Records of pending requests are left
        out, because ``save`` will write the state of these requests. Raises OSError if the new log
        cannot be written."""
        new = [record for record in records if record.request not in self.pending]
        if new:
            self.log.append(new)

    def abandon(self) -> None:
        """Removes the new log."""
        self.log.close()
        with contextlib.suppress(OSError):
            self.log.path.unlink()
