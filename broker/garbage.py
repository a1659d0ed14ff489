"""Bounds the pauses of Python's cyclic garbage collector in the broker."""

from __future__ import annotations

import gc

YOUNG = 2_000
"""Number of new objects after which the youngest generation is collected. With the middle
generation, a collection looks at about 20,000 objects, which takes about a millisecond."""
NEVER = 1_000_000_000


def bound_pauses() -> None:
    """Turns full collections off in this process, and leaves those of young objects on.

    A full collection looks at every object: with a million live streams it takes more than a
    second, in which the broker routes nothing. It would find nothing. The objects of a session, a
    worker or a request refer to each other only while they are in the tables, and reference counts
    free them afterwards.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, NEVER)
