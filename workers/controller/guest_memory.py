"""The total memory of all guests of a worker, and each tenant's share of this memory.

The memory of a tenant must not exceed the free memory. So a single tenant gets at most half of the
total, each of two tenants a third, and so on. Some memory always stays free for a later tenant.
Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches"
(1998).

If clients do not have keys, each session counts as a tenant here.
"""

from __future__ import annotations

import threading

from ...protocol.errors import Code, ControllerError


class GuestMemory:
    """Counts the bytes of memory that the guests of a worker use. Thread-safe."""

    def __init__(self, total: int) -> None:
        """``total``: maximum bytes of all guests of this worker."""
        self._total = total
        self._used = 0
        self._by_tenant: dict[str, int] = {}
        """Bytes in use, by tenant. Tenants without memory in use are not in the table."""
        self._lock = threading.Lock()

    def of(self, tenant: str) -> TenantMemory:
        """The share of one tenant."""
        return TenantMemory(self, tenant)

    @property
    def used(self) -> int:
        """Bytes that all guests use."""
        return self._used

    def take(self, tenant: str, size: int) -> None:
        """Counts ``size`` more bytes of a tenant's guest. Raises ControllerError if the tenant
        would then exceed its share."""
        with self._lock:
            mine = self._by_tenant.get(tenant, 0) + size
            used = self._used + size
            if mine > self._total - used:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"the controllers of this client would use {mine} bytes of memory; the "
                    f"controllers of all clients would use {used} of {self._total} bytes on this "
                    "worker; a client may not use more memory than remains free; try again when "
                    "other requests have ended",
                )
            self._by_tenant[tenant] = mine
            self._used = used

    def give_back(self, tenant: str, size: int) -> None:
        """Stops counting ``size`` bytes of a tenant's guest."""
        with self._lock:
            self._used -= size
            self._by_tenant[tenant] -= size
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]


class TenantMemory:
    """The share of one tenant. Thread-safe."""

    def __init__(self, memory: GuestMemory, tenant: str) -> None:
        self._memory = memory
        self._tenant = tenant

    def take(self, size: int) -> None:
        """Counts ``size`` more bytes of a guest. Raises ControllerError if the tenant would then
        exceed its share."""
        self._memory.take(self._tenant, size)

    def give_back(self, size: int) -> None:
        """Stops counting ``size`` bytes of a guest."""
        self._memory.give_back(self._tenant, size)
