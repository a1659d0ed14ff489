"""Stores this machine's copies of tenants' tables (``module_table.py``) as files. If the store of
modules runs without a state worker, these files are the only tables.

The copies show which modules on this machine are still used. When the state worker does not answer,
the copies are used to look up names.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from msgspec import structs

from ...whole_files import write_whole
from .module_table import Table, decode_table, encode_table

MAX_READ = 256
"""Maximum tenants whose files are cached, with the content that was read last."""
MAX_DECODED = 16
"""Maximum tenants whose decoded tables are cached. A decoded table takes several times the bytes of
its file."""


class TableCopies:
    """The files in a folder. Several threads may read at the same time; the caller admits one
    writer at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._last_read: OrderedDict[str, bytes] = OrderedDict()
        """For each tenant: the content of its file when it was last read."""
        self._decoded: OrderedDict[str, tuple[bytes, Table]] = OrderedDict()
        """For each tenant: the content of its file when it was last decoded, and the table."""

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
        return self._table(tenant, content)

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
        return not self.unused([module])

    def unused(self, modules: Iterable[str]) -> set[str]:
        """Returns the modules among ``modules`` that the table of no tenant has. Each table is read
        once, because the caller has locked the store for all tenants."""
        unused = set(modules)
        for file in self._folder.glob("*.json"):
            if not unused:
                break
            content = file.read_bytes()
            # Most tables do not contain the id of a single module, so they are not decoded.
            if len(unused) > 1 or next(iter(unused)).encode() in content:
                unused -= decode_table(content).modules.keys()
        return unused

    def _table(self, tenant: str, content: bytes) -> Table:
        """The table in the content of a file. The caller may change the returned table. The content
        is decoded only if it differs from the content that was decoded last. Each stream that names
        a module reads the table, and decoding would occupy the interpreter for up to 10 ms each
        time."""
        with self._lock:
            before, table = self._decoded.get(tenant, (b"", None))
        if table is None or content != before:
            table = decode_table(content)
        with self._lock:
            self._decoded[tenant] = content, table
            self._decoded.move_to_end(tenant)
            if len(self._decoded) > MAX_DECODED:
                self._decoded.popitem(last=False)
        modules, tags, tagged = dict(table.modules), dict(table.tags), dict(table.tagged)
        return structs.replace(table, modules=modules, tags=tags, tagged=tagged)

    def _file(self, tenant: str) -> Path:
        name = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()
        return self._folder / f"{name}.json"
