"""Computes the share of a bounded resource that one client may take. The rest of the resource stays
free for other clients."""

from __future__ import annotations

from collections import Counter


def fits_share(own: int, total: int, capacity: int, size: int = 1) -> bool:
    """Whether a client may take ``size`` more units of a resource with ``capacity`` units. The
    client has ``own`` units, and all clients together have ``total``.

    With the new units, a client may have at most as many units as were free before. So a single
    client gets half of the resource. If n clients take as much as they can, each of them gets 1/(n
    + 1), and the same amount stays free for a later client. A client that has no units may take all
    free units at once. The rule does not need a setting for each client.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998, with a factor of 1.
    """
    free = capacity - total
    return size <= free and (own == 0 or own + size <= free)


def max_share(own: int, total: int, capacity: int) -> int:
    """The largest number of units that ``fits_share`` allows a client, if all other clients keep
    the units that they have. The same rule then divides these units among the users of the
    client."""
    return (capacity - total + own + 1) // 2


class Shares:
    """Counts the units of a bounded resource that each client has."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        """Number of units that all clients have together."""
        self._of_client = Counter[str]()

    @property
    def free(self) -> int:
        """Number of units that no client has."""
        return self.capacity - self.total

    def of(self, client: str) -> int:
        """Number of units that a client has."""
        return self._of_client[client]

    def fits(self, client: str, size: int = 1) -> bool:
        """Whether a client may take ``size`` more units (``fits_share``)."""
        return fits_share(self._of_client[client], self.total, self.capacity, size)

    def take(self, client: str, size: int = 1) -> None:
        """Counts ``size`` more units of a client, even if they do not fit."""
        self._of_client[client] += size
        self.total += size

    def give_back(self, client: str, size: int = 1) -> None:
        """Stops counting ``size`` units of a client."""
        self._of_client[client] -= size
        self.total -= size
        if not self._of_client[client]:
            del self._of_client[client]
