"""The contexts of tenants: the tokens of sequences that programs have saved by name.

In this module a context is a string of bytes. Each tenant also has a table of its modules
(``module_tables.py``). Contexts and tables share one bound of bytes, and contexts are dropped if a
table needs their bytes. A tenant has at most ``MAX_CONTEXTS`` contexts. Its contexts and its table
together take at most ``TENANT_BYTES``. Beyond these bounds, the tenant's oldest contexts are
dropped. If the contexts and tables of all tenants have more than ``total_bytes``, the tenant whose
contexts have the most bytes loses its oldest context.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from ..variables import MIB
from .module_tables import ModuleTables

MAX_CONTEXTS = 256
"""Maximum number of contexts of a tenant."""
TENANT_BYTES = 16 * MIB
"""Maximum bytes that the contexts and the table of modules of a tenant take together."""
CONTEXT_BYTES = 256
"""The bytes that are counted for a context in addition to its name and content."""


class SavedContext(Struct, array_like=True):
    """A context as it is stored in the log."""

    tenant: str
    name: str
    content: bytes

    @property
    def size(self) -> int:
        """The bytes that count for the context."""
        return CONTEXT_BYTES + len(self.name.encode()) + len(self.content)


class Contexts:
    """The contexts of all tenants. ``total_bytes``: maximum bytes of all contexts and tables."""

    def __init__(self, total_bytes: int, tables: ModuleTables) -> None:
        self._total_bytes = total_bytes
        self._tables = tables
        self._tenants: dict[str, OrderedDict[str, SavedContext]] = {}
        self._sizes: dict[str, int] = {}
        self.bytes = 0
        """Bytes of all contexts."""

    def __iter__(self) -> Iterator[SavedContext]:
        """All contexts. The contexts of each tenant are in the order in which they were saved."""
        for contexts in self._tenants.values():
            yield from contexts.values()

    def get(self, tenant: str, name: str) -> bytes | None:
        """The content of a context; None if the tenant does not have it."""
        contexts = self._tenants.get(tenant)
        found = contexts.get(name) if contexts is not None else None
        return None if found is None else found.content

    def refusal(self, context: SavedContext, quota: int | None) -> str | None:
        """The error if a context is too large; None if it is not. A context is too large if it has
        more bytes than its tenant may use, or more than the tables leave for contexts. ``quota``:
        the tenant's quota of bytes, if the tenant has one."""
        most = self._max_bytes(context.tenant, quota)
        if context.size > most:
            return f"the context has {context.size} bytes; at most {most} are allowed"
        left = self._total_bytes - self._tables.bytes
        if context.size > left:
            return (
                f"the state worker is full: the context has {context.size} bytes; next to the "
                f"tables of all tenants' modules and tags, {max(0, left)} bytes remain for "
                "contexts; delete some modules or tags"
            )
        return None

    def put(self, context: SavedContext, quota: int | None = None) -> None:
        """Saves a context in place of the tenant's context of the same name. Then drops contexts
        beyond the bounds. ``quota``: the tenant's quota of bytes, if the tenant has one."""
        tenant = context.tenant
        if context.name in self._tenants.get(tenant, ()):
            self._drop(tenant, context.name)
        contexts = self._tenants.setdefault(tenant, OrderedDict())
        contexts[context.name] = context
        self._count(tenant, context.size)
        self.make_room(tenant, quota)

    def make_room(self, tenant: str, quota: int | None = None) -> None:
        """Drops contexts beyond the bounds. Called after the contexts or the table of ``tenant``
        have changed."""
        contexts = self._tenants.get(tenant, OrderedDict())
        most = self._max_bytes(tenant, quota)
        while len(contexts) > MAX_CONTEXTS or self._sizes.get(tenant, 0) > most:
            self._drop(tenant, next(iter(contexts)))
        while self._sizes and self.bytes + self._tables.bytes > self._total_bytes:
            largest = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(largest, next(iter(self._tenants[largest])))

    def _max_bytes(self, tenant: str, quota: int | None) -> int:
        """Maximum bytes of the contexts of a tenant."""
        left = TENANT_BYTES - self._tables.size(tenant)
        return left if quota is None else min(left, quota)

    def _drop(self, tenant: str, name: str) -> None:
        contexts = self._tenants[tenant]
        self._count(tenant, -contexts.pop(name).size)
        if not contexts:
            del self._tenants[tenant], self._sizes[tenant]

    def _count(self, tenant: str, size: int) -> None:
        self.bytes += size
        self._sizes[tenant] = self._sizes.get(tenant, 0) + size
