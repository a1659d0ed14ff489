"""The tables of tenants. A table lists the modules and tags of one tenant.

In this module a table is a string of bytes with a version. A controller worker replaces a table
only if it names the table's current version. Only controller workers interpret the bytes. Versions
are ascending times in microseconds. If this worker's folder is lost, a controller worker sends its
copy of the table. The table then gets a version that differs from all earlier versions, because
versions are times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from ...protocol.worker_messages import ModuleTable, ModuleTableAnswer
from ..variables import MIB

TABLE_BYTES = MIB
"""Maximum bytes of a table: enough for 1,000 modules and 5,000 short tags. Each change writes the
whole table to the disk, while the operations of all tenants wait."""
TOTAL_BYTES = 256 * MIB
"""Maximum bytes of all tables, on a machine with enough memory."""
PARTS = 8
"""A table may have at most 1 / ``PARTS`` of the bytes that all tables together may have."""


class SavedTable(Struct, array_like=True):
    """A table as it is stored in the log."""

    tenant: str
    version: int
    by: int
    """The id of the operation that wrote the table."""
    content: bytes


class ModuleTables:
    """The tables of all tenants."""

    def __init__(
        self,
        total_bytes: int = TOTAL_BYTES,
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """``total_bytes``: the maximum bytes of all tables. ``clock``: the time in microseconds."""
        self._max_total_bytes = total_bytes
        self._max_bytes = min(TABLE_BYTES, total_bytes // PARTS)
        self._clock = clock
        self._tables: dict[str, SavedTable] = {}
        self.bytes = 0
        """Bytes of the contents of all tables."""

    def __iter__(self) -> Iterator[SavedTable]:
        return iter(self._tables.values())

    def __len__(self) -> int:
        return len(self._tables)

    def size(self, tenant: str) -> int:
        """The number of bytes of a tenant's table; 0 if the tenant does not have a table."""
        table = self._tables.get(tenant)
        return len(table.content) if table is not None else 0

    def read(self, op: ModuleTable) -> ModuleTableAnswer:
        """The answer to an operation: the current table, or only the table's version if the sender
        already has the current table."""
        table = self._tables.get(op.tenant)
        if table is None:
            return ModuleTableAnswer(op.id)
        if op.content is not None and table.by == op.id:
            return ModuleTableAnswer(op.id, table.version, written=True)
        known = table.version == op.known
        return ModuleTableAnswer(op.id, table.version, None if known else table.content)

    def replacement(self, op: ModuleTable) -> SavedTable | None:
        """The table that an operation writes. None if the operation only reads, was done before, or
        does not name the current version."""
        table = self._tables.get(op.tenant)
        current = table.version if table is not None else 0
        if op.content is None or op.known != current or (table is not None and table.by == op.id):
            return None
        return SavedTable(op.tenant, max(current + 1, self._clock()), op.id, op.content)

    def refusal(self, table: SavedTable) -> str | None:
        """The error if the table would have too many bytes, or if all tables together would have
        too many bytes; None if not. An earlier version of Tokenbus may have stored a larger table.
        Such a table may be replaced if it does not grow."""
        size, before = len(table.content), self.size(table.tenant)
        if size > max(self._max_bytes, before):
            return (
                f"the table of this tenant's modules and tags would have {size} bytes; at most "
                f"{self._max_bytes} are allowed; delete some modules or tags first"
            )
        total = self.bytes + size - before
        if total > self._max_total_bytes:
            return (
                f"the tables of all tenants' modules and tags would have {total} bytes; at most "
                f"{self._max_total_bytes} are allowed; delete some modules or tags first"
            )
        return None

    def put(self, table: SavedTable) -> None:
        """Stores a table, and replaces any other table of the same tenant."""
        self.bytes += len(table.content) - self.size(table.tenant)
        self._tables[table.tenant] = table
