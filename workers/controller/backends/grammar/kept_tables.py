"""Stores a worker's compiled tables in memory, with a bound in bytes that tenants share."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

MAX_KEPT = 1_024
"""Maximum number of tables. Most tables have a few kilobytes."""
MAX_KEPT_BYTES = 256 * 1024**2
"""Maximum bytes of all tables. The tables of an argument of 40 kB may have 16 MiB."""


class _Kept(NamedTuple):
    tenant: str
    tables: bytes


class KeptTables:
    """Tables by key. Thread-safe.

    If the tables exceed the bound in bytes, the least recently used tables of the tenant with the
    most bytes are removed. If they exceed the bound in number, those of the tenant with the most
    tables are. So a tenant with many grammars does not evict the tables of other tenants.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        """The tables by key, the least recently used first."""
        self._bytes: Counter[str] = Counter()
        """By tenant."""
        self._number: Counter[str] = Counter()
        """By tenant: its tables."""

    @property
    def size(self) -> int:
        """Bytes of all tables."""
        return self._bytes.total()

    def get(self, key: str) -> bytes | None:
        """The tables with this key; None if they are not stored."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            self._kept.move_to_end(key)
            return kept.tables

    def add(self, tenant: str, key: str, tables: bytes) -> None:
        """Stores the tables that were compiled for a tenant."""
        with self._lock:
            self._drop(key)
            self._kept[key] = _Kept(tenant, tables)
            self._bytes[tenant] += len(tables)
            self._number[tenant] += 1
            while self._bytes.total() > MAX_KEPT_BYTES:
                self._drop_one(self._bytes)
            if len(self._kept) > MAX_KEPT:
                self._drop_one(self._number)

    def _drop_one(self, of_tenants: Counter[str]) -> None:
        """Removes the least recently used tables of the tenant with the largest count."""
        [(greediest, _)] = of_tenants.most_common(1)
        self._drop(next(key for key, kept in self._kept.items() if kept.tenant == greediest))

    def _drop(self, key: str) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes[kept.tenant] -= len(kept.tables)
            self._number[kept.tenant] -= 1
            if not self._number[kept.tenant]:
                del self._bytes[kept.tenant], self._number[kept.tenant]
