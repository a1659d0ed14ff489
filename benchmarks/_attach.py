"""Cuts the connection of a client with many streams, and measures the time until all streams
continue."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil
from tokenbus.clients import AsyncClient
from tokenbus.protocol.messages import Welcome

PATIENCE_S = 300.0
"""Maximum time until all streams have received the expected number of entries, in seconds."""
BETWEEN = 20
"""Number of entries that each stream receives before each cut. They show the CPU time that an entry
takes without a cut."""


class Return(NamedTuple):
    """The figures of one cut of the client's connection. The measurement ends when all streams have
    received their next entry."""

    cut_s: float
    """Seconds from the cut of the connection to the end of the measurement."""
    attach_s: float
    """Seconds from the client's ATTACHes to the end of the measurement."""
    cpu_s: float
    """The CPU time of all processes during the measurement, minus their CPU time for the same
    number of entries without a cut, in seconds."""


async def come_back(
    front: str, streams: int, tokens: int, rounds: int, pids: Sequence[int]
) -> list[Return]:
    """Begins ``streams`` streams, waits until each has received ``tokens`` tokens, and cuts the
    client's connection ``rounds`` times. ``pids``: the processes whose CPU time is measured."""
    client = Returning(front, streams)
    processes = [psutil.Process(pid) for pid in pids]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    await client.reach(tokens)
    returns = []
    for _ in range(rounds):
        before, entries = cpu_s(), client.entries
        await client.reach(BETWEEN)
        per_entry_s = (cpu_s() - before) / (client.entries - entries)
        before, entries = cpu_s(), client.entries
        cut_s, attach_s = await client.come_back()
        extra_s = cpu_s() - before - per_entry_s * (client.entries - entries)
        returns.append(Return(cut_s, attach_s, extra_s))
    await client.close()
    return returns


class Returning:
    """A client with ``streams`` streams, and a task for each stream that reads its entries."""

    def __init__(self, front: str, streams: int) -> None:
        self._front = front
        self._client = AsyncClient(front, patience_s=PATIENCE_S)
        self._streams = [
            self._client.generate([5, 6, 7 + i % 256], max_tokens=900, ignore_eos=True, text=False)
            for i in range(streams)
        ]
        self._counts = [0] * streams
        self._targets = [0] * streams
        self._left = 0
        """Number of streams that have received fewer entries than ``_targets`` requires."""
        self._reached = asyncio.Event()
        self._reached_at = self._attached_at = 0.0
        session: Any = self._client._connection._session
        self._on_welcome = session._on_welcome
        session._on_welcome = self._welcomed
        self._readers = [asyncio.create_task(self._read(i)) for i in range(streams)]

    @property
    def entries(self) -> int:
        """Number of entries that all streams together have received."""
        return sum(self._counts)

    async def _read(self, number: int) -> None:
        counts = self._counts
        async for _ in self._streams[number]:
            counts[number] += 1
            if counts[number] == self._targets[number]:
                self._left -= 1
                if not self._left:
                    self._reached_at = time.monotonic()
                    self._reached.set()
        raise SystemExit(f"a stream has ended after {counts[number]} entries; use fewer rounds")

    def _aim(self, targets: list[int]) -> None:
        self._reached.clear()
        self._left, self._targets = len(targets), targets

    async def reach(self, entries: int) -> None:
        """Waits until each stream has received ``entries`` further entries."""
        self._aim([count + entries for count in self._counts])
        await asyncio.wait_for(self._reached.wait(), PATIENCE_S)

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        """Handles WELCOME, the answer to HELLO. The client sends an ATTACH for each stream. The
        measurement ends when each stream has then received one more entry. The connection's thread
        calls this method."""
        self._on_welcome(welcome, now)
        self._attached_at = time.monotonic()
        self._aim([stream._call.received + 1 for stream in self._streams])

    async def come_back(self) -> tuple[float, float]:
        """Cuts the connection, and waits until each stream has received its next entry. Returns two
        times in seconds: from the cut to these entries, and from the client's ATTACHes to these
        entries."""
        self._aim([-1] * len(self._counts))
        cut_at = time.monotonic()
        cut(self._front)
        await asyncio.wait_for(self._reached.wait(), PATIENCE_S)
        return self._reached_at - cut_at, self._reached_at - self._attached_at

    async def close(self) -> None:
        """Stops the reading tasks, and closes the client with its streams."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await self._client.close()


def cut(endpoint: str) -> None:
    """Shuts down this process's connections to an ``ipc://`` endpoint of ZeroMQ. Both directions
    are shut down, so that both ends detect the cut."""
    path = endpoint.removeprefix("ipc://")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family == socket.AF_UNIX and found.getpeername() == path:
                    found.shutdown(socket.SHUT_RDWR)
