"""The names of new sequences of forks: names that follow from the forks that led to them.

Forks of several sequences at the same time are made in any order. A sequence's number is a part of
what it draws, its controller knows it, and clients count entries by it; so that a request gives the
same when it is run again, a number must not depend on that order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

WIDTH = 1024
"""The k-th sequence that was forked from number p has the number ``p * WIDTH + k``, where that is
small enough."""
FIRST_HASHED = 2**31
"""From here on, numbers are hashes. Numbers are u32."""


def lineage_of_fork(parent: int, fork: int, child: int) -> int:
    """The lineage of a new sequence, of 64 bits: of the ``fork``-th fork of its parent, the
    ``child``-th sequence that it made. It does not depend on the numbers of sequences."""
    path = f"{parent}/{fork}/{child}".encode()
    return int.from_bytes(hashlib.sha256(path).digest()[:8], "little")


def number_of_fork(parent: int, place: int, lineage: int, taken: Container[int]) -> int:
    """The number of the ``place``-th sequence, from 1, that was ever forked from ``parent``, which
    none of ``taken`` is.

    Those of sequence 0 are 1, 2, 3, …; those of sequence 1 are 1025, 1026, …. Deep ones are hashes,
    which two of a request's 128 sequences share once in a few hundred thousand such requests; then
    the order decides.
    """
    number = parent * WIDTH + place
    if place >= WIDTH or number >= FIRST_HASHED:
        number = FIRST_HASHED | lineage >> 33
    while number in taken:
        number = FIRST_HASHED | (number + 1) % FIRST_HASHED
    return number
