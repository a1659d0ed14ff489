"""The life of a request: its states, the events that change its state, and its tables in each
state.

``TRANSITIONS`` has every change that is allowed. Only ``transition`` changes the state of a
request. It also moves the request between tables, so that a request is only in the tables of its
state. These are the tables:

- in ``QUEUED``: its queue;
- in ``MOVING``: the requests that have lost their worker;
- in ``RUNNING``, ``RETURNING`` and ``ENDED``: the requests of its worker;
- in ``QUEUED``, ``RUNNING``, ``MOVING`` and ``RETURNING``: the streams of its session;
- in all states but ``NEW`` and ``GONE``: the requests of the broker, their deadlines, the numbers
  of TOKENIZER requests by key, and the ids that log lines show.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from ..protocol import logs

if TYPE_CHECKING:
    from .request import Request
    from .state import BrokerState
    from .worker import Worker


class RequestState(StrEnum):
    """The state of a request."""

    NEW = "new"
    """The broker has not accepted the request yet."""
    QUEUED = "queued"
    """The request waits for its first worker."""
    RUNNING = "running"
    """A worker has the request."""
    MOVING = "moving"
    """The request's worker was lost. The request waits for another worker, with the entries that
    were routed."""
    RETURNING = "returning"
    """The request's worker was lost and has registered again, but its JOURNAL of the request has
    not arrived yet."""
    ENDED = "ended"
    """The request has ended for its client. Its worker still has the request, and will report the
    end."""
    GONE = "gone"
    """The request is not in any table."""


class Event(StrEnum):
    """Something that changes the state of a request."""

    QUEUE = "queue"
    """The request is accepted, and no worker has room for it."""
    START = "start"
    """The request is sent to a worker."""
    ADOPT = "adopt"
    """A worker has reported a request that another broker, or an earlier run, had accepted."""
    REFUSE = "refuse"
    """The worker has not begun the request, because requests of other brokers take its room."""
    LOSE = "lose"
    """The worker is lost, or does not have the request any more."""
    RETURN = "return"
    """The process that had the request registers again."""
    REPORT = "report"
    """The process that has registered again has sent its JOURNAL of the request."""
    CLOSE = "close"
    """The broker ends the request for its client, before the worker reports the end."""
    END = "end"
    """The last message of the request was routed, or the broker ends a request that no worker
    has."""
    WITHDRAW = "withdraw"
    """The request continues at another broker, or another worker reported a later copy of the
    request."""


_NEW, _QUEUED, _RUNNING, _MOVING, _RETURNING, _ENDED, _GONE = RequestState

TRANSITIONS: dict[RequestState, dict[Event, RequestState]] = {
    _NEW: {
        Event.QUEUE: _QUEUED,
        Event.START: _RUNNING,
        Event.ADOPT: _RUNNING,
    },
    _QUEUED: {
        Event.START: _RUNNING,
        Event.END: _GONE,
    },
    _RUNNING: {
        Event.REFUSE: _QUEUED,
        Event.LOSE: _MOVING,
        Event.CLOSE: _ENDED,
        Event.END: _GONE,
        Event.WITHDRAW: _GONE,
    },
    _MOVING: {
        Event.START: _RUNNING,
        Event.RETURN: _RETURNING,
        Event.END: _GONE,
        Event.WITHDRAW: _GONE,
    },
    _RETURNING: {
        Event.REPORT: _RUNNING,
        Event.LOSE: _MOVING,
        Event.CLOSE: _ENDED,
        Event.END: _GONE,
        Event.WITHDRAW: _GONE,
    },
    _ENDED: {
        Event.END: _GONE,
        Event.WITHDRAW: _GONE,
    },
    _GONE: {},
}

OPEN = frozenset((_NEW, _QUEUED, _RUNNING, _MOVING, _RETURNING))
"""The states in which the client waits for the request."""
AT_WORKER = frozenset((_RUNNING, _RETURNING, _ENDED))
"""The states in which a worker has the request."""
TAKEN = frozenset((Event.START, Event.ADOPT, Event.RETURN))
"""The events with which a worker gets the request."""


class NoTransitionError(Exception):
    """A bug in the broker: ``TRANSITIONS`` does not allow this event in the state of a request."""

    def __init__(self, request: Request, event: Event) -> None:
        super().__init__(f"request {request.id} is {request.state} and cannot {event}")
        self.request = request


def transition(
    state: BrokerState, request: Request, event: Event, worker: Worker | None = None
) -> None:
    """Changes the state of a request, and moves the request to the tables of its new state.
    ``worker``: the worker that gets the request, if the event is in ``TAKEN``.

    Raises NoTransitionError if the change is not allowed; no table has then changed.
    """
    before = request.state
    after = TRANSITIONS[before].get(event)
    if after is None:
        raise NoTransitionError(request, event)
    if before is _NEW:
        _enter_broker(state, request)
    elif before is _QUEUED:
        state.queues.remove(request)
    elif before is _MOVING:
        state.waiting.remove(request)
    elif after not in AT_WORKER:
        _leave_worker(state, request)
    request.state = after
    if after is _QUEUED:
        state.queues.push(request)
    elif after is _MOVING:
        state.waiting.add(request)
    elif event in TAKEN:
        assert worker is not None
        request.worker, request.dispatched = worker, state.now
        worker.take(request)
        state.pools.note(worker)
    if before in OPEN and after not in OPEN:
        del request.session.streams[request.stream_id]
    if after is _GONE:
        _leave_broker(state, request)


def _enter_broker(state: BrokerState, request: Request) -> None:
    state.requests[request.id] = request
    request.session.streams[request.stream_id] = request
    state.deadlines.add(request)
    if request.type == b"TOKENIZER":
        state.tokenizers[request.session.key] += 1
    logs.begin(request.id, request.fields.request_id, request.trace)


def _leave_broker(state: BrokerState, request: Request) -> None:
    del state.requests[request.id]
    state.deadlines.remove(request)
    if request.type == b"TOKENIZER":
        state.tokenizers[request.session.key] -= 1
        state.tokenizers = +state.tokenizers
    logs.end(request.id)


def _leave_worker(state: BrokerState, request: Request) -> None:
    worker = request.worker
    assert worker is not None
    del worker.requests[request.id]
    worker.in_flight.remove(request.id)
    state.pools.note(worker)
    request.worker = None
