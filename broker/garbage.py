"""Bounds the pauses of Python's cyclic garbage collector in the broker."""

from __future__ import annotations

import gc

YOUNG = 2_000
"""Number of new objects after which the youngest generation is collected. A collection of the two
younger generations visits about 20,000 objects and takes about a millisecond."""
NEVER = 1_000_000_000


def bound_pauses() -> None:
    """Turns full collections off in this process. Collections of young objects stay on.

    A full collection visits every object. With a million live streams it takes more than a second,
    in which the broker does not route messages. A full collection would not free anything, because
    sessions, workers and requests refer to each other only while they are in the tables. When they
    have left the tables, their reference counts free them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, NEVER)
