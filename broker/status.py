"""The broker's counters, and its answer to ``STATUS``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ..protocol.errors import Code, UnavailableError
from ..protocol.messages import PROTOCOL_VERSION, Status, StreamStatus, WorkerStatus
from ..protocol.metrics import Tally
from ..protocol.worker_messages import ANY_MODULE
from .dispatch import Dispatcher
from .tables import Request, Session

LISTED_S = 50e-6
"""Seconds for which a listed stream counts. Listing a stream takes the broker about 1 to 2 µs."""
MAX_LISTED_S = 1.0
"""A client may not list streams while its earlier lists count for longer than this."""


@dataclass(slots=True)
class Counters:
    """Totals since the broker started."""

    requests: int = 0
    refused: int = 0
    token_bodies: int = 0
    slow_clients: int = 0
    workers_lost: int = 0
    bad_worker_messages: int = 0
    internal_errors: int = 0
    """Exceptions that are defects of the broker; each is in its log."""
    errors: Tally = field(default_factory=lambda: Tally("errors", "code"))
    """The ERRORs of the broker itself, by code."""

    def totals(self) -> dict[str, int]:
        """The counters without labels, by name."""
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return {name: value for name, value in values if isinstance(value, int)}


def status_of(
    dispatcher: Dispatcher, sessions: int, counters: Counters, started: float, now: float
) -> Status:
    """The state of the broker's tables."""
    workers = [
        WorkerStatus(
            name=w.name,
            role=w.role,
            pid=w.pid,
            host=w.host,
            state=w.state.value,
            models=list(w.models),
            controllers=[p for p in w.patterns if w.role == "controller" and p != ANY_MODULE],
            requests=len(w.requests) + len(w.steers) + w.elsewhere,
            capacity=w.capacity,
            heartbeat_age_s=round(now - w.last_seen, 3),
            step_age_s=w.step_age_s,
            load=w.load,
            paths={m.name: m.path for m in w.models.values()} if w.role == "gpu" else {},
        )
        for w in sorted(dispatcher.workers.values(), key=lambda w: w.id)
    ]
    return Status(
        version=str(PROTOCOL_VERSION),
        uptime_s=round(now - started, 3),
        sessions=sessions,
        streams=len(dispatcher.requests),
        queued=dispatcher.queued,
        workers=workers,
        counters=counters.totals()
        | {
            "requests_moved": dispatcher.moves.moved,
            "requests_quarantined": dispatcher.moves.quarantined,
        },
    )


def add_metrics(status: Status, dispatcher: Dispatcher, counters: Counters) -> None:
    """Adds the broker's metrics, and those of each worker's last heartbeat."""
    by_name = {worker.name: worker for worker in dispatcher.workers.values()}
    for shown in status.workers:
        shown.metrics = by_name[shown.name].metrics
    waiting = Tally("num_requests_queued", "model_name")
    for (role, model), queue in dispatcher.queues.items():
        if role == "gpu":
            waiting.add(model or dispatcher.default_model(), len(queue))
    status.metrics = [*counters.errors.series(), *waiting.series()]


def check_lists(session: Session, shown: Iterable[Session], now: float) -> None:
    """Counts the list of the streams of ``shown`` for the key of a session. A session that carries
    users is counted separately, because its users share a key.

    Raises UnavailableError before a stream is listed. A list of thousands of streams takes the
    broker milliseconds, and a client can ask for hundreds of lists at the same time.
    """
    counted = session if session.carries_users else session.use
    ahead_s = counted.lists_until - now
    if ahead_s > MAX_LISTED_S:
        raise UnavailableError(
            Code.CLIENT_LIMIT,
            "this client has listed its streams too often; ask again later, or for fewer streams",
            retry_after_s=round(ahead_s - MAX_LISTED_S, 3),
        )
    num_streams = sum(len(each.streams) for each in shown)
    counted.lists_until = max(counted.lists_until, now) + LISTED_S * num_streams


def live_streams(
    dispatcher: Dispatcher, sessions: Iterable[Session] | None, now: float
) -> list[StreamStatus]:
    """The live streams of these sessions in the order of their arrival. None means all sessions."""
    requests: Iterable[Request]
    if sessions is None:
        requests = dispatcher.requests.values()
    else:
        # A client that asks repeatedly causes work only in proportion to its own streams.
        own = (request for session in sessions for request in session.streams.values())
        requests = sorted(own, key=lambda request: request.arrived)
    return [
        StreamStatus(
            request=r.id,
            type=r.type.decode(),
            state="waiting" if r.worker is None else "running",
            age_s=round(now - r.arrived, 3),
            client=r.session.client,
            model=r.model or (dispatcher.default_model() if r.role == "gpu" else ""),
            worker=r.worker.name if r.worker is not None else "",
            controller=r.controller,
            controller_worker=r.steered_by.name if r.steered_by is not None else "",
            priority=r.priority,
        )
        for r in requests
        if r.open
    ]
