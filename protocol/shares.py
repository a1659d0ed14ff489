"""How much of a bounded room one client may take, so that none fills it for the others."""

from __future__ import annotations


def fits_share(own: int, total: int, most: int, size: int = 1) -> bool:
    """Whether a client that has ``own`` may take ``size`` more of a room of ``most``, of which all
    clients together have ``total``.

    A client may have as much as is left free. So one alone gets half of the room, each of n greedy
    ones gets 1/(n + 1), and as much is always left for a later client. No number has to be
    set for each client. (Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory
    packet switches", 1998, with a factor of 1.) A client that has nothing gets what is there.
    """
    free = most - total
    return size <= free and (own == 0 or own + size <= free)
