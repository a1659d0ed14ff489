"""How long Python's collector of cyclic garbage may stop the broker."""

from __future__ import annotations

import gc

YOUNG = 2_000
"""New objects after which the youngest are looked at; with the middle generation, some 20,000 are
the most that a collection looks at, which takes about a millisecond."""
NEVER = 1_000_000_000


def bound_pauses() -> None:
    """Turns full collections off in this process, and leaves those of young objects on.

    A full collection looks at every object: with a million live streams it takes more than a
    second, in which the broker routes nothing. It would find nothing there: what the broker keeps
    of a session, a worker or a request refers to each other only while it is in the tables, and
    is freed by its reference count when it leaves them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, NEVER)
