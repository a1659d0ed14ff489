"""Bounded waits for an item of a queue that another thread fills."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


def get_within(queue: SimpleQueue[Item], seconds: float | None) -> Item:
    """Waits up to ``seconds`` for the next item, or without a bound if ``seconds`` is None, and
    returns the item. Raises Empty if no item has arrived in this time.

    In CPython 3.11 and 3.12, ``queue.get(timeout=seconds)`` alone may wait forever
    (``Modules/_queuemodule.c``). If the queue's own lock is free, the call first takes the lock and
    then computes how long to wait. If the thread does not run for more than ``seconds`` in between,
    the computed time is negative, which means forever. So this function first takes the lock with a
    call that does not wait.
    """
    with contextlib.suppress(Empty):
        return queue.get_nowait()
    return queue.get(timeout=seconds)
