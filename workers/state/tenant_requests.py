"""Which live requests are whose, and whether a tenant's quota has room for more variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...protocol.pace import RETRY_AFTER_S
from ...protocol.tenants import Tenant


class TenantRequests:
    """The requests with variables of tenants that have a quota."""

    def __init__(self) -> None:
        self._requests: dict[str, set[int]] = {}
        self._keys: dict[int, str] = {}

    def refusal(
        self, tenant: Tenant, request: int, cost: int, size: Callable[[int], int]
    ) -> str | None:
        """Why an operation of a request that adds up to ``cost`` bytes is refused; None otherwise.

        ``size`` has the bytes of each request.
        """
        if tenant.quota_bytes is None:
            return None
        self._keys[request] = tenant.key
        requests = self._requests.setdefault(tenant.key, set())
        requests.add(request)
        used = sum(map(size, requests))
        if used + cost <= tenant.quota_bytes:
            return None
        return (
            f"the quota variable_bytes of this key is used up: the variables of its live requests "
            f"take {used} bytes, this operation up to {cost}, and it is {tenant.quota_bytes}; try "
            f"again when other requests have ended, in {RETRY_AFTER_S:g} s or later"
        )

    def end(self, requests: Iterable[int]) -> None:
        """These requests have ended, and their variables with them."""
        for request in requests:
            key = self._keys.pop(request, None)
            if key is None:
                continue
            same = self._requests[key]
            same.discard(request)
            if not same:
                del self._requests[key]
