"""Runs requests on two workers, and kills one of the workers while it computes tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from _served import GPU, System
from tokenbus.clients import Client, Stream
from tokenbus.protocol.messages import System as Notice
from tokenbus.protocol.sampling import Sampling

Job = tuple[list[int], Sampling]
Streams = dict[tuple[int, int], list[tuple[int, float]]]
"""For each pair (index of the request, ``seq`` of a sequence): the sequence's tokens, each with its
log-probability."""
READ = 6
"""Number of entries of the first stream that are read before a worker is killed."""
PATIENCE_S = 600.0


class KilledWorkers:
    """A broker and two GPU workers with the setting ``exact`` and different numbers of threads.

    ``run`` first reads ``READ`` entries of the stream of its first job. If both workers were ready
    when ``run`` began, ``run`` then kills a worker that has requests.
    """

    def __init__(self, folder: Path) -> None:
        self.kills = self.moves = self.not_exact = 0
        settings = {"exact": "on", "kv_cache_bytes": str(2**26), "threads": "1"}
        self._system = System(folder, Path("embedded"), **settings)
        self._started = 0
        try:
            self._system.wait(PATIENCE_S)
            self._client = Client(self._system.front, patience_s=PATIENCE_S)
            self._start()
        except BaseException:
            self._system.close()
            raise

    def run(self, jobs: Sequence[Job]) -> Streams:
        """Runs the requests, and returns their tokens."""
        workers = self._ready()
        streams = [self._begin(job) for job in jobs]
        with contextlib.suppress(StopIteration):
            for _ in range(READ):
                next(streams[0])
            if len(workers) == 2:
                self._kill()
        found: Streams = {}
        for number, stream in enumerate(streams):
            for sequence in stream.wait():
                pairs = zip(sequence.tokens, sequence.logprobs, strict=True)
                found[number, sequence.seq] = list(pairs)
                self.not_exact += sequence.exact is not True
        return found

    def close(self) -> None:
        """Ends all processes."""
        self._client.close()
        self._system.close()

    def _begin(self, job: Job) -> Stream:
        prompt, sampling = job
        options: dict[str, Any] = {
            name: value
            for name, value in msgspec.structs.asdict(sampling).items()
            if value != getattr(Sampling(), name)
        }
        return self._client.generate(prompt, on_system=self._count, **options)

    def _count(self, notice: Notice) -> None:
        self.moves += notice.event == "moved"

    def _ready(self) -> dict[str, int]:
        """The process ids of the GPU workers that are ready, by name."""
        status = self._client.status(timeout_s=PATIENCE_S)
        return {w.name: w.pid for w in status.workers if w.role == "gpu" and w.models}

    def _kill(self) -> None:
        """Kills a GPU worker that has requests, and starts another GPU worker."""
        status = self._client.status(timeout_s=PATIENCE_S)
        busy = [w.pid for w in status.workers if w.role == "gpu" and w.requests]
        for process in self._system.processes[1:]:
            if process.pid in busy and process.poll() is None:
                process.kill()
                process.wait()
                self._system.processes.remove(process)
                self.kills += 1
                self._start()
                return

    def _start(self) -> None:
        """Starts another GPU worker; every second worker has two threads."""
        self._started += 1
        self._system.start(GPU, threads=str(1 + self._started % 2))
