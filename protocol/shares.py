"""The share of a bounded resource that one client may take, so that some of the resource stays free
for other clients."""

from __future__ import annotations


def fits_share(own: int, total: int, capacity: int, size: int = 1) -> bool:
    """Whether a client may take ``size`` more units of a resource with ``capacity`` units. The
    client has ``own`` units, and all clients together have ``total``.

    A client may have at most as many units as remain free. So a single client gets half of the
    resource, each of n greedy clients gets 1/(n + 1), and the same amount stays free for a later
    client. The rule needs no setting for each client. A client that has nothing may take whatever
    is free.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet
    switches", 1998, with a factor of 1.
    """
    free = capacity - total
    return size <= free and (own == 0 or own + size <= free)


def max_share(own: int, total: int, capacity: int) -> int:
    """The largest number of units that ``fits_share`` allows a client to have, if the number of
    units of all other clients does not change. The client shares these units among its users by the
    same rule."""
    return (capacity - total + own + 1) // 2
