"""The broker's answer to STATUS."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.bodies import decode_as, encode_body
from ..protocol.errors import Code, UnavailableError
from ..protocol.messages import (
    PROTOCOL_VERSION,
    Msg,
    Status,
    StatusRequest,
    StreamStatus,
    WorkerStatus,
)
from ..protocol.metrics import Tally
from ..protocol.worker_messages import ANY_MODULE
from .outgoing import Outgoing, Side
from .request import Request
from .session import Session
from .state import BrokerState
from .tools import Tools

LISTED_S = 50e-6
"""Seconds by which a listing moves ``KeyUse.lists_until`` for each stream in the list. Listing a
stream takes the broker about 1 to 2 µs."""
MAX_LISTED_S = 1.0
"""A client may not list streams while its ``lists_until`` is more than this number of seconds in
the future."""


class Statuses:
    """Answers STATUS. The answer lists only those live streams that the client may see."""

    def __init__(self, state: BrokerState, tools: Tools) -> None:
        self._state = state
        self._tools = tools

    def on_status(self, session: Session, frames: list[bytes]) -> None:
        """Handles a client's STATUS."""
        message: StatusRequest = decode_as(StatusRequest, frames[1])
        state = self._state
        shown = self._shown_to(session, message.own) if message.streams else []
        if shown and not self._state.is_operator(session):
            check_lists(session, shown, state.now)
        if shown or message.tools or message.metrics:
            state.sessions.unread.check(
                session.peer,
                state.settings.max_pending_bytes,
                "a list of streams, tools or metrics",
                "read the earlier answers first",
            )
        described = self._tools.described(session, message.tools, carried=message.own)
        status = status_of(state)
        status.tools = described
        if message.streams:
            status.live = live_streams(state, shown)
        if message.metrics:
            add_metrics(status, state)
        answer = Msg(stream_id=message.stream_id, status=status)
        if session.peer is not None:
            body = encode_body(answer, session.encoding)
            state.sessions.unread.add(session.peer, len(body))
            state.out.append(Outgoing(Side.FRONT, session.peer, (b"MSG", body), True))

    def _shown_to(self, session: Session, own: bool) -> list[Session] | None:
        """The sessions whose streams a client may see; None stands for all sessions.

        The operator sees all sessions, and another client sees the sessions of its key. A gateway,
        or a client that requests its ``own`` streams, sees only its own session.
        """
        if own or session.carries_users:
            return [session]
        if self._state.is_operator(session):
            return None
        return self._state.sessions.of_key(session.key)


def status_of(state: BrokerState) -> Status:
    """The state of the broker's tables."""
    now = state.now
    workers = [
        WorkerStatus(
            name=w.name,
            role=w.role,
            pid=w.pid,
            host=w.host,
            state=w.state.value,
            models=list(w.models),
            controllers=[p for p in w.patterns if w.role == "controller" and p != ANY_MODULE],
            tools=list(w.tools),
            missing_layers=w.missing_layers,
            requests=w.num_assigned,
            capacity=w.capacity,
            heartbeat_age_s=round(now - w.last_seen, 3),
            step_age_s=w.step_age_s,
            load=w.load,
            paths={m.name: m.path for m in w.models.values()} if w.role == "gpu" else {},
        )
        for w in sorted(state.workers.values(), key=lambda w: w.id)
    ]
    return Status(
        version=str(PROTOCOL_VERSION),
        uptime_s=round(now - state.started, 3),
        sessions=len(state.sessions),
        streams=len(state.requests),
        queued=state.num_queued,
        workers=workers,
        counters=state.counters.totals(),
        paused={s.model: s.paused for s in state.states.values() if s.paused is not None},
    )


def add_metrics(status: Status, state: BrokerState) -> None:
    """Adds the broker's own metrics, and the metrics of each worker's last heartbeat."""
    by_name = {worker.name: worker for worker in state.workers.values()}
    for shown in status.workers:
        shown.metrics = by_name[shown.name].metrics
    waiting = Tally("num_requests_queued", "model_name")
    for (role, model), queue in state.queues.items():
        if role == "gpu":
            waiting.add(model or state.pools.default_model, len(queue))
    status.metrics = [*state.counters.errors.series(), *waiting.series()]


def check_lists(session: Session, shown: Iterable[Session], now: float) -> None:
    """Limits how often the clients of a key list streams. For each listed stream,
    ``KeyUse.lists_until`` moves by ``LISTED_S`` into the future. ``shown``: the sessions whose
    streams are listed. If ``session`` is a gateway's, ``Session.lists_until`` is used instead,
    because all users of the gateway share a key.

    Raises UnavailableError if this time is more than ``MAX_LISTED_S`` in the future. Without this
    bound, a client could request hundreds of listings at the same time. A listing of thousands of
    streams takes the broker milliseconds.
    """
    counted = session if session.carries_users else session.use
    ahead_s = counted.lists_until - now
    if ahead_s > MAX_LISTED_S:
        raise UnavailableError(
            Code.CLIENT_LIMIT,
            "this client has listed its streams too often; list them later, or list fewer streams",
            retry_after_s=round(ahead_s - MAX_LISTED_S, 3),
        )
    num_streams = sum(len(each.streams) for each in shown)
    counted.lists_until = max(counted.lists_until, now) + LISTED_S * num_streams


def live_streams(state: BrokerState, sessions: Iterable[Session] | None) -> list[StreamStatus]:
    """The live streams of these sessions, in the order of their arrival. None stands for all
    sessions."""
    requests: Iterable[Request]
    if sessions is None:
        requests = state.requests.values()
    else:
        # Only the given sessions are visited, so that a client with few streams causes little work.
        own = (request for session in sessions for request in session.streams.values())
        requests = sorted(own, key=lambda request: request.arrived)
    return [
        StreamStatus(
            request=r.id,
            type=r.type.decode(),
            state="waiting" if r.worker is None else "running",
            age_s=round(state.now - r.arrived, 3),
            client=r.session.client,
            model=r.model or (state.pools.default_model if r.role == "gpu" else ""),
            worker=r.worker.name if r.worker is not None else "",
            controller=r.controller,
            controller_worker=r.steered_by.name if r.steered_by is not None else "",
            priority=r.priority,
        )
        for r in requests
        if r.open
    ]
