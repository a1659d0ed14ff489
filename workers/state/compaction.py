"""Compaction of the log: writes the current state to a new log, one part at a time. The state
consists of the variables of requests, and of the tables and contexts of tenants.

Operations continue during the compaction. Once the state of a request is saved in the new log,
further operations of the request are written to both logs. Requests do not depend on each other, so
each request can be saved at a different time. First, all tables and contexts are saved as they were
at the start of the compaction. Then the tables and contexts that have changed since the start are
saved again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import msgpack

from ..variables import MIB, StorageLimits, VariableStorage
from .contexts import SavedContext
from .log import CONTEXT, REQUEST, TABLE, TENANT, Log, Record
from .module_tables import SavedTable

SLICE = MIB // 2
"""A call of ``save`` ends after this number of bytes, because operations wait until the call
ends."""

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
        """Creates the new log at ``path``. Raises OSError if the log cannot be written."""
        self.log = Log.create(path, limits)
        self.pending = set(requests)
        """Requests that are not in the new log yet."""
        self._unsaved: deque[SavedTable | SavedContext | Record] = deque((*tables, *contexts))
        """A queue of what the new log does not have yet: first the tables and contexts as they were
        at the start, then the records of their changes."""

    @property
    def complete(self) -> bool:
        """Whether the new log has the whole state."""
        return not self.pending and not self._unsaved

    def save(self, storage: VariableStorage, key: Callable[[int], str]) -> None:
        """Saves a part of the state in the new log. ``key`` returns the key of a request's tenant.
        Raises OSError if the log cannot be written."""
        size = self._save_unsaved(SLICE)
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
        out, because ``save`` will write the state of these requests. Records of tables and contexts
        are added at the end of the queue of unsaved records, if there are any. Then at least the
        same number of bytes at the front of the queue is saved, so that the queue does not grow.
        Raises OSError if the new log cannot be written."""
        new = [record for record in records if record.request not in self.pending]
        if self._unsaved:
            waiting = [record for record in new if record.kind in (TABLE, CONTEXT)]
            new = [record for record in new if record.kind not in (TABLE, CONTEXT)]
            self._unsaved += waiting
            self._save_unsaved(sum(len(record.body) for record in waiting))
        if new:
            self.log.append(new)

    def _save_unsaved(self, min_bytes: int) -> int:
        """Saves tables and contexts from the front of the queue until at least ``min_bytes`` are
        saved or the queue is empty. Returns the number of saved bytes."""
        size = 0
        while self._unsaved and size < min_bytes:
            record = _record(self._unsaved.popleft())
            self.log.append([record])
            size += len(record.body)
        return size

    def abandon(self) -> None:
        """Removes the new log."""
        self.log.close()
        with contextlib.suppress(OSError):
            self.log.path.unlink()


def _record(saved: SavedTable | SavedContext | Record) -> Record:
    if isinstance(saved, Record):
        return saved
    return Record(TABLE if isinstance(saved, SavedTable) else CONTEXT, 0, _encode(saved))
