"""The system of ``rollouts.py``: three GPU workers, and the workers that programs need. Every ten
seconds, one GPU worker is killed."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from _served import GPU, STATE, System
from tokenbus.clients import AsyncClient
from tokenbus.clients.results import GeneratedSequence
from tokenbus.protocol.messages import WorkerStatus

WORKERS = 3
GROUPS = 8
"""Number of groups that are live at a time. One step of the trainer uses the same number."""
SAMPLES = 8
"""Number of samples of a group."""
NEW = 64
"""Number of tokens of a sample."""
KILL_EVERY_S = 10.0
PATIENCE_S = 300.0
PROMPTS = ("print((a + b) * (c", "x = f(g(h(1)), (2", "return (((n - 1)", "if (len(items) > (k")
SETTINGS = {
    "exact": "on",
    "speculation": "off",
    "kv_cache_bytes": str(2**26),
    "move_wait_s": str(PATIENCE_S),
}


@contextmanager
def started() -> Iterator[System]:
    """A system whose GPU workers have one thread each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        System(
            Path(folder) / "run", Path("embedded"), steered=True, threads="1", **SETTINGS
        ) as system,
    ):
        system.wait(PATIENCE_S)
        system.start(STATE)
        for _ in range(WORKERS - 1):
            system.start(GPU)
        yield system


class Killer:
    """Every ``KILL_EVERY_S``, kills a GPU worker, provided that another worker has the current
    weights."""

    def __init__(self, system: System, client: AsyncClient) -> None:
        self._system = system
        self._client = client
        self.kills = 0

    async def wait(self) -> None:
        """Waits until all workers are ready."""
        while len(await self._ready("gpu")) < WORKERS or not await self._ready("state"):
            await asyncio.sleep(0.2)

    @asynccontextmanager
    async def killing(self) -> AsyncIterator[None]:
        """Kills workers until the end of the ``with`` block."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        rng = random.Random(1)
        while True:
            await asyncio.sleep(KILL_EVERY_S)
            while len(workers := await self._ready("gpu")) < 2:
                await asyncio.sleep(0.2)
            chosen = rng.choice(workers).pid
            [process] = [p for p in self._system.processes if p.pid == chosen]
            process.kill()
            process.wait()
            self._system.processes.remove(process)
            self._system.start(GPU)
            self.kills += 1

    async def _ready(self, role: str) -> list[WorkerStatus]:
        """The workers of a role. GPU workers are included only if they have the current weights."""
        status = await self._client.status(timeout_s=PATIENCE_S)
        return [w for w in status.workers if w.role == role and (w.models or role != "gpu")]


def count_samples(counts: Counter[str], samples: list[GeneratedSequence]) -> None:
    """Counts the samples of a group that has ended."""
    counts["lost"] += SAMPLES - len(samples)
    for one in samples:
        counts["rollouts"] += 1
        counts["lost"] += one.finish_reason != "length" or len(one.tokens) < NEW
        counts["doubled"] += len(one.tokens) > NEW
        counts["not_exact"] += one.exact is not True
        counts["spans"] += len(one.spans)
