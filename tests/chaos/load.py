"""Runs all requests at the same time, and records the notices that clients receive.

Some processes are killed or stopped meanwhile: each such signal is a *blow* (``schedule.Blow``).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenbus.clients import AsyncClient, AsyncStream, GeneratedSequence, TokenbusError
from tokenbus.clients import System as Notice

from .outcomes import Outcome, outcome_of, outcome_of_events
from .system import System
from .workloads import PREFACE, PREFACE_TEXT, Workload

CLIENTS = 4
"""Number of sessions over which the requests of the bus are distributed."""
HUNG_S = 1200.0
"""Seconds after the last blow. A stream that has not ended by then counts as hung."""
RETRY_S = 3600.0


@dataclass
class Move:
    """The move of a stream to another worker or broker."""

    workload: str
    at: float
    """The time at which the stream continued."""
    left: str
    """The slot of the worker that the stream left; empty if only the broker changed."""
    pause_s: float
    """Seconds without new entries at the client, from the last entry before the notice to the first
    entry after it."""
    noticed_s: float
    """The pause that the notice reports, in seconds. It does not include the time until the loss
    was detected."""


@dataclass
class Notes:
    """Records of the clients, in addition to the outcomes."""

    moves: list[Move] = field(default_factory=list)
    notices: Counter[str] = field(default_factory=Counter)
    """The number of notices, by event."""
    again: list[str] = field(default_factory=list)
    """Requests that a client sent again from the beginning, with the reason."""
    cut_off: list[float] = field(default_factory=list)
    """The pauses of bus streams whose client's broker received a blow, in seconds."""
    ended: int = 0
    tokens: int = 0


class Load:
    """The clients of a system."""

    def __init__(self, system: System, clients: list[AsyncClient], http: httpx.AsyncClient) -> None:
        self._system, self._clients, self._http = system, clients, http
        self.notes = Notes()
        self.progress: dict[str, float] = {}
        """The time of the last entry of each running request."""
        self._streaming: dict[str, AsyncClient] = {}
        """The client of each running stream of the bus, by the name of the stream's request."""
        self._cut_off: set[str] = set()
        """Running streams of the bus that have not received an entry since the last blow to their
        client's broker."""

    async def outcome(self, number: int, workload: Workload) -> Outcome:
        """Runs one request to its end."""
        run = {"bus": self._stream, "score": self._score}.get(workload.door, self._events)
        self.progress[workload.name] = time.monotonic()
        try:
            made = await run(self._clients[number % len(self._clients)], workload)
        except (TokenbusError, httpx.HTTPError) as error:
            made = Outcome(error=f"{type(error).__name__}: {error}")
        finally:
            del self.progress[workload.name]
        self.notes.ended += 1
        self.notes.tokens += made.size
        return made

    async def _stream(self, client: AsyncClient, workload: Workload) -> Outcome:
        reader = _Reader(self, workload)
        options = dict(workload.options)
        stream = client.generate(
            workload.prompt,
            on_system=reader.on_system,
            retry_s=RETRY_S,
            text=options.pop("text", True),
            **options,
        )
        self._streaming[workload.name] = client
        sending = asyncio.create_task(_send(stream, workload.inputs))
        try:
            while await stream.arrived():
                reader.arrived()
            await sending
        finally:
            sending.cancel()
            del self._streaming[workload.name]
            self._cut_off.discard(workload.name)
        return outcome_of(stream.sequences)

    async def _score(self, client: AsyncClient, workload: Workload) -> Outcome:
        reader = _Reader(self, workload)
        options = dict(workload.options)
        scores = await client.score(
            workload.prompt,
            options.pop("scored"),
            on_system=reader.on_system,
            retry_s=RETRY_S,
            **options,
        )
        reader.arrived()
        made = GeneratedSequence(0, tokens=scores.tokens, logprobs=scores.logprobs)
        made.top_logprobs = scores.top_logprobs
        return outcome_of([made])

    async def _events(self, client: AsyncClient, workload: Workload) -> Outcome:
        path = "/v1/completions" if workload.door == "completions" else "/v1/chat/completions"
        asked: dict[str, Any] = {"prompt": workload.prompt}
        if workload.door == "chat":
            asked = {"messages": [{"role": "user", "content": workload.prompt}]}
        url = f"http://{self._system.http[1]}{path}"
        lines = []
        async with self._http.stream("POST", url, json={**asked, **workload.options}) as answer:
            if answer.status_code != 200:
                return Outcome(error=f"{answer.status_code}: {(await answer.aread())!r}")
            async for line in answer.aiter_lines():
                self.progress[workload.name] = time.monotonic()
                lines.append(line)
        return outcome_of_events(lines)

    def cut_off(self, front: str) -> None:
        """Records a blow to the broker at ``front``; an empty address is ignored."""
        for name, client in self._streaming.items():
            if client.broker == front:
                self._cut_off.add(name)

    def resumed(self, workload: Workload, pause_s: float) -> None:
        """Called when entries of a stream have arrived. If they are the first after a blow to the
        broker of the stream's client, records the pause before them, in seconds."""
        if workload.name in self._cut_off:
            self._cut_off.remove(workload.name)
            self.notes.cut_off.append(pause_s)

    def note(self, workload: Workload, notice: Notice) -> None:
        """Records a client's notice."""
        self.notes.notices[notice.event] += 1
        if notice.event == "retrying":
            self.notes.again.append(f"{workload.name}: {notice.message}")

    def moved(self, workload: Workload, notice: Notice, pause_s: float) -> None:
        """Records a move, when the first entry after it has arrived."""
        left = self._system.name_of(notice.left) if notice.left else ""
        now, noticed_s = time.monotonic(), notice.pause_s or 0.0
        self.notes.moves.append(Move(workload.name, now, left, pause_s, noticed_s))


