"""The combined state of all brokers of a system. Each broker has its own sessions and streams. Each
worker registers with all brokers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import TracebackType

from ...protocol.endpoints import separate
from ...protocol.errors import TokenbusError
from ...protocol.messages import Status, WorkerStatus
from ...protocol.settings import Settings
from .. import Client


class Brokers:
    """The brokers at the addresses in the settings, with one connection to each."""

    def __init__(self, settings: Settings) -> None:
        self._open = ExitStack()
        self._clients = [
            self._open.enter_context(Client(address, patience_s=settings.command_timeout_s))
            for address in separate(settings.front_endpoint)
        ]
        self._timeout_s = settings.command_timeout_s
        self._silent: frozenset[str] = frozenset()

    def __enter__(self) -> Brokers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open.close()

    @property
    def shown(self) -> str:
        """The brokers' addresses for display. An address is marked if its broker did not answer the
        last STATUS."""
        names = [
            one.front + (" (does not answer)" if one.front in self._silent else "")
            for one in self._clients
        ]
        return f"broker{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def status(self, streams: bool = False) -> Status:
        """The combined state of the brokers that answer; raises TokenbusError if no broker
        answers."""
        ask = partial(_ask, streams, self._timeout_s)
        if len(self._clients) == 1:
            answers = [ask(self._clients[0])]
        else:
            with ThreadPoolExecutor(len(self._clients)) as pool:
                answers = list(pool.map(ask, self._clients))
        found = [answer for answer in answers if isinstance(answer, Status)]
        self._silent = frozenset(
            client.front
            for client, answer in zip(self._clients, answers, strict=True)
            if not isinstance(answer, Status)
        )
        for answer in answers:
            if not found and not isinstance(answer, Status):
                raise answer
        return merged(found)


def _ask(streams: bool, timeout_s: float, client: Client) -> Status | TokenbusError:
    try:
        return client.status(streams=streams, timeout_s=timeout_s)
    except TokenbusError as error:
        return error


def merged(found: Sequence[Status]) -> Status:
    """Combines the states of several brokers. Adds their counts, and joins their lists. The state
    of a worker is taken from the broker that received the worker's last message."""
    first, *others = found
    if not others:
        return first
    workers: dict[str, WorkerStatus] = {}
    for status in found:
        for worker in status.workers:
            known = workers.get(worker.name)
            if known is None or worker.heartbeat_age_s < known.heartbeat_age_s:
                workers[worker.name] = worker
    counters: Counter[str] = Counter()
    for status in found:
        counters.update(status.counters)
    live = [stream for status in found for stream in status.live]
    return Status(
        version=first.version,
        uptime_s=max(status.uptime_s for status in found),
        sessions=sum(status.sessions for status in found),
        streams=sum(status.streams for status in found),
        queued=sum(status.queued for status in found),
        workers=list(workers.values()),
        counters=dict(counters),
        paused={model: mode for status in found for model, mode in status.paused.items()},
        live=sorted(live, key=lambda stream: -stream.age_s),
    )
