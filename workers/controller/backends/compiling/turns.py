"""Decides which tenant's grammar or module is compiled next."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, deque


class Turns:
    """Grants up to ``slots`` turns at a time. A turn is the permission to compile one grammar or
    one module. Thread-safe.

    Waiting tenants get turns in round-robin order. If there are several slots, one tenant may use
    all but one of them. Without this rule, a tenant's hundred expensive grammars would delay the
    grammars of all other tenants. Requests without a tenant ("") may have all slots.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._most = max(1, slots - 1)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, deque[object]] = OrderedDict()
        """The waiting requests by tenant; tenants without waiting requests are not included. The
        tenant that gets the next turn comes first."""
        self._granted: Counter[str] = Counter()

    def acquire(self, tenant: str, timeout_s: float) -> bool:
        """Waits for a turn of a tenant; returns False if ``timeout_s`` passes before the turn."""
        until = time.monotonic() + timeout_s
        mine = object()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(mine)
            while not self._is_next(tenant, mine):
                left_s = until - time.monotonic()
                if left_s <= 0:
                    self._leave(tenant, mine)
                    self._changed.notify_all()
                    return False
                self._changed.wait(left_s)
            self._leave(tenant, mine)
            if tenant in self._waiting:
                self._waiting.move_to_end(tenant)
            self._granted[tenant] += 1
            self._changed.notify_all()
            return True

    def release(self, tenant: str) -> None:
        """Ends a turn of a tenant."""
        with self._changed:
            self._granted[tenant] -= 1
            if not self._granted[tenant]:
                del self._granted[tenant]
            self._changed.notify_all()

    def _is_next(self, tenant: str, mine: object) -> bool:
        if self._granted.total() >= self._slots:
            return False
        found = next((one for one in self._waiting if self._may_begin(one)), None)
        return found == tenant and self._waiting[tenant][0] is mine

    def _may_begin(self, tenant: str) -> bool:
        return not tenant or self._granted[tenant] < self._most

    def _leave(self, tenant: str, mine: object) -> None:
        queue = self._waiting[tenant]
        queue.remove(mine)
        if not queue:
            del self._waiting[tenant]
