"""Caches a worker's compiled grammars and tables in memory, with one bound for all tenants
together."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
K = TypeVar("K")


class _Entry(NamedTuple, Generic[T]):
    tenant: str
    value: T
    size: int


class Kept(Generic[K, T]):
    """Values by key. Thread-safe.

    Each value has a size. If the sum of all sizes exceeds ``max_size``, a value of the tenant with
    the largest sum is removed. If there are more than ``max_values`` values, a value of the tenant
    with the most values is removed. In both cases, it is the least recently used value of this
    tenant. So a tenant with many grammars does not evict the values of other tenants.
    """

    def __init__(self, max_values: int, max_size: int) -> None:
        """``max_size``: the bound of the sum of all sizes, in the unit of ``size`` in ``add``."""
        self._max_values = max_values
        self._max_size = max_size
        self._lock = threading.Lock()
        self._entries: OrderedDict[K, _Entry[T]] = OrderedDict()
        """The values by key, the least recently used first."""
        self._sizes: Counter[str] = Counter()
        """For each tenant, the sum of the sizes of its values."""
        self._numbers: Counter[str] = Counter()
        """For each tenant, the number of its values."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """The sum of the sizes of all values."""
        return self._sizes.total()

    def get(self, key: K) -> T | None:
        """The value with this key; None if it is not stored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry.value

    def add(self, tenant: str, key: K, value: T, size: int = 1) -> None:
        """Stores a value that was compiled for a tenant. Values are removed if a bound is then
        exceeded."""
        with self._lock:
            self._drop(key)
            self._entries[key] = _Entry(tenant, value, size)
            self._sizes[tenant] += size
            self._numbers[tenant] += 1
            while self._sizes.total() > self._max_size:
                self._drop_one(self._sizes)
            if len(self._entries) > self._max_values:
                self._drop_one(self._numbers)

    def drop(self, key: K, value: T) -> None:
        """Removes a value if it is still stored with this key."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.value is value:
                self._drop(key)

    def _drop_one(self, of_tenants: Counter[str]) -> None:
        """Removes the least recently used value of the tenant with the largest number in
        ``of_tenants``. If several tenants have this number, removes the least recently used value
        of all of them."""
        largest = max(of_tenants.values())
        entries = self._entries.items()
        self._drop(next(key for key, entry in entries if of_tenants[entry.tenant] == largest))

    def _drop(self, key: K) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._sizes[entry.tenant] -= entry.size
            self._numbers[entry.tenant] -= 1
            if not self._numbers[entry.tenant]:
                del self._sizes[entry.tenant], self._numbers[entry.tenant]
