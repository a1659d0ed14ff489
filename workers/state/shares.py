"""Bounds the memory of the state worker that each tenant, and each request of a tenant, may take.

A tenant may take at most as many bytes as are free. So a single tenant gets at most half of the
memory. If n tenants take as much as they can, each tenant gets 1 / (n + 1) of the memory. In the
same way, a request may take at most as many bytes as its tenant may still take.
"""

from __future__ import annotations

from typing import NamedTuple

from ...protocol.pace import RETRY_AFTER_S
from ...protocol.tenants import Tenant


class _Part(NamedTuple):
    """A request: the key of its tenant, and its bytes."""

    key: str = ""
    bytes: int = 0


_NOTHING = _Part()


class Shares:
    """The bytes that the variables of live requests take, by request and by tenant."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._bytes = 0
        self._requests: dict[int, _Part] = {}
        self._tenants: dict[str, int] = {}

    def key(self, request: int) -> str:
        """The key of a request's tenant; ``""`` if the tenant does not have a key."""
        return self._requests.get(request, _NOTHING).key

    def size(self, request: int) -> int:
        """The bytes of a request; 0 for an unknown request."""
        return self._requests.get(request, _NOTHING).bytes

    def refusal(self, tenant: Tenant, request: int, cost: int) -> str | None:
        """The error if the tenant or the request does not have room for an operation; None if both
        have room. ``cost``: the maximum number of bytes that the operation adds."""
        used = self._tenants.get(tenant.key, 0)
        quota = tenant.quota_bytes
        if quota is not None and used + cost > quota:
            return (
                "the quota variable_bytes of this key is used up: the variables of its live "
                f"requests take {used} bytes, this operation takes up to {cost}, and the quota is "
                f"{quota} bytes; try again when other requests have ended, in {RETRY_AFTER_S:g} s "
                "or later"
            )
        free = self._total_bytes - self._bytes
        if used + cost > free:
            return (
                f"the state worker is full: the variables of this key's live requests take {used} "
                f"bytes, and this operation takes up to {cost}; a key may use at most as many "
                f"bytes as are free, now {free}; try again when other requests have ended"
            )
        own = self.size(request)
        if own + cost > free - used:
            return (
                f"the state worker is full: the variables of this request take {own} bytes, and "
                f"this operation takes up to {cost}; a request may use at most the bytes that "
                f"remain for its key, now {free - used}; try again when other requests have ended"
            )
        return None

    def put(self, request: int, key: str, size: int) -> None:
        """Sets the tenant and the bytes of a request; a request of 0 bytes is removed."""
        before = self._requests.pop(request, _NOTHING)
        self._add(before.key, -before.bytes)
        if size:
            self._requests[request] = _Part(key, size)
            self._add(key, size)

    def _add(self, key: str, size: int) -> None:
        self._bytes += size
        used = self._tenants.pop(key, 0) + size
        if used:
            self._tenants[key] = used