async def _send(stream: AsyncStream, inputs: Sequence[str]) -> None:
    """Sends inputs to the program of a stream."""
    for text in inputs:
        await stream.send(text)


class _Reader:
    """Reads one stream, and measures the pauses of its moves."""

    def __init__(self, load: Load, workload: Workload) -> None:
        self._load, self._workload = load, workload
        self._moved: list[Notice] = []
        self._last = time.monotonic()

    def on_system(self, notice: Notice) -> None:
        """Handles a notice. Notices and entries are handled in the order in which they were
        sent."""
        self._load.note(self._workload, notice)
        if notice.event == "moved":
            self._moved.append(notice)

    def arrived(self) -> None:
        """Handles the arrival of entries."""
        now = time.monotonic()
        self._load.resumed(self._workload, now - self._last)
        for notice in self._moved:
            self._load.moved(self._workload, notice, now - self._last)
        self._moved.clear()
        self._last = self._load.progress[self._workload.name] = now


@asynccontextmanager
async def clients_of(system: System, modules: dict[str, bytes]) -> AsyncIterator[Load]:
    """Uploads the modules, sends a buffer from each client, and then yields the clients."""
    clients = [AsyncClient(system.front, patience_s=600.0) for _ in range(CLIENTS)]
    # Connections are not reused, because a gateway that was stopped closes its idle connections.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    try:
        for tag, wasm in modules.items():
            await clients[0].upload_controller(wasm, tag)
        for client in clients:
            await client.buffer(PREFACE, PREFACE_TEXT)
        async with httpx.AsyncClient(timeout=HUNG_S, limits=limits, trust_env=False) as http:
            yield Load(system, clients, http)
    finally:
        for client in clients:
            await client.close()


FIRST = ("yacc 0", "arithmetic 0")
"""Requests that run alone before all others. They compile the grammars, and other workers then read
the tables from disk. A request waits only a limited time for a compilation."""


async def one_round(load: Load, workloads: Sequence[Workload]) -> list[Outcome]:
    """Runs the requests in ``FIRST`` alone, and then all requests once, at the same time. Returns
    the outcomes of all requests."""
    for first in workloads:
        if first.name in FIRST:
            await load.outcome(0, first)
    running = [load.outcome(i, workload) for i, workload in enumerate(workloads)]
    async with asyncio.timeout(HUNG_S):
        return await asyncio.gather(*running)


async def again_and_again(
    load: Load,
    workloads: Sequence[Workload],
    until: asyncio.Event,
    ended: Callable[[int, Outcome], None],
) -> None:
    """Repeats all requests at the same time until the event is set, then waits for their ends."""

    async def repeat(number: int, workload: Workload) -> None:
        while not until.is_set():
            ended(number, await load.outcome(number, workload))

    tasks: list[Awaitable[None]] = [
        asyncio.create_task(repeat(i, workload)) for i, workload in enumerate(workloads)
    ]
    everything = asyncio.gather(*tasks)
    waiting = asyncio.create_task(until.wait())
    await asyncio.wait((everything, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    async with asyncio.timeout(HUNG_S):
        await everything
