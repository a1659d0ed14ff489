"""Bounded waits for an item of a queue that another thread fills."""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import TypeVar

Item = TypeVar("Item")


def get_within(queue: SimpleQueue[Item], seconds: float | None) -> Item:
    """Waits for the next item and returns it. Raises Empty if no item arrives within ``seconds``.
    If ``seconds`` is None, the wait has no bound.

    In CPython 3.11 and 3.12, ``queue.get(timeout=seconds)`` alone may wait forever
    (``Modules/_queuemodule.c``). If the queue's own lock is free, the call first takes the lock and
    then computes how long to wait. The system may suspend the thread between these two actions, for
    longer than ``seconds``. The computed time is then negative, which means forever. So this
    function first takes the lock with a call that does not wait.
    """
    with contextlib.suppress(Empty):
        return queue.get_nowait()
    return queue.get(timeout=seconds)
