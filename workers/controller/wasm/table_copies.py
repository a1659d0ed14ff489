"""Stores this machine's copies of tenants' tables as files. If the store of
modules runs without a state worker, these files are the only tables.

The copies show which modules on this machine are still used. When the state worker does not answer,
the copies are used to look up names.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from pathlib import Path

from ...whole_files import write_whole
from .module_table import Table, decode_table, encode_table

MAX_READ = 256
"""Maximum tenants whose files are cached, with the content that was read last."""


class TableCopies:
    """The files in a folder. Several threads may read at the same time; the caller admits one
    writer at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._last_read: OrderedDict[str, bytes] = OrderedDict()
        """For each tenant: the content of its file when it was last read."""

    def read(self, tenant: str) -> Table:
        """The copy of a tenant's table; an empty table if the file does not exist. If the file
        cannot be read, the cached content is used. Raises OSError if no content is cached
        either."""
        try:
            content = self._file(tenant).read_bytes()
        except FileNotFoundError:
            return Table(tenant)
        except OSError:
            last = self._last_read.get(tenant)
            if last is None:
                raise
            content = last
        with self._lock:
            self._last_read[tenant] = content
            self._last_read.move_to_end(tenant)
            if len(self._last_read) > MAX_READ:
                self._last_read.popitem(last=False)
        return decode_table(content)

    def save(self, table: Table) -> list[str]:
        """Writes the copy of a tenant's table; returns the modules that the tenant does not have
        any more. Raises OSError if a file cannot be read or written."""
        gone = self.read(table.tenant).modules.keys() - table.modules.keys()
        file = self._file(table.tenant)
        if table.modules:
            write_whole(file, encode_table(table), synced=True)
        else:
            file.unlink(missing_ok=True)
        return sorted(gone)

    def use(self, module: str) -> bool:
        """Whether the table of any tenant has the module."""
        files = self._folder.glob("*.json")
        return any(module in decode_table(file.read_bytes()).modules for file in files)

    def _file(self, tenant: str) -> Path:
        name = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / f"{name}.json"
