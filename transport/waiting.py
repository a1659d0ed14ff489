"""Bounded waits for an item of a queue that another thread fills."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


def get_within(queue: SimpleQueue[Item], seconds: float | None) -> Item:
    """Waits up to ``seconds`` for the next item, or without a bound if ``seconds`` is None, and
    returns the item. Raises Empty if no item has arrived in this time.

    In CPython 3.11 and 3.12 ``queue.get(timeout=seconds)`` alone may wait forever. If the queue's
    own lock is free, the call takes the lock and only then computes how long to wait. If more than
    ``seconds`` pass in between, because the thread does not run, the computed time is negative,
    which means forever (``Modules/_queuemodule.c``). So this function first takes the lock with a
    call that does not wait.
    """
    with contextlib.suppress(Empty):
        return queue.get_nowait()
    return queue.get(timeout=seconds)
