"""The numbers of new sequences. A sequence's number is computed from the fork that created the
sequence.

Simultaneous forks of several sequences are made in any order. A request that runs again must give
the same result. But sampling depends on a sequence's number, controllers read the number, and
clients identify the sequence by the number. So the numbers must not depend on the order of forks.

Besides its number, a sequence has a *lineage*: a hash of all forks that led to the sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

WIDTH = 1024
"""The k-th sequence that is forked from sequence p has the number ``p * WIDTH + k``, if this number
is below ``FIRST_HASHED`` and k is below ``WIDTH``."""
FIRST_HASHED = 2**31
"""Numbers of at least this value are hashes. All numbers are u32."""


def lineage_of_fork(parent: int, fork: int, child: int) -> int:
    """The 64-bit lineage of a new sequence: the ``child``-th sequence (counted from 0) that the
    ``fork``-th fork (counted from 1) of its parent created. ``parent`` is the lineage of the
    parent."""
    path = f"{parent}/{fork}/{child}".encode()
    return int.from_bytes(hashlib.sha256(path).digest()[:8], "little")


def number_of_fork(parent: int, place: int, lineage: int, taken: Container[int]) -> int:
    """The number of the ``place``-th sequence (counted from 1) that was forked from sequence
    ``parent``. The number is not in ``taken``.

    The sequences that sequence 0 creates have the numbers 1, 2, 3, …. The sequences that sequence 1
    creates have the numbers 1025, 1026, …. After several nested forks, the numbers are hashes.
    Among requests with 128 sequences, one in a few hundred thousand has two sequences with the same
    hash. The numbers of these two sequences depend on the order of the forks.
    """
    number = parent * WIDTH + place
    if place >= WIDTH or number >= FIRST_HASHED:
        number = FIRST_HASHED | lineage >> 33
    while number in taken:
        number = FIRST_HASHED | (number + 1) % FIRST_HASHED
    return number
