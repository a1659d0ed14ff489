"""Bounds the work in one pass of the event loop, if there are many short pieces of work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from .users.turns import Turns, current_user

T = TypeVar("T")


class LoopTime:
    """Runs short pieces of work in the event loop. If the work of one pass has taken ``max_s``
    seconds, further work runs in later passes, and users take turns."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._spent_s = 0.0
        """The time that the work of the current pass has taken, in seconds."""
        self._turns = Turns()

    async def run(self, work: Callable[[], T]) -> T:
        """Runs ``work`` and returns its result. If the time of this pass is used up, other requests
        are served first."""
        if self._spent_s < self._max_s:
            return self._timed(work)
        async with self._turns.of(current_user.get()):
            if self._spent_s >= self._max_s:
                await asyncio.sleep(0)
            return self._timed(work)

    def _timed(self, work: Callable[[], T]) -> T:
        if not self._spent_s:
            asyncio.get_running_loop().call_soon(self._next_pass)
        began = perf_counter()
        try:
            return work()
        finally:
            self._spent_s += perf_counter() - began

    def _next_pass(self) -> None:
        self._spent_s = 0.0


class EntryPasses:
    """Divides the entries of one stream among passes of the event loop. If a client has not read
    its answer for some time, thousands of entries wait, and the client then reads all of them."""

    def __init__(self, most: int) -> None:
        """``most``: the number of entries after which other requests run."""
        self._most = most
        self._count = 0

    async def take(self, count: int) -> None:
        """Counts entries that are about to be composed. If the pass has too many entries with them,
        other requests run first."""
        self._count += count
        if self._count > self._most:
            self._count = count
            await asyncio.sleep(0)
